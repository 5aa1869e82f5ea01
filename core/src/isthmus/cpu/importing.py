"""Importing megatron on a machine without accelerators: fast, and without what it could not use anyway."""

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator

import torch


class _BlockedPackage:
    """An import hook that makes `import NAME` fail."""

    def __init__(self, name: str):
        self.name = name

    def find_spec(self, name: str, path=None, target=None) -> None:
        if name.partition(".")[0] == self.name:
            raise ImportError(f"{self.name} is not imported while isthmus.cpu loads megatron", name=self.name)


@contextlib.contextmanager
def without_accelerator_packages(compile: bool = False) -> Iterator[None]:
    """While inside, importing megatron leaves fla out, compiles nothing and keeps its warnings to itself.

    gated_delta_net/common imports fla at once, which costs transformers, dynamo and inductor (3 s) for Triton
    kernels that a CPU cannot run. jit.py binds `torch.compile` at import, whose first use imports dynamo (1
    s): it is the identity here unless `compile`.
    """
    torch_compile, block = torch.compile, _BlockedPackage("fla")
    logging.getLogger("torch.utils.cpp_extension").setLevel(
        logging.ERROR
    )  # "No CUDA runtime is found": indeed
    if not compile:
        torch.compile = _not_compiled
    sys.meta_path.insert(0, block)  # pyright: ignore[reportArgumentType]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.compile = torch_compile
        sys.meta_path.remove(block)  # pyright: ignore[reportArgumentType]


def _not_compiled(function=None, *args, **kwargs):
    """torch.compile's calling convention, the function unchanged."""
    return function if function is not None else lambda f: f
