"""What a Megatron model gave beside what Hugging Face gave: the numbers, and what they may be."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isthmus.testing import gradients, reference, training_step
from isthmus.testing.batch import Batch
from isthmus.testing.numerics import (
    FLOAT32,
    Bounds,
    argmax_agreement,
    difference,
    kl,
    rel_rms,
    rounded_bounds,
    within,
)


class Expected(NamedTuple):
    """What the reference gave, the names of its tensors, and how far from it one may be."""

    outputs: reference.Outputs
    names: frozenset[str]
    bounds: Bounds


def expected(
    bridge: Any, model_config: Any, batch: Batch, dtype: torch.dtype, *, with_gradients: bool
) -> Expected:
    """Load the bridge's checkpoint into HF's model and run it; in another dtype than float32, run both.

    LookupError where the model has a prediction block and the family no reference of it.
    """
    depth = model_config.mtp_num_layers
    name = bridge.family.mtp_reference if depth else None
    if depth and name is None:
        raise LookupError(
            f"family {bridge.family.name} has no reference of its prediction block (mtp_reference)."
            " Try: mtp_num_layers=None (--set mtp_num_layers=none)"
        )
    weight = model_config.mtp_loss_scaling_factor / depth if depth else 0.0
    model = reference.load(
        bridge.folder, torch.float32, name, vision=bool(batch.inputs), fields=bridge.overruled
    )
    exact = reference.run(model, batch, gradients=with_gradients, mtp_weight=weight)
    if dtype == torch.float32:
        return Expected(exact, model.names(), FLOAT32)
    model = reference.Model(model.hf.to(dtype), model.mtp.to(dtype) if model.mtp else None)
    rounded = reference.run(model, batch, gradients=with_gradients, mtp_weight=weight)
    places = [(rounded.logits, exact.logits), *zip(rounded.layers, exact.layers, strict=True)]
    if rounded.mtp_logits is not None and exact.mtp_logits is not None:
        places.append((rounded.mtp_logits, exact.mtp_logits))
    moved = max(rel_rms(found, true) for found, true in places)
    bounds = rounded_bounds(moved, *gradients.rounding(rounded.gradients, exact.gradients))
    return Expected(rounded, model.names(), bounds)


def forward(
    found: training_step.Recorded, outputs: reference.Outputs, batch: Batch, bounds: Bounds
) -> dict[str, Any]:
    """The `forward` section."""
    assert found.logits is not None
    layers = [
        {"layer": number, "rel_rms": rel_rms(found.layers[number], output)}
        for number, output in enumerate(outputs.layers)
    ]
    diverging = [row["layer"] for row in layers if not within(row["rel_rms"], bounds.forward)]
    mtp: dict[str, Any] | None = None
    if outputs.mtp_logits is None or found.mtp_logits is None:
        if outputs.mtp_logits is not found.mtp_logits:  # one side alone has a prediction block
            absent = "Megatron" if found.mtp_logits is None else "Hugging Face"
            mtp = {"rel_rms": math.inf, "max_abs": math.inf, "kl": math.inf, "argmax_agreement": 0.0}
            mtp |= {"hf_loss": outputs.mtp_loss, "absent_from": absent}
    else:
        # A sequence's last token has no next one to join; Megatron runs it on a made-up one, without loss.
        kept = torch.cat([torch.arange(len(s) - 1) < len(s) - 2 for s in batch.sequences])
        mtp = _logits(found.mtp_logits[kept], outputs.mtp_logits) | {"hf_loss": outputs.mtp_loss}
    return {
        **_logits(found.logits, outputs.logits),
        "layers": layers,
        "first_diverging_layer": diverging[0] if diverging else None,
        "mtp": mtp,
        "tokens": batch.tokens,
        "loss": found.loss,
        "hf_loss": outputs.loss,
    }


def failures(bounds: Bounds, forward: dict[str, Any], grads: dict[str, Any] | None) -> list[str]:
    """What is out of bounds, a line each; `grads` is the `gradients` section, None where not asked for."""
    from isthmus.weights import collapse

    lines = []

    def check(what: str, value: float, bound: float) -> None:
        if not within(value, bound):
            lines.append(f"{what} differ by {value:.2e}, at most {bound:.0e} is allowed")

    check("logits", forward["rel_rms"], bounds.forward)
    if (first := forward["first_diverging_layer"]) is not None:
        check(f"hidden states, from layer {first} on,", forward["layers"][first]["rel_rms"], bounds.forward)
    if forward["mtp"] and (absent := forward["mtp"].get("absent_from")):
        lines.append(f"no logits of the prediction block from {absent}")
    elif forward["mtp"]:
        check("logits of the prediction block", forward["mtp"]["rel_rms"], bounds.forward)
    if grads:
        if grads["missing"]:
            lines.append(f"no gradient for {', '.join(collapse(grads['missing']))}")
        check("gradients", grads["rel_rms"], bounds.gradients)
        check(f"gradients of {grads['worst']}", grads["rel_rms_max"], bounds.worst_gradient)
        check("gradient norms", grads["grad_norm_rel_err"], bounds.gradients)
    return lines


def _logits(found: Tensor, expected: Tensor) -> dict[str, float]:
    apart = difference(found, expected)
    return {
        "rel_rms": apart.rel_rms,
        "max_abs": apart.max_abs,
        "kl": kl(found, expected),
        "argmax_agreement": argmax_agreement(found, expected),
    }
