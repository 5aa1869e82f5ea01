"""Megatron's GPTModel with an HF vision tower on the first stage, for vision-language models.

Every argument of forward has whole rows, as HF's processor gives them; the model takes from them the tokens
of its context-parallel rank. docs/vision.md says when features are computed and how gradients flow.
"""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.models.gpt import GPTModelBuilder
from torch import Tensor, nn

from isthmus.hosting import vision_arguments
from isthmus.hosting.sequence import Row, boundaries, row


class VisionLanguageModel(GPTModel):
    """A GPTModel that puts features of images in the place of their tokens; base class of families' models.

    The tower is `vision_model`, whole on every tensor- and context-parallel rank of the first stage.

    Attributes:
        inputs: names of the vision inputs of forward.
        axes: of positions; more than one where tokens of an image do not count alike.
        model_config: the VisionModelConfig it was built of.
    """

    inputs: ClassVar[tuple[str, ...]] = ()
    axes: ClassVar[int] = 1

    model_config: Any
    vision_model: nn.Module
    _frequencies: Tensor | None = None

    @classmethod
    def of(cls, model: GPTModel, model_config: Any) -> "VisionLanguageModel":
        """The GPTModel as an instance of this class, with a new tower where it has the embedding."""
        model.__class__ = cls  # Megatron's builder has no choice of class; the instance stays as it is
        assert isinstance(model, cls)
        model.model_config = model_config
        if model.pre_process:
            model.vision_model = build_tower(lambda: model.build_tower(model_config), model.config)
        return model

    @property
    def placeholders(self) -> tuple[int, ...]:
        """Token ids that are never looked up, so that they may be none of the vocabulary's."""
        return ()

    def build_tower(self, model_config: Any) -> nn.Module:
        """HF's vision module, and what projects its features, under the current default device and dtype."""
        raise NotImplementedError(f"{type(self).__name__} must define build_tower(model_config)")

    def check(
        self, input_ids: Tensor, row: Row, position_ids: Tensor | None, **inputs: Tensor | None
    ) -> None:
        """ValueError that names the samples whose tokens and vision inputs do not belong together."""

    def features(self, input_ids: Tensor, **inputs: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """(features (n, h), which of them stands at each token (b, s), -1 for none); None: no inputs."""
        raise NotImplementedError(f"{type(self).__name__} must define features(input_ids, ...)")

    def frequencies(
        self, input_ids: Tensor, row: Row, position_ids: Tensor | None, **inputs: Tensor | None
    ) -> Tensor | None:
        """Rotary frequencies (s, b, 1, d) of whole rows; None: those of Megatron, which counts tokens."""
        return None

    def mask(self, input_ids: Tensor, row: Row, attention_mask: Tensor | None) -> Tensor | None:
        """The decoder's attention mask, of whole rows; the one given, unless a family has its own."""
        return attention_mask

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        packed_seq_params: Any = None,
        loss_mask: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        """GPTModel's, of whole rows: `input_ids`, `labels` and `loss_mask` are (b, s) over all ranks.

        What it returns is of this rank's tokens: :func:`own` takes the same of a loss mask. The vision inputs
        are keyword arguments by HF's names, alike on all tensor- and context-parallel ranks; every stage
        needs all but the pixels.

        Raises:
            LookupError: names arguments that there are not.
            ValueError: lists arguments that are not of whole rows, or says that tokens and vision inputs do
                not belong together and names the samples.
        """
        if decoder_input is not None:
            raise ValueError("decoder_input is what this model makes of input_ids and the vision inputs")
        inputs = {name: more.pop(name, None) for name in self.inputs}
        megatrons = inspect.signature(GPTModel.forward).parameters
        vision_arguments.check_names(more, [name for name in (*megatrons, *inputs) if name != "self"])
        vision_arguments.check_ids(input_ids)
        input_ids = input_ids.long()
        batch, length = input_ids.shape
        whole = row(
            packed_seq_params, length, batch, self.pg_collection.cp.size(), "zigzag", input_ids.device
        )
        per_token = {"labels": labels, "loss_mask": loss_mask}
        if attention_mask is not None and (
            not isinstance(attention_mask, Tensor) or attention_mask.dim() < 4
        ):
            per_token["attention_mask"] = attention_mask  # HF's processor's; Megatron's is (b, 1, s, s)
        groups = self.pg_collection
        vision_arguments.check(
            input_ids,
            boundaries(packed_seq_params),
            position_ids,
            per_token,
            inputs,
            self.model_config.vocab_size,
            self.placeholders,
            self.axes,
            tp=groups.tp.size() if self.config.sequence_parallel else 1,
            cp=groups.cp.size(),
        )
        self.check(input_ids, whole, position_ids, **inputs)
        attention_mask = _without_padding(attention_mask)
        mine = own_tokens(whole, self.pg_collection.cp)

        def take(tensor: Any) -> Any:
            return tensor if tensor is None or mine is None else tensor[:, mine]

        ids = take(input_ids)
        counted = take(torch.arange(length, device=input_ids.device).expand(batch, length))
        if self.pre_process:
            decoder_input = self._merged(input_ids, ids, counted, mine, inputs)
        self._frequencies = self.frequencies(input_ids, whole, position_ids, **inputs)
        if self._frequencies is not None and mine is not None and packed_seq_params is None:
            self._frequencies = self._frequencies[mine]  # of packed sequences, Megatron takes them itself
        given: dict[str, Any] = {"labels": take(labels), "loss_mask": take(loss_mask)}
        given |= {
            "attention_mask": self.mask(input_ids, whole, attention_mask),
            "decoder_input": decoder_input,
            "packed_seq_params": packed_seq_params,
        }
        try:
            return super().forward(ids, counted, **given, **more)
        finally:
            self._frequencies = None

    def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
        """GPTModel's, with the rows' own rotary frequencies."""
        found = super()._preprocess(*args, **kwargs)
        return found if self._frequencies is None else (found[0], self._frequencies, *found[2:])

    def _merged(
        self, whole: Tensor, ids: Tensor | None, counted: Tensor | None, mine: Tensor | None, inputs: Any
    ) -> Tensor:
        """The decoder's input (s, b, h) of this rank: embeddings, and features in their places."""
        hidden = self.embedding(input_ids=ids, position_ids=counted)
        found = self.features(whole, **inputs)
        if found is None:
            return _Unused.apply(hidden, *self.vision_model.parameters())
        features, places = found
        places = places if mine is None else places[:, mine]
        if self.config.sequence_parallel:
            # A rank has the gradient of its own tokens' features: the sum over ranks is that of all.
            features = copy_to_tensor_model_parallel_region(features, group=self.pg_collection.tp)
            places = places.chunk(self.pg_collection.tp.size(), dim=1)[self.pg_collection.tp.rank()]
        places = places.transpose(0, 1)
        here = places >= 0
        return hidden.index_put((here,), features[places[here]].to(hidden.dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """nn.Module's; the tower's buffers keep their dtype: rotary frequencies in bf16 are other numbers."""
        tower = getattr(self, "vision_model", None)
        kept = [
            (module, name, buffer)
            for module in (tower.modules() if tower is not None else ())
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        super()._apply(fn, recurse)
        for module, name, buffer in kept:
            moved = module._buffers[name]
            if moved is not None and moved.dtype != buffer.dtype:
                module._buffers[name] = buffer.to(moved.device)
        return self


def _without_padding(attention_mask: Tensor | None) -> Tensor | None:
    """Megatron's mask as it is; of HF's processor's, (b, s) with 0 for padding, nothing is left.

    ValueError where it has padding, which Megatron's causal attention would not leave out.
    """
    if attention_mask is None or attention_mask.dim() != 2:
        return attention_mask
    if padded := [str(i) for i, row in enumerate(attention_mask) if not bool(row.all())]:
        raise ValueError(
            f"attention_mask has padding in sample {', '.join(padded)}, which is not masked here: pack the"
            " samples (packed_seq_params), or pad behind their tokens, with a loss_mask of 0 there and no"
            " attention_mask"
        )
    return None


class _Unused(torch.autograd.Function):
    """`hidden` as it is; backward gives the parameters a gradient of zero.

    Ranks reduce gradients together: one whose batch has no image must not leave the tower's out.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        needed = ctx.needs_input_grad[1:]
        zeros = [
            torch.zeros_like(p) if need else None for p, need in zip(ctx.parameters, needed, strict=True)
        ]
        return gradient, *zeros


def own_tokens(whole: Row, cp_group: Any) -> Tensor | None:
    """Which tokens of whole rows this context-parallel rank has, in its order; None: all, as they are."""
    if cp_group.size() == 1:
        return None
    order = whole.order if whole.order is not None else torch.arange(whole.tokens)
    return order.chunk(cp_group.size())[cp_group.rank()]


def own(tensor: Tensor, cp_group: Any, packed_seq_params: Any = None) -> Tensor:
    """This context-parallel rank's part of (b, s), whole rows, as a VisionLanguageModel returns losses."""
    batch, length = tensor.shape
    whole = row(packed_seq_params, length, batch, cp_group.size(), "zigzag", tensor.device)
    mine = own_tokens(whole, cp_group)
    return tensor if mine is None else tensor[:, mine]


def build_tower(make: Callable[[], nn.Module], config: TransformerConfig) -> nn.Module:
    """What `make` builds, where Megatron builds its modules, in `config.params_dtype`; buffers as HF's."""
    device = torch.get_default_device()
    if device.type == "cpu" and torch.cuda.is_available() and not config.use_cpu_initialization:
        device = torch.device("cuda", torch.cuda.current_device())
    with device:
        tower = make()
    for parameter in tower.parameters():
        parameter.data = parameter.data.to(config.params_dtype)
    return tower


class VisionModelBuilder(GPTModelBuilder):
    """Megatron's builder; with part="all" what it builds is the model config's `model_class`."""

    def build_model(self, *args: Any, **kwargs: Any) -> GPTModel:
        """One stage, its frozen parts frozen."""
        config: Any = self._model_config
        model = super().build_model(*args, **kwargs)
        if config.part == "all":
            model = config.model_class().of(model, config)
        for name, parameter in model.named_parameters():
            if config.part_of(name) in config.freeze:
                parameter.requires_grad = False
        return model
