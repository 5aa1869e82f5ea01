"""The model config of Qwen3-Next: Megatron's GPTModelConfig with a choice of delta net."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.training.models.gpt import GPTModelConfig

from isthmus_qwen3_next.delta_net import ACTIVATIONS, activation_name
from isthmus_qwen3_next.spec import hosted_layer_spec, layer_spec, native_layer_spec


@dataclass(kw_only=True)
class Qwen3NextModelConfig(GPTModelConfig):
    """A GPTModelConfig whose layers are :func:`isthmus_qwen3_next.spec.layer_spec`; built by GPTModelBuilder.

    Attributes:
        delta_net: "hosted" runs HF's module, "megatron" Megatron's.
        attention: of the decoder's full-attention layers, "megatron" or "hosted"; the MTP block's is
            Megatron's.
        hosted_mode: "heads" divides the heads of hosted modules over tensor and context parallelism;
            "replicated" runs them whole on every rank, for sizes that do not divide them.
        cp_layout: how context parallelism divides sequences, "zigzag" or, where no module is Megatron's,
            "contiguous".
        hidden_act: name of `transformer.activation_func`, taken from it when None. A config written by
            `as_dict` holds no functions, and `from_dict` gets this one back by its name.
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
    hosted_mode: str = "heads"
    cp_layout: str = "zigzag"
    hidden_act: str | None = None

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
        if self.hidden_act is None:
            self.hidden_act = activation_name(self.transformer)
        elif self.hidden_act in ACTIVATIONS:
            self.transformer.activation_func = ACTIVATIONS[self.hidden_act]
        else:
            raise ValueError(f"hidden_act must be one of {sorted(ACTIVATIONS)}, got {self.hidden_act!r}")
        # The layers differ, so a checkpoint must name each by its number instead of stacking them.
        self.transformer.hetereogenous_dist_checkpoint = True
