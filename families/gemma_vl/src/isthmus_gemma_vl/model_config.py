"""The model config of Gemma 3: Megatron's GPTModelConfig with a second rope."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from isthmus.hosting.model_config import HostedModelConfig
from isthmus_gemma_vl.spec import ROPE_LOCAL_BASE, layer_spec


@dataclass(kw_only=True)
class Gemma3ModelConfig(HostedModelConfig):
    """A GPTModelConfig whose layers are :func:`isthmus_gemma_vl.spec.layer_spec`.

    Attributes:
        rope_local_base: of the rope of sliding layers.
        part: of the checkpoint, "text" for the language model; "all", with a vision tower, cannot be built.
    """

    transformer_layer_spec: Any | Callable[..., Any] | None = layer_spec
    rope_local_base: float = ROPE_LOCAL_BASE
    part: str = "text"

    @property
    def spec_argument(self) -> Callable[..., Any]:
        """The layer spec that stands for this config on Megatron's command line (`--spec`).

        ValueError: sliding layers have another rope than every release has.
        """
        if self.rope_local_base != ROPE_LOCAL_BASE:
            raise ValueError(
                f"Megatron's training script has no argument for rope_local_base={self.rope_local_base}, and"
                f" the layer spec that it calls knows {ROPE_LOCAL_BASE} only"
            )
        return layer_spec
