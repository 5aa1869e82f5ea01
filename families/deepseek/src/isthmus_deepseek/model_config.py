"""The model config of DeepSeek: Megatron's GPTModelConfig around an MLATransformerConfig."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from isthmus.hosting.model_config import HostedModelConfig
from isthmus_deepseek.heads import usual_attention
from isthmus_deepseek.spec import hosted_layer_spec, layer_spec


@dataclass(kw_only=True)
class DeepseekModelConfig(HostedModelConfig):
    """A GPTModelConfig whose layers are :func:`isthmus_deepseek.spec.layer_spec`.

    Attributes:
        attention: of the decoder's layers, "megatron" or "hosted"; the MTP layer's is Megatron's. None
            becomes "hosted" in V3.2, "megatron" in others.
    """

    transformer_layer_spec: Any | Callable[..., Any] | None = layer_spec
    attention: str | None = None

    @property
    def spec_argument(self) -> Callable[..., Any]:
        """The layer spec that stands for this config on Megatron's command line (`--spec`)."""
        return hosted_layer_spec if self.attention == "hosted" else layer_spec

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attention is None:
            self.attention = usual_attention(self.transformer)
        # The layers differ, so a checkpoint names each by its number instead of stacking them.
        self.transformer.hetereogenous_dist_checkpoint = True
