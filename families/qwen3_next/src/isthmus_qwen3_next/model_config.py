"""The model config of Qwen3-Next: with a choice of mixers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from isthmus.hosting.model_config import HostedModelConfig
from isthmus_qwen3_next.spec import hosted_layer_spec, layer_spec, native_layer_spec


@dataclass(kw_only=True)
class Qwen3NextModelConfig(HostedModelConfig):
    """A HostedModelConfig whose layers are :func:`isthmus_qwen3_next.spec.layer_spec`.

    Attributes:
        delta_net: "hosted" runs HF's module, "megatron" Megatron's.
        attention: of the decoder's full-attention layers, "megatron" or "hosted"; the MTP block's is
            Megatron's.
    """

    # By (delta_net, attention).
    spec_arguments: ClassVar[Mapping[tuple[str, str], Callable[..., Any]]] = {
        ("hosted", "megatron"): layer_spec,
        ("megatron", "megatron"): native_layer_spec,
        ("hosted", "hosted"): hosted_layer_spec,
    }

    transformer_layer_spec: Any | Callable[..., Any] | None = layer_spec
    delta_net: str = "hosted"
    attention: str = "megatron"

    @property
    def spec_argument(self) -> Callable[..., Any]:
        """The layer spec that stands for this config on Megatron's command line (`--spec`).

        ValueError: there is none for Megatron's delta net beside HF's attention.
        """
        chosen = self.delta_net, self.attention
        if chosen not in self.spec_arguments:
            raise ValueError(
                f"Megatron's --spec has no function for (delta_net, attention) = {chosen}; "
                f"the pairs that it has are {', '.join(map(str, self.spec_arguments))}"
            )
        return self.spec_arguments[chosen]

    def __post_init__(self) -> None:
        super().__post_init__()
        # The layers differ, so a checkpoint names each by its number instead of stacking them.
        self.transformer.hetereogenous_dist_checkpoint = True
