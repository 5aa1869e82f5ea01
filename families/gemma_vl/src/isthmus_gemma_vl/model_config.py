"""The model config of Gemma 3: Megatron's GPTModelConfig with a second rope and a vision tower."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from isthmus.hosting.model_config import HostedModelConfig
from isthmus.hosting.vision_config import VisionModelConfig
from isthmus_gemma_vl.spec import ROPE_LOCAL_BASE, layer_spec, vision_language_spec


@dataclass(kw_only=True)
class Gemma3ModelConfig(VisionModelConfig, HostedModelConfig):
    """A GPTModelConfig whose layers are :func:`isthmus_gemma_vl.spec.layer_spec`.

    Attributes:
        rope_local_base: of the rope of sliding layers.
        softcap: what caps the logits, None for nothing.
    """

    model: ClassVar[str] = "isthmus_gemma_vl.vision:Gemma3Model"
    projector: ClassVar[tuple[str, ...]] = ("vision_model.multi_modal_projector.",)

    transformer_layer_spec: Any | Callable[..., Any] | None = layer_spec
    rope_local_base: float = ROPE_LOCAL_BASE
    softcap: float | None = None

    @property
    def spec_argument(self) -> Callable[..., Any]:
        """The layer spec that stands for this config on Megatron's command line (`--spec`); with a vision
        tower one that says that Megatron's script does not build it.

        ValueError: sliding layers have another rope than in every release, or logits are capped.
        """
        if self.part == "all":
            return vision_language_spec
        if (self.rope_local_base, self.softcap) != (ROPE_LOCAL_BASE, None):
            raise ValueError(
                "Megatron's training script has no arguments for"
                f" rope_local_base={self.rope_local_base}, softcap={self.softcap}, and the layer spec that it"
                f" calls knows {ROPE_LOCAL_BASE}, None only"
            )
        return layer_spec
