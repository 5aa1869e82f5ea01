"""What leaves a bridge's model: planned in the checkpoint's names and dtypes, and streamed.

`source` is everywhere the bridge: its `reader` has the checkpoint's tensors, its `weight_map` the rules.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from isthmus.built import model_config_of
from isthmus.checkpoint.collector import collector_paused
from isthmus.checkpoint.dtypes import as_dtype
from isthmus.checkpoint.export import ExportPlan, plan, stream
from isthmus.checkpoint.requantise import Requantiser
from isthmus.names import live_tensors, unwrapped


def requantiser_of(source: Any, dtype: torch.dtype | str) -> Requantiser | None:
    """What writes a quantised source's format again, where `dtype` asks for it; else None."""
    quantised = source.folder is not None and getattr(source.reader, "quantised", None)
    return Requantiser(source.reader) if quantised and dtype == "source" else None


@collector_paused()
def plan_of(
    source: Any, chunks: Sequence[nn.Module], dtype: torch.dtype | str, *, written: bool = False
) -> ExportPlan:
    """The export of the model's chunks; `written`: to files, where rows can be put in place. Collective."""
    known = source.reader.tensors if source.folder is not None else {}
    wanted, requantiser = as_dtype(dtype), requantiser_of(source, dtype)

    def dtype_of(name: str, held: torch.dtype) -> torch.dtype:
        if wanted is not None and held.is_floating_point:
            return wanted
        if requantiser is not None and name in requantiser:
            return held  # rounded once: to its codes
        return known[name].dtype if name in known else held

    order = {name: position for position, name in enumerate(known)}
    return plan(
        list(live_tensors(chunks)),
        unwrapped(chunks[0]),
        source.weight_map(model_config_of(chunks)),
        dtype_of=dtype_of,
        order=order or None,
        in_place=lambda name: written and (requantiser is None or name not in requantiser),
    )


def stream_of(
    source: Any,
    chunks: Sequence[nn.Module],
    *,
    dtype: torch.dtype | str = "auto",
    cpu: bool = True,
    ranks: str = "all",
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(what stands for the atomic group, HF name, tensor) of `AutoBridge.export_hf_weights`. Collective."""
    if ranks not in ("all", "owner"):
        raise ValueError(f"ranks must be 'all' or 'owner', got {ranks!r}")
    weights, requantiser = source.weight_map(model_config_of(chunks)), requantiser_of(source, dtype)
    for name, tensor in stream(plan_of(source, chunks, dtype), everywhere=ranks == "all"):
        group = weights.group(name)
        if requantiser is None or name not in requantiser:
            yield group, name, tensor.cpu() if cpu else tensor
        else:
            for stored, part in requantiser.whole(name, tensor):
                yield group, stored, part if cpu else part.to(tensor.device)
