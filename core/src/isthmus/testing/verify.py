"""The proof that a Megatron model is the Hugging Face model: the engine behind `isthmus verify`.

Runs on every rank; the first holds the reference and makes the document. Two models are built: one as a run
would train it, in the checkpoint's dtype, whose bits are audited; and one in the dtype of the comparison,
which runs (the same one, where the dtypes are the same).
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from isthmus.checkpoint.load import main_dtype
from isthmus.testing import audit, gradients, reference, training_step
from isthmus.testing.batch import Batch, random_batch
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

if TYPE_CHECKING:
    from isthmus.bridge import AutoBridge
    from isthmus.layout import Layout

type Watch = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Request:
    """What to prove, and on which tokens."""

    dtype: torch.dtype = torch.float32  # of both models in the comparison
    grads: bool = False
    packed: bool = False
    tokens: int = 32  # of a sequence
    seed: int = 0
    overrides: dict[str, Any] = field(default_factory=dict)  # fields of the model config

    def check(self, layout: "Layout") -> None:
        """ValueError where the tokens cannot be divided over the layout."""
        if self.tokens < 2:
            raise ValueError(f"cannot compare sequences of {self.tokens} tokens; use at least 2")
        row = 2 * self.tokens if self.packed else self.tokens
        tp, cp = layout.tp if layout.sequence_parallel else 1, layout.cp
        if cp == 1 and row % tp:
            raise ValueError(
                f"cannot divide rows of {row} tokens over tp={tp}; use a multiple of it for --tokens"
            )
        multiple = math.lcm(2 * cp, cp * tp)  # zigzag halves a rank's tokens; packed ones are padded
        if cp > 1 and not self.packed and row % multiple:
            raise ValueError(
                f"cannot divide rows of {row} tokens over tp x cp = {tp} x {cp}; use multiples of {multiple} "
                "for --tokens"
            )


def verify(bridge: "AutoBridge", layout: "Layout", request: Request, watch: Watch) -> dict[str, Any]:
    """The document of `verify --json`, whole on the first rank; elsewhere without the comparison. Collective.

    Sections not asked for, or not reached because an earlier one failed, are None. `failures` says in words
    what did not pass.
    """
    document: dict[str, Any] = {
        "model_type": bridge.hf_config.model_type,
        "layout": layout.as_dict(),
        "dtype": str(request.dtype).removeprefix("torch."),
        "passed": False,
        "failures": [],
        **dict.fromkeys(("coverage", "roundtrip", "dtypes", "forward", "gradients", "bounds")),
    }
    source_dtype = main_dtype(bridge.reader.tensors.values()) or request.dtype
    same = source_dtype == request.dtype
    with watch("build"):
        chunks = _build(bridge, layout, request, source_dtype, with_ddp=same and request.grads)
    weights = bridge.weight_map(_model_config(chunks))
    document["coverage"] = audit.coverage(chunks, weights, bridge.reader)
    if _failed(document, audit.gaps(document["coverage"])):
        return document
    with watch("load"):
        problem = _load(bridge, chunks)
    if _failed(document, [problem] if problem else []):
        return document
    with watch("export"):
        document["roundtrip"], document["dtypes"] = audit.round_trip(chunks, weights, bridge.reader)
    if not same:
        del chunks
        with watch("build_for_forward"):
            chunks = _build(bridge, layout, request, request.dtype, with_ddp=request.grads)
        with watch("load_for_forward"):
            bridge.load_hf_weights(chunks)
    _compare(bridge, layout, request, watch, chunks, document)
    _failed(document, _failures(document))
    return document


def _build(
    bridge: "AutoBridge", layout: "Layout", request: Request, dtype: torch.dtype, *, with_ddp: bool
) -> list[Any]:
    overrides = {**request.overrides, **layout.config_overrides(), "params_dtype": dtype}
    config = bridge.get_model_config(**overrides, calculate_per_token_loss=True)
    return bridge.build_model(config, wrap_with_ddp=with_ddp)


def _model_config(chunks: list[Any]) -> Any:
    from isthmus.bridge import model_config_of

    return model_config_of(chunks)


def _load(bridge: "AutoBridge", chunks: list[Any]) -> str | None:
    """Load; why it cannot be done, alike on every rank. Collective."""
    problem = None
    try:
        bridge.load_hf_weights(chunks)
    except ValueError as error:
        problem = str(error)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, problem)
    return next((found for found in everyone if found), None)


def _compare(
    bridge: "AutoBridge",
    layout: "Layout",
    request: Request,
    watch: Watch,
    chunks: list[Any],
    document: dict[str, Any],
) -> None:
    """Fill in `forward` and `gradients`, on the first rank. Collective."""
    config = _model_config(chunks)
    batch = random_batch(
        bridge.hf_config["vocab_size"],
        tokens=request.tokens,
        seed=request.seed,
        ranks=layout.dp,
        microbatches=max(2, layout.pp),
        packed=request.packed,
        tp=layout.tp,
        cp=layout.cp,
    )
    with watch("forward"):
        found = training_step.run(chunks, batch, gradients=request.grads)
    model, expected = None, None
    if found is not None:
        with watch("reference"):
            model, expected, bounds = _reference(bridge, request, config, batch)
        document["bounds"] = bounds.as_dict()
        document["forward"] = _forward(found, expected, batch, bounds)
    if not request.grads:
        return
    keys: list[Any] = [model.names() if model else None]
    dist.broadcast_object_list(keys, src=0)
    with watch("gradients"):
        weights = bridge.weight_map(config, keys[0])
        document["gradients"] = gradients.compare(chunks, weights, expected.gradients if expected else None)


def _reference(
    bridge: "AutoBridge", request: Request, config: Any, batch: Batch
) -> tuple[reference.Model, reference.Outputs, Bounds]:
    """The reference, what it gave, and how far from that one may be."""
    assert bridge.folder is not None
    name = bridge.family.mtp_reference if config.mtp_num_layers else None
    if config.mtp_num_layers and name is None:
        raise LookupError(
            f"family {bridge.family.name} has no reference of its prediction block (mtp_reference)."
            " Try: --set mtp_num_layers=none"
        )
    weight = config.mtp_loss_scaling_factor / config.mtp_num_layers if config.mtp_num_layers else 0.0
    model = reference.load(bridge.folder, torch.float32, name)
    expected = reference.run(model, batch, gradients=request.grads, mtp_weight=weight)
    if request.dtype == torch.float32:
        return model, expected, FLOAT32
    exact = expected
    model = reference.Model(model.hf.to(request.dtype), model.mtp.to(request.dtype) if model.mtp else None)
    expected = reference.run(model, batch, gradients=request.grads, mtp_weight=weight)
    places = [(expected.logits, exact.logits), *zip(expected.layers, exact.layers, strict=True)]
    if expected.mtp_logits is not None and exact.mtp_logits is not None:
        places.append((expected.mtp_logits, exact.mtp_logits))
    moved = max(rel_rms(rounded, true) for rounded, true in places)
    return model, expected, rounded_bounds(moved, *gradients.rounding(expected.gradients, exact.gradients))


def _forward(
    found: training_step.Recorded, expected: reference.Outputs, batch: Batch, bounds: Bounds
) -> dict[str, Any]:
    """The `forward` section."""
    assert found.logits is not None
    layers = [
        {"layer": number, "rel_rms": rel_rms(found.layers[number], output)}
        for number, output in enumerate(expected.layers)
    ]
    diverging = [row["layer"] for row in layers if not within(row["rel_rms"], bounds.forward)]
    mtp = None
    if expected.mtp_logits is not None and found.mtp_logits is not None:
        # A sequence's last token has no next one to join; Megatron runs it on a made-up one, without loss.
        kept = torch.cat([torch.arange(len(s) - 1) < len(s) - 2 for s in batch.sequences])
        mtp = _logits(found.mtp_logits[kept], expected.mtp_logits) | {"hf_loss": expected.mtp_loss}
    return {
        **_logits(found.logits, expected.logits),
        "layers": layers,
        "first_diverging_layer": diverging[0] if diverging else None,
        "mtp": mtp,
        "tokens": batch.tokens,
        "loss": found.loss,
        "hf_loss": expected.loss,
    }


def _logits(found: Tensor, expected: Tensor) -> dict[str, float]:
    apart = difference(found, expected)
    return {
        "rel_rms": apart.rel_rms,
        "max_abs": apart.max_abs,
        "kl": kl(found, expected),
        "argmax_agreement": argmax_agreement(found, expected),
    }


def _failures(document: dict[str, Any]) -> list[str]:
    """What did not pass, a line each. On ranks without the comparison: of the rest."""
    from isthmus.weights import collapse

    lines = []
    if mismatched := document["roundtrip"]["mismatched"]:
        lines.append(f"round trip changes {len(mismatched)} tensors: {', '.join(collapse(mismatched))}")
    if rounded := document["dtypes"]["rounded"]:
        lines.append(f"rounded parameters ({len(rounded)}): {', '.join(collapse(rounded))}")
    if document["bounds"] is None:
        return lines
    bounds, forward, grads = document["bounds"], document["forward"], document["gradients"]

    def check(what: str, value: float, bound: float) -> None:
        if not within(value, bound):
            lines.append(f"{what} differ by {value:.2e}, at most {bound:.0e} is allowed")

    check("logits", forward["rel_rms"], bounds["forward"])
    if (first := forward["first_diverging_layer"]) is not None:
        check(
            f"hidden states, from layer {first} on,", forward["layers"][first]["rel_rms"], bounds["forward"]
        )
    if forward["mtp"]:
        check("logits of the prediction block", forward["mtp"]["rel_rms"], bounds["forward"])
    if grads:
        if grads["missing"]:
            lines.append(f"no gradient for {', '.join(collapse(grads['missing']))}")
        check("gradients", grads["rel_rms"], bounds["gradients"])
        check(f"gradients of {grads['worst']}", grads["rel_rms_max"], bounds["worst_gradient"])
        check("gradient norms", grads["grad_norm_rel_err"], bounds["gradients"])
    return lines


def _failed(document: dict[str, Any], failures: list[str]) -> bool:
    """Note the failures and the verdict so far; whether there are any."""
    document["failures"] += failures
    document["passed"] = not document["failures"]
    return bool(failures)
