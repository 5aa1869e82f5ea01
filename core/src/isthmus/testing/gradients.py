"""Megatron's gradients under Hugging Face's names: moved by the weight map, like the weights themselves."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isthmus.checkpoint.export import ExportPlan, plan
from isthmus.checkpoint.gather import from_all
from isthmus.checkpoint.unpack import Piece
from isthmus.names import LiveTensor, live_tensors, unwrapped
from isthmus.testing.numerics import Difference
from isthmus.weights import WeightMap

WORST = 20  # parameters listed by name
# Of the RMS of all gradients. One that is smaller on both sides, and so is the difference, is rounding of a
# sum that is zero: of the bias of attention's keys, which moves all scores of a query alike.
NOISE = 1e-6


def compare(
    chunks: Sequence[nn.Module], weights: WeightMap, expected: Mapping[str, Tensor] | None
) -> dict[str, Any] | None:
    """The `gradients` section on the first rank, None elsewhere. Collective.

    Args:
        weights: the map in the reference's names (its experts may be stacked where the checkpoint's are not).
        expected: HF's gradients by name, on the first rank; None elsewhere.
    """
    norm = megatron_norm(chunks)
    held = [
        LiveTensor(live.canonical, live.live, live.tensor.main_grad)  # type: ignore[attr-defined]
        for live in live_tensors(chunks)
        if isinstance(live.tensor, nn.Parameter)
        and live.tensor.requires_grad
        # A last stage with an MTP block allocates a tied head, and uses its copy of the embedding instead.
        and weights.megatron[live.canonical].rule.exported
    ]
    planned = plan(held, unwrapped(chunks[0]), _only(weights, {live.canonical for live in held}))
    found: dict[str, Difference] = {}
    for piece in _to_first(planned):
        name, index = piece.name, piece.index
        if expected is not None and name in expected:  # else: a tied tensor under its second name
            reference = expected[name] if index is None else expected[name][index]
            found.setdefault(name, Difference()).add(piece.tensor, reference)
    if expected is None:
        return None
    return _section(found, expected, norm)


def _section(found: Mapping[str, Difference], expected: Mapping[str, Tensor], norm: float) -> dict[str, Any]:
    total = Difference()
    for each in found.values():
        total.join(each)
    # A frozen parameter is not missing where HF gives it no gradient either.
    missing = sorted(name for name in expected.keys() - found.keys() if expected[name].any())
    noise = _noise(found, expected, total)
    ranked = sorted(found.keys() - noise, key=lambda name: _badness(found[name].rel_rms), reverse=True)
    expected_norm = math.sqrt(sum(g.double().square().sum().item() for g in expected.values()))
    return {
        "rel_rms": math.inf if missing else total.rel_rms,
        "rel_rms_max": math.inf if missing else found[ranked[0]].rel_rms,
        "worst": missing[0] if missing else ranked[0],
        "params": len(found),
        "missing": missing,
        "zero": sorted(noise),
        "grad_norm": norm,
        "hf_grad_norm": expected_norm,
        "grad_norm_rel_err": abs(norm - expected_norm) / expected_norm if expected_norm else math.inf,
        "worst_params": [
            {
                "name": name,
                "rel_rms": found[name].rel_rms,
                "hf_rms": math.sqrt(found[name].expected_squares / expected[name].numel()),
            }
            for name in ranked[:WORST]
        ],
    }


def _noise(
    found: Mapping[str, Difference], expected: Mapping[str, Tensor], total: Difference
) -> frozenset[str]:
    """Parameters whose true gradient is zero, and which rounding alone makes differ: not to be ranked.

    On both sides their RMS is below `NOISE` of the RMS of all gradients, and so is their difference, which is
    not 0: relative to themselves they may differ by any factor.
    """
    count = sum(expected[name].numel() for name in found)
    limit = NOISE**2 * total.expected_squares / max(1, count)
    return frozenset(
        name
        for name, each in found.items()
        if each.squares and max(each.squares, each.expected_squares) <= limit * expected[name].numel()
    )


def _badness(value: float) -> float:
    """Orders NaN with the worst."""
    return math.inf if math.isnan(value) else value


def rounding(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> tuple[float, float]:
    """(over all, worst single) rel_rms of one set of gradients against another of the same names."""
    total, worst = Difference(), 0.0
    for name, gradient in exact.items():
        each = Difference()
        each.add(found[name], gradient)
        total.join(each)
        worst = max(worst, each.rel_rms)
    return total.rel_rms, worst


def megatron_norm(chunks: Sequence[nn.Module]) -> float:
    """The global gradient norm by Megatron's optimizer, which counts each parameter once. Collective."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = unwrapped(chunks[0]).config
    options = OptimizerConfig(
        optimizer="sgd", lr=0.0, bf16=config.bf16, fp16=config.fp16, params_dtype=config.params_dtype
    )
    model: Any = list(chunks)
    optimizer = get_megatron_optimizer(options, model)
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def _only(weights: WeightMap, own: set[str]) -> WeightMap:
    """The map of trained parameters alone: buffers and frozen ones have no gradient. Collective."""
    trained = set().union(*from_all(own))
    result = copy.copy(weights)
    result.megatron = {name: bound for name, bound in weights.megatron.items() if name in trained}
    return result


def _to_first(planned: ExportPlan) -> Iterator[Piece]:
    """Every piece on the first rank, nothing elsewhere: owners send theirs there. Collective."""
    for item, found in planned.steps():
        if item.owner == 0 == planned.rank:
            yield from found
        elif planned.rank == item.owner:
            for piece in found:
                dist.send(piece.tensor.contiguous(), 0)
        elif planned.rank == 0:
            for hf in (*item.bound.hf, *item.bound.also):
                output = planned.outputs[hf.name]
                shape = output.shape if hf.index is None else output.shape[1:]
                tensor = torch.empty(shape, dtype=output.dtype, device=planned.device)
                dist.recv(tensor, item.owner)
                yield Piece(hf.name, hf.index, [tensor])
