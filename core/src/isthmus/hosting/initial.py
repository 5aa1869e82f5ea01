"""Initial values of an HF module built outside its model: HF's own rules, and no uninitialised memory."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


@contextmanager
def nan_for_empty() -> Iterator[None]:
    """While building: `torch.empty` gives NaN, so that :func:`initialise` finds what nobody initialised."""
    with _NanForEmpty():
        yield


class _NanForEmpty(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if (
            getattr(func, "__name__", "") in ("empty", "empty_like", "new_empty")
            and result.is_floating_point()
        ):
            result.fill_(float("nan"))
        return result


def initialise(hf_module: nn.Module, std: float) -> None:
    """Fill every parameter as transformers would, from the default random state, in place.

    Outside a PreTrainedModel, HF leaves some parameters to `_init_weights` of the model, so that is called
    here for every part; a module from a file without one has initialised itself. ValueError names parameters
    that are still NaN where the module was built under :func:`nan_for_empty`.

    Args:
        std: standard deviation of the matrices, where the HF module carries no config of its own that says.
    """
    model = _pretrained_model(hf_module, std)
    if model is not None:
        with torch.no_grad():
            for part in hf_module.modules():
                model._init_weights(part)  # type: ignore[operator]
    empty = [name for name, parameter in hf_module.named_parameters() if parameter.isnan().any()]
    if empty:
        raise ValueError(
            f"{type(hf_module).__name__} left {empty} uninitialised, and its modeling file has no rule for "
            "them. Override initialise() of the HostedModule, or build with perform_initialization=False "
            "and load weights"
        )


def _pretrained_model(hf_module: nn.Module, std: float) -> nn.Module | None:
    """An empty instance of the modeling file's first PreTrainedModel, good for `_init_weights` alone."""
    from transformers import PreTrainedModel

    modeling = sys.modules[type(hf_module).__module__]
    for base in vars(modeling).values():
        if (
            isinstance(base, type)
            and issubclass(base, PreTrainedModel)
            and base.__module__ == modeling.__name__
        ):
            model = base.__new__(base)
            nn.Module.__init__(model)
            config: Any = getattr(hf_module, "config", None) or SimpleNamespace(initializer_range=std)
            model.config = config
            return model
    return None
