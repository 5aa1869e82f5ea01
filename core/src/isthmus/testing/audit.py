"""What became of every tensor and every bit: coverage, round trip, and the dtypes of the parameters."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from isthmus.checkpoint.dtypes import rounds, same_bits
from isthmus.checkpoint.export import plan, stream
from isthmus.checkpoint.gather import from_all
from isthmus.checkpoint.load import shared
from isthmus.checkpoint.reader import CheckpointReader
from isthmus.names import live_tensors, unwrapped
from isthmus.weights import WeightMap


def coverage(
    chunks: Sequence[nn.Module], weights: WeightMap, reader: CheckpointReader, misshapen: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """The `coverage` section of the model over all ranks, and its gaps, a line each. Collective.

    `misshapen` says what is wrong with the shape of a tensor, by HF name.
    """
    held = sorted(set().union(*from_all({live.canonical for live in live_tensors(chunks)})))
    found = weights.cover(reader.tensors, megatron=held)
    section = {
        "hf_tensors": len(reader.tensors),
        "megatron_params": len(held),
        "loaded": len(found.loaded - misshapen.keys()),
        "passed_through": sorted(found.passed_through),
        "dropped": found.dropped,
        "shared": shared(weights),
        "missing_hf": sorted(found.missing),
        "wrong_shapes": {name: what for name, what in misshapen.items() if name in found.loaded},
        "unmapped_hf": sorted(found.unknown),
        "unmapped_megatron": found.unmapped,
        "unheld_megatron": sorted(found.unheld),
    }
    for name, what in misshapen.items():
        if name in found.loaded:
            found.misfit(what, name)
    return section, found.problems()


def round_trip(
    chunks: Sequence[nn.Module], weights: WeightMap, reader: CheckpointReader
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The `roundtrip` and `dtypes` sections of a loaded model; alike on every rank. Collective.

    One export in the parameters' own dtypes serves both: brought back to the source's dtype its bits must be
    the source's; and a float32 parameter's own bits must be the source's widened, for another value may still
    come back as the source's.
    """
    held = list(live_tensors(chunks))
    order = {name: position for position, name in enumerate(reader.tensors)}
    planned = plan(held, unwrapped(chunks[0]), weights, order=order)
    exported, mismatched, rounded = set(), set(), set()
    for name, tensor in stream(planned, everywhere=False):
        exported.add(name)
        if name not in reader.tensors:
            mismatched.add(name)
            continue
        source, tensor = reader.slice(name), tensor.cpu()
        if not same_bits(tensor.to(source.dtype), source):
            mismatched.add(name)
        if tensor.dtype == torch.float32 and not same_bits(tensor, source.float()):
            rounded.update(weights.hf[name])
    for live in held:
        sources = [tensor.name for tensor in weights.megatron[live.canonical].hf]
        if any(rounds(reader.tensors[name].dtype, live.tensor.dtype) for name in sources):
            rounded.add(live.canonical)
    wide = {
        live.canonical
        for live in held
        if isinstance(live.tensor, nn.Parameter) and live.tensor.dtype == torch.float32
    }
    everyone = from_all((exported, mismatched, rounded, wide))
    exported, mismatched, rounded, wide = (set().union(*kind) for kind in zip(*everyone, strict=True))
    mismatched |= weights.cover(reader.tensors).loaded - exported
    trip = {"tensors": len(exported), "bitwise_equal": not mismatched, "mismatched": sorted(mismatched)}
    return trip, {"fp32_params": sorted(wide), "rounded": sorted(rounded)}


# A matrix takes numbers of size 1 to numbers of about this size: what a model can be trained to. Codes taken
# for numbers, or a scale applied the wrong way round, are beyond.
PLAUSIBLE = (1e-3, 1e2)


def quantised(reader: Any) -> dict[str, Any] | None:
    """The `quantisation` section, None for a plain checkpoint; alike on every rank, which divide the work.

    `gain` of a matrix is its root mean square times the square root of its columns.
    """
    items = list(getattr(reader, "quantised", {}).items())
    if not items:
        return None
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine: dict[str, float] = {}
    for name, item in items[rank::size]:
        for index in range(item.shape[0]) if len(item.shape) == 3 else [None]:
            values = reader.slice(name, index=index).float()
            label = name if index is None else f"{name}[{index}]"
            mine[label] = (values.square().mean().sqrt() * values.shape[-1] ** 0.5).item()
    gains = {name: gain for found in from_all(mine) for name, gain in found.items()}
    least, most = PLAUSIBLE
    return {
        "formats": dict(Counter(item.label for _, item in items)),
        "tensors": len(items),
        "gain": [min(gains.values()), max(gains.values())],
        "implausible": {name: gain for name, gain in gains.items() if not least <= gain <= most},
    }
