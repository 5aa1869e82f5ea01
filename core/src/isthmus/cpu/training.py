"""Patches that only `megatron.training.pretrain` needs; models, optimizers and checkpoints do without.

Numbers are lines of megatron/training 0.19.2 unless they start with core/.
"""

from typing import Any

import torch

from isthmus.cpu.patches import patch


class _Overridden:
    """An object with a few attributes replaced: a module can be changed for one importer only."""

    def __init__(self, wrapped: Any, **replaced: Any):
        self.__dict__.update(replaced, _wrapped=wrapped)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


@patch("training")
def initialize() -> None:
    """pretrain wants a GPU (initialize:66) and skips seeds and groups without (initialize:270,378)."""
    import megatron.training.initialize as module

    one_gpu = {"is_available": lambda: True, "device_count": lambda: 1, "set_device": lambda device: None}
    module.torch = _Overridden(torch, cuda=_Overridden(torch.cuda, **one_gpu))  # pyright: ignore[reportAttributeAccessIssue]


@patch("training")
def dataset_helpers() -> None:
    """The wheel has compiled helpers but no Makefile, and failing to make exits (core/datasets/utils:25)."""
    import megatron.core.datasets.utils as module

    module.compile_helpers = lambda: None


@patch("training")
def device_properties() -> None:
    """Arguments are checked against the GPU's generation (arguments:1339,1414): the latest asks least."""
    cuda: Any = torch.cuda
    cuda.get_device_capability = lambda *args, **kwargs: (10, 0)
    cuda.get_device_properties = lambda *args, **kwargs: _Overridden(
        None, major=10, minor=0, name="cpu", total_memory=0
    )
