"""The model config of Qwen3.5: Megatron's GPTModelConfig with Qwen3-Next's choices and a vision tower."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from isthmus.hosting.spec import vision_language_spec
from isthmus.hosting.vision_config import VisionModelConfig
from isthmus_qwen3_5.spec import hosted_layer_spec, layer_spec, native_layer_spec
from isthmus_qwen3_next.model_config import Qwen3NextModelConfig


@dataclass(kw_only=True)
class Qwen35ModelConfig(VisionModelConfig, Qwen3NextModelConfig):
    """A GPTModelConfig whose layers are :func:`isthmus_qwen3_5.spec.layer_spec`."""

    model: ClassVar[str] = "isthmus_qwen3_5.vision:Qwen35Model"
    projector: ClassVar[tuple[str, ...]] = ("vision_model.merger.",)
    spec_arguments: ClassVar[Mapping[tuple[str, str], Callable[..., Any]]] = {
        ("hosted", "megatron"): layer_spec,
        ("megatron", "megatron"): native_layer_spec,
        ("hosted", "hosted"): hosted_layer_spec,
    }

    transformer_layer_spec: Any | Callable[..., Any] | None = layer_spec

    @property
    def spec_argument(self) -> Callable[..., Any]:
        """Qwen3-Next's; with a vision tower one that says that Megatron's script does not build it."""
        return vision_language_spec if self.part == "all" else super().spec_argument
