"""The Hugging Face model as reference: slow, plain, one sequence at a time, loaded by transformers alone."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from isthmus.checkpoint.reader import CheckpointReader
from isthmus.testing.batch import PER_TOKEN, Batch, Inputs
from isthmus.testing.dequantise import plain_folder


class Model(NamedTuple):
    """HF's model, and the multi-token prediction block that HF leaves out, where there is one."""

    hf: Any
    mtp: nn.Module | None  # called as mtp(hf, next token ids (b, s), final hidden states (b, s, h))

    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters once, by HF's names in memory."""
        return dict(self.hf.named_parameters()) | dict(self.mtp.named_parameters() if self.mtp else ())

    def names(self) -> frozenset[str]:
        """The names of all tensors, tied ones under each of their names."""
        return frozenset(self.hf.state_dict()) | frozenset(self.mtp.state_dict() if self.mtp else ())


@dataclass(slots=True)
class Outputs:
    """What a run gave; T tokens of all sequences in the batch's order, on the CPU."""

    logits: Tensor  # (T, V)
    layers: list[Tensor]  # each layer's output, (T, H); the last before the final norm
    mtp_logits: Tensor | None  # (T - number of sequences, V): a sequence's last token has no next one
    loss: float  # mean over tokens, in nats
    mtp_loss: float | None
    gradients: dict[str, Tensor] = field(default_factory=dict)  # by HF's names in memory


def load(
    folder: Path,
    dtype: torch.dtype,
    mtp_reference: str | None = None,
    *,
    vision: bool = False,
    fields: Mapping[str, Any] | None = None,
) -> Model:
    """Load the checkpoint with transformers, with eager attention, strictly; a quantised one dequantised.

    Args:
        mtp_reference: ``module:function`` of the family that loads the prediction block, None for none.
        vision: load the vision-language model, not the language model in it.
        fields: of the config, dotted for those of a section, to be other than config.json says.

    Raises:
        LookupError: transformers has no causal language model for the checkpoint's model_type.
        ValueError: transformers did not find every tensor it needs.
    """
    with plain_folder(folder) as plain:
        hf, mtp = _load(plain, dtype, mtp_reference, vision, fields or {})
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    return Model(hf.to(device).eval(), mtp.to(device).eval() if mtp else None)  # without dropout


def _load(
    folder: Path, dtype: torch.dtype, mtp_reference: str | None, vision: bool, fields: Mapping[str, Any]
) -> tuple[Any, nn.Module | None]:
    """HF's model and the prediction block, on the CPU."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    from isthmus.hosting.torch_functions import modeling_of

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it lists the prediction block as unexpected, which is loaded below
    config = AutoConfig.from_pretrained(folder)
    modeling_of(config.model_type)  # on a CPU with its own torch functions
    for path, value in fields.items():
        *sections, name = path.split(".")
        setattr(reduce(getattr, sections, config), name, value)
    loaded: Any = (AutoModelForImageTextToText if vision else AutoModelForCausalLM).from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    hf, info = loaded
    wrong = {kind: sorted(info[kind]) for kind in ("missing_keys", "mismatched_keys") if info[kind]}
    if wrong:
        raise ValueError(f"transformers cannot load {folder}: {wrong}")
    mtp = None
    if mtp_reference is not None:
        module, _, name = mtp_reference.partition(":")
        with CheckpointReader(folder) as reader:
            mtp = getattr(importlib.import_module(module), name)(hf, reader)
    return hf, mtp


def run(model: Model, batch: Batch, *, gradients: bool, mtp_weight: float = 0.0) -> Outputs:
    """Run every sequence by itself; with `gradients`, of the mean next-token loss over all tokens.

    Args:
        mtp_weight: of the mean loss of the prediction block, which is added to the main one.
    """
    for parameter in model.parameters().values():
        parameter.grad = None
    collected = _Collected()
    with _LayerOutputs(model.hf, collected.layers), torch.set_grad_enabled(gradients):
        every: Sequence[Inputs] = batch.inputs or [{}] * len(batch.sequences)
        for sequence, inputs in zip(batch.sequences, every, strict=True):
            loss = _one(model, sequence.to(model.hf.device), inputs, batch, mtp_weight, collected)
            if gradients:
                loss.backward()
    return Outputs(
        logits=torch.cat(collected.logits),
        layers=[torch.cat(outputs) for _, outputs in sorted(collected.layers.items())],
        mtp_logits=torch.cat(collected.mtp_logits) if model.mtp else None,
        loss=collected.loss,
        mtp_loss=collected.mtp_loss if model.mtp else None,
        gradients={
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in (model.parameters().items() if gradients else ())
        },
    )


@dataclass(slots=True)
class _Collected:
    logits: list[Tensor] = field(default_factory=list)
    mtp_logits: list[Tensor] = field(default_factory=list)
    layers: dict[int, list[Tensor]] = field(default_factory=dict)
    loss: float = 0.0
    mtp_loss: float = 0.0


def _one(
    model: Model, sequence: Tensor, inputs: Inputs, batch: Batch, mtp_weight: float, into: _Collected
) -> Tensor:
    """One sequence's share of the loss."""
    tokens, labels = sequence[None, :-1], batch.labels(sequence)
    given = {
        name: (tensor[None] if name.endswith(PER_TOKEN) else tensor).to(tokens.device)
        for name, tensor in inputs.items()
    }
    states: list[Tensor] = []  # what the head sees
    watch = model.hf.lm_head.register_forward_pre_hook(lambda head, args: states.append(args[0]))
    try:
        with _Positions(model.hf) if batch.inputs else nullcontext() as positions:
            logits = model.hf(input_ids=tokens, use_cache=False, **given).logits[0]
    finally:
        watch.remove()
    into.logits.append(logits.detach().cpu())
    loss = cross_entropy(logits.float(), labels, reduction="sum") / batch.tokens
    into.loss += loss.item()
    if model.mtp is None:
        return loss
    # The block sees a token's hidden state and the next token, and predicts the one after that.
    where = {"positions": positions.seen[..., :-1]} if positions else {}
    predicted = model.mtp(model.hf, tokens[:, 1:], states[0][:, :-1], **where)
    logits = model.hf.lm_head(predicted)[0]
    into.mtp_logits.append(logits.detach().cpu())
    mtp_loss = cross_entropy(logits.float(), labels[1:], reduction="sum")
    mtp_loss = mtp_loss / (batch.tokens - len(batch.sequences))
    into.mtp_loss += mtp_loss.item()
    return loss + mtp_weight * mtp_loss


class _Positions:
    """`seen`: the position ids that the decoder's rotary embedding was called with, while it is entered.

    The prediction block rotates by the same ones. With images they are none that count its tokens: HF makes
    them of the image grids, within its forward.
    """

    seen: Tensor

    def __init__(self, hf: Any) -> None:
        self.rotary = hf.get_decoder().rotary_emb

    def __enter__(self) -> "_Positions":
        def note(rotary: nn.Module, args: tuple[Any, ...]) -> None:
            self.seen = args[1]

        self.handle = self.rotary.register_forward_pre_hook(note)
        return self

    def __exit__(self, *error: object) -> None:
        self.handle.remove()


class _LayerOutputs:
    """Collect what every decoder layer returns, (T, H), by its index."""

    def __init__(self, hf: Any, into: dict[int, list[Tensor]]) -> None:
        self.hf, self.into = hf, into

    def __enter__(self) -> None:
        self.handles = [
            layer.register_forward_hook(self._hook(self.into.setdefault(index, [])))
            for index, layer in enumerate(self.hf.get_decoder().layers)
        ]

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()

    @staticmethod
    def _hook(into: list[Tensor]) -> Callable[..., None]:
        def collect(layer: nn.Module, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            into.append(hidden.detach().flatten(0, 1).cpu())

        return collect
