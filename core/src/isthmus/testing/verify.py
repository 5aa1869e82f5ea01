"""The proof that a Megatron model is the Hugging Face model: the engine behind `isthmus verify`.

Runs on every rank; the first holds the reference and makes the document. Two models are built: one as a run
would train it, in the checkpoint's dtype, whose bits are audited; and one in the dtype of the comparison,
which runs (the same one, where the dtypes are the same).
"""

import importlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from isthmus.built import model_config_of
from isthmus.checkpoint.dtypes import main_dtype, name_of
from isthmus.checkpoint.gather import agree, attempt, from_all, from_first, on_every_rank
from isthmus.testing import audit, comparison, gradients, training_step
from isthmus.testing.batch import random_batch
from isthmus.weights import collapse

if TYPE_CHECKING:
    from isthmus.bridge import AutoBridge
    from isthmus.layout import Layout

SAMPLES = ("image", "images", "video", "text")
DROPOUTS = ("attention_dropout", "hidden_dropout")
HF_DROPOUTS = ("attention_dropout", "dropout")  # as HF's attention modules call them

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
    samples: tuple[str, ...] = SAMPLES  # of a vision-language model: what the sequences hold, in turn

    def check(self, layout: "Layout", positions: int) -> None:
        """ValueError where the model has fewer `positions`, or the layout cannot divide the tokens."""
        if self.tokens < 2:
            raise ValueError(f"cannot compare sequences of {self.tokens} tokens; use at least 2")
        if self.tokens > positions:
            raise ValueError(
                f"cannot compare sequences of {self.tokens} tokens: config.json has"
                f" max_position_embeddings={positions}; use fewer (--tokens)"
            )
        row = 2 * self.tokens if self.packed else self.tokens
        parts = layout.tp if layout.sequence_parallel else 1
        if layout.cp > 1:
            parts = math.lcm(2 * layout.cp, layout.cp * parts)  # a rank has one part from each end
        padded = self.packed and layout.cp > 1
        if row % parts and not padded:
            raise ValueError(
                f"cannot divide rows of {row} tokens over tp={layout.tp} and cp={layout.cp};"
                f" use a multiple of {parts} for tokens (--tokens)"
            )


def verify(
    bridge: "AutoBridge", layout: "Layout", request: Request, watch: Watch = nullcontext
) -> dict[str, Any]:
    """The document of `verify --json`, whole on the first rank; elsewhere without the comparison. Collective.

    Sections not asked for, or not reached because an earlier one failed, are None. `failures` says in words
    what did not pass.
    """
    document: dict[str, Any] = {
        "model_type": bridge.hf_config.model_type,
        "overruled": bridge.overruled,
        "layout": layout.as_dict(),
        "dtype": name_of(request.dtype),
        "request": {
            "tokens": request.tokens,
            "seed": request.seed,
            "packed": request.packed,
            "dropout_off": {
                name: bridge.megatron_fields[name] for name in DROPOUTS if bridge.megatron_fields.get(name)
            },
            "overrides": {name: str(value) for name, value in request.overrides.items()},
        },
        "passed": False,
        "failures": [],
        **dict.fromkeys(
            ("coverage", "quantisation", "roundtrip", "dtypes", "forward", "gradients", "bounds")
        ),
    }
    source_dtype = main_dtype(bridge.reader.tensors.values()) or request.dtype
    same = source_dtype == request.dtype
    with watch("build"):
        chunks = _build(bridge, layout, request, source_dtype, with_ddp=same and request.grads)
    weights = bridge.weight_map(model_config_of(chunks))
    shapes = {name: info.shape for name, info in bridge.reader.tensors.items()}
    misshapen = bridge.family.tiny.misshapen(bridge.hf_config, shapes) if bridge.family.tiny else {}
    document["coverage"], gaps = audit.coverage(chunks, weights, bridge.reader, misshapen)
    if _failed(document, gaps):
        return document
    with watch("load"):
        problem = _load(bridge, chunks)
    if _failed(document, [problem] if problem else []):
        return document
    document["quantisation"] = audit.quantised(bridge.reader)
    _failed(document, _implausible(document["quantisation"]))
    with watch("export"):
        document["roundtrip"], document["dtypes"] = audit.round_trip(chunks, weights, bridge.reader)
    _failed(document, _audit_failures(document))
    if not same:
        del chunks
        with watch("build_for_forward"):
            chunks = _build(bridge, layout, request, request.dtype, with_ddp=request.grads)
        with watch("load_for_forward"):
            on_every_rank(lambda: bridge.load_hf_weights(chunks))
    _failed(document, _compare(bridge, layout, request, watch, chunks, document))
    return document


def _build(
    bridge: "AutoBridge", layout: "Layout", request: Request, dtype: torch.dtype, *, with_ddp: bool
) -> list[Any]:
    """The model in training mode without dropout, which would be other random numbers on each side."""
    fixed = {"params_dtype": dtype, "calculate_per_token_loss": True, **dict.fromkeys(DROPOUTS, 0.0)}
    config = bridge.get_model_config(**{**request.overrides, **layout.config_overrides(), **fixed})
    chunks = bridge.build_model(config, wrap_with_ddp=with_ddp)
    for module in (module for chunk in chunks for module in chunk.modules()):
        for name in HF_DROPOUTS:
            if isinstance(getattr(module, name, None), float):  # HF's own, hosted
                setattr(module, name, 0.0)
    return chunks


def _load(bridge: "AutoBridge", chunks: list[Any]) -> str | None:
    """Load; why it cannot be done, alike on every rank. Collective."""
    _, error = attempt(lambda: bridge.load_hf_weights(chunks))
    agree(None if isinstance(error, ValueError) else error)
    return next((found for found in from_all(error and str(error)) if found), None)


def _compare(
    bridge: "AutoBridge",
    layout: "Layout",
    request: Request,
    watch: Watch,
    chunks: list[Any],
    document: dict[str, Any],
) -> list[str]:
    """Fill in `forward` and `gradients`, on the first rank; what is out of bounds there. Collective."""
    config = model_config_of(chunks)
    batch = random_batch(
        bridge.megatron_fields["vocab_size"],
        tokens=request.tokens,
        seed=request.seed,
        ranks=layout.dp,
        microbatches=max(2, layout.pp),
        packed=request.packed,
        tp=layout.tp,
        cp=layout.cp,
        sample=sample_of(bridge) if getattr(config, "part", "text") == "all" else None,
        kinds=request.samples,
    )
    with watch("forward"):
        found = training_step.run(chunks, batch, gradients=request.grads)

    def reference() -> Any:
        if found is None:
            return None
        with watch("reference"):
            return comparison.expected(bridge, config, batch, request.dtype, with_gradients=request.grads)

    expected = on_every_rank(reference)  # the others wait for the first rank, and fail with it
    if found is not None and expected is not None:
        document["bounds"] = expected.bounds.as_dict()
        document["forward"] = comparison.forward(found, expected.outputs, batch, expected.bounds)
    if request.grads:
        names = from_first(lambda: expected.names if expected else None)
        with watch("gradients"):
            weights = bridge.weight_map(config, names)
            wanted = expected.outputs.gradients if expected else None
            document["gradients"] = gradients.compare(chunks, weights, wanted)
    if expected is None:
        return []
    return comparison.failures(expected.bounds, document["forward"], document["gradients"])


def sample_of(bridge: "AutoBridge") -> Any:
    """What puts images into sequences. LookupError where the family has none."""
    if bridge.family.sample is None:
        raise LookupError(f"family {bridge.family.name} makes no samples with images (Family.sample)")
    module, _, name = bridge.family.sample.partition(":")
    return partial(getattr(importlib.import_module(module), name), bridge.hf_config)


def _implausible(section: dict[str, Any] | None) -> list[str]:
    """Dequantised matrices of a size that no model has."""
    if not section or not section["implausible"]:
        return []
    names, (least, most) = section["implausible"], audit.PLAUSIBLE
    gains = f"gains from {min(names.values()):.1e} to {max(names.values()):.1e}"
    return [
        f"dequantised weights are implausible ({len(names)}): {', '.join(collapse(names))}: {gains}, and"
        f" trained ones lie between {least:g} and {most:g}"
    ]


def _audit_failures(document: dict[str, Any]) -> list[str]:
    """What the round trip and the dtype audit found wrong, a line each."""
    lines = []
    if mismatched := document["roundtrip"]["mismatched"]:
        lines.append(f"round trip changes {len(mismatched)} tensors: {', '.join(collapse(mismatched))}")
    if rounded := document["dtypes"]["rounded"]:
        lines.append(
            f"float32 values that are not the source's ({len(rounded)}): {', '.join(collapse(rounded))}"
        )
    return lines


def _failed(document: dict[str, Any], failures: list[str]) -> bool:
    """Note the failures and the verdict so far; whether there are any."""
    document["failures"] += failures
    document["passed"] = not document["failures"]
    return bool(failures)
