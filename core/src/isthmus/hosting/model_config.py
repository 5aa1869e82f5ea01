"""The model config of a family that hosts modules: Megatron's GPTModelConfig and how they are divided."""

from dataclasses import dataclass

from megatron.training.models.gpt import GPTModelConfig

from isthmus.activations import FUNCTIONS, activation_name


@dataclass(kw_only=True)
class HostedModelConfig(GPTModelConfig):
    """A GPTModelConfig, built by GPTModelBuilder; a family's subclass sets `transformer_layer_spec`.

    Attributes:
        hosted_mode: "heads" divides the heads of hosted modules over tensor and context parallelism;
            "replicated" runs them whole on every rank, for sizes that do not divide them.
        cp_layout: how context parallelism divides sequences, "zigzag" or, where no module is Megatron's,
            "contiguous".
        hosted_cp: what a context-parallel rank runs of a hosted module: "heads", its own on whole sequences,
            or "state_passing", all on its own run of tokens, for modules and machines that can.
        hidden_act: name of `transformer.activation_func`, taken from it when None. A config written by
            `as_dict` holds no functions, and `from_dict` gets this one back by its name.
        pad: the token whose embedding is not trained, -1 for none.
    """

    hosted_mode: str = "heads"
    cp_layout: str = "zigzag"
    hosted_cp: str = "heads"
    hidden_act: str | None = None
    pad: int = -1

    def __post_init__(self) -> None:
        if self.hidden_act is None:
            self.hidden_act = activation_name(self.transformer.activation_func)
        elif self.hidden_act in FUNCTIONS:
            self.transformer.activation_func = FUNCTIONS[self.hidden_act]
        else:
            raise ValueError(f"hidden_act must be one of {list(FUNCTIONS)}, got {self.hidden_act!r}")
