"""The model config of Qwen3.5: Megatron's GPTModelConfig with Qwen3-Next's choices."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from isthmus_qwen3_5.spec import hosted_layer_spec, layer_spec, native_layer_spec
from isthmus_qwen3_next.model_config import Qwen3NextModelConfig


@dataclass(kw_only=True)
class Qwen35ModelConfig(Qwen3NextModelConfig):
    """A GPTModelConfig whose layers are :func:`isthmus_qwen3_5.spec.layer_spec`; built by GPTModelBuilder.

    Attributes:
        part: of the checkpoint, "text" for the language model; "all", with a vision tower, cannot be built.
    """

    spec_arguments: ClassVar[Mapping[tuple[str, str], Callable[..., Any]]] = {
        ("hosted", "megatron"): layer_spec,
        ("megatron", "megatron"): native_layer_spec,
        ("hosted", "hosted"): hosted_layer_spec,
    }

    transformer_layer_spec: Any | Callable[..., Any] | None = layer_spec
    part: str = "text"
