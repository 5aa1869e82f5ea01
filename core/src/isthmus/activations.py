"""HF's names of activation functions, and the functions that Megatron's configs hold in their place."""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


def activation_name(function: Callable[[Tensor], Tensor]) -> str:
    """HF's first name of `function`. ValueError where it has none."""
    for name, known in FUNCTIONS.items():
        if same_function(function, known):
            return name
    raise ValueError(
        f"activation function {function} has no name that transformers knows; expected one of "
        f"{', '.join(FUNCTIONS)}"
    )


def same_function(found: object, known: object) -> bool:
    """Whether two functions are one, or the same one with the same keywords."""
    if isinstance(found, partial) and isinstance(known, partial):
        return found.func is known.func and found.keywords == known.keywords
    return found is known
