"""The model config of Qwen3-Next: Megatron's GPTModelConfig with a choice of delta net."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.training.models.gpt import GPTModelConfig

from isthmus_qwen3_next.delta_net import ACTIVATIONS, activation_name
from isthmus_qwen3_next.spec import layer_spec, native_layer_spec


@dataclass(kw_only=True)
class Qwen3NextModelConfig(GPTModelConfig):
    """A GPTModelConfig whose layers are :func:`isthmus_qwen3_next.spec.layer_spec`; built by GPTModelBuilder.

    Attributes:
        delta_net: "hosted" runs HF's module, whole on every tensor-parallel rank; "megatron" runs Megatron's,
            its heads divided over tensor-parallel ranks.
        hidden_act: name of `transformer.activation_func`, taken from it when None. A config written by
        `as_dict`
            holds no functions, and `from_dict` gets this one back by its name.
    """

    transformer_layer_spec: Any | Callable[..., Any] | None = layer_spec
    delta_net: str = "hosted"
    hidden_act: str | None = None

    @property
    def spec_argument(self) -> Callable[..., Any]:
        """The layer spec that stands for this config on Megatron's command line (`--spec`)."""
        return native_layer_spec if self.delta_net == "megatron" else layer_spec

    def __post_init__(self) -> None:
        if self.hidden_act is None:
            self.hidden_act = activation_name(self.transformer)
        elif self.hidden_act in ACTIVATIONS:
            self.transformer.activation_func = ACTIVATIONS[self.hidden_act]
        else:
            raise ValueError(f"hidden_act must be one of {sorted(ACTIVATIONS)}, got {self.hidden_act!r}")
        # The layers differ, so a checkpoint must name each by its number instead of stacking them.
        self.transformer.hetereogenous_dist_checkpoint = True
