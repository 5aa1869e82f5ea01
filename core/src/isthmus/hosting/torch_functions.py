"""HF modeling files on CPU: their own torch functions in place of GPU kernels bound at import.

transformers binds a kernel package's function (fla, causal_conv1d) to the modeling file's global when that
file is imported, whatever the device, so with fla installed a delta net cannot run on CPU tensors. The torch
function that the kernel replaced is still there, wrapped. Nothing here runs at import.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType

import torch

KERNEL_PACKAGES = ("fla", "causal_conv1d")
BOUNDARIES = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


def modeling_of(model_type: str) -> ModuleType:
    """`import_modeling` of a model type's file; LookupError where transformers has no such language model."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise LookupError(f"transformers has no causal language model for model_type {model_type!r}")
    name = model_type_to_module_name(model_type)
    return import_modeling(f"transformers.models.{name}.modeling_{name}")


def import_modeling(name: str) -> ModuleType:
    """The modeling file `name`; in a process without a GPU, with its own torch functions and without fla.

    fla takes seconds to import, for kernels that a CPU cannot run. With a GPU this is a plain import.
    """
    if torch.cuda.is_available():
        return importlib.import_module(name)
    hidden = [package for package in KERNEL_PACKAGES if package not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None makes `import` fail
    try:
        modeling = importlib.import_module(name)
    finally:
        for package in hidden:
            del sys.modules[package]
    use_torch_functions(modeling)
    return modeling


def use_torch_functions(modeling: ModuleType) -> list[str]:
    """Bind the modeling file's kernel functions to its own torch ones; the names bound, [] once done.

    Args:
        modeling: a module such as `transformers.models.qwen3_next.modeling_qwen3_next`, with every model made
            from it changed, also those made before. For processes without a GPU.

    The torch functions cannot keep packed sequences apart and would ignore their boundaries; once bound here
    they raise ValueError when given any, as transformers itself does where no kernel package is installed.
    """
    names = [name for name, value in vars(modeling).items() if _is_kernel(value, modeling)]
    for name in names:
        setattr(modeling, name, _without_boundaries(name, inspect.unwrap(vars(modeling)[name])))
    return names


def _is_kernel(value: object, modeling: ModuleType) -> bool:
    """Whether `value` is a torch function of `modeling` that transformers wrapped with a kernel."""
    return (
        isinstance(value, FunctionType)
        and value.__globals__.get("__name__") == "transformers.integrations.hub_kernels"
        and inspect.unwrap(value).__module__ == modeling.__name__
    )


def _without_boundaries(name: str, torch_function: Callable) -> Callable:
    """`torch_function`, refusing sequence boundaries; as transformers' wrapper, it drops unknown keywords."""
    parameters = inspect.signature(torch_function).parameters

    @functools.wraps(torch_function)
    def bound(*args, **kwargs):
        given = [key for key in BOUNDARIES if kwargs.get(key) is not None]
        if given:
            raise ValueError(
                f"{name} got {given}, which its torch version ignores: packed sequences would leak into each "
                "other. Run each sequence on its own"
            )
        return torch_function(*args, **{key: value for key, value in kwargs.items() if key in parameters})

    return bound
