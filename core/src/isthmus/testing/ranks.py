"""Ranks for tests, on the device that ISTHMUS_DEVICE names: CPU processes, or a process for each GPU.

The tests are the same on both; `nox -s "gpu(NAME)"` sets ISTHMUS_DEVICE=cuda. What this machine cannot run is
skipped with the reason.
"""

import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from isthmus import launch

VARIABLE = "ISTHMUS_DEVICE"


def device() -> str:
    """What ISTHMUS_DEVICE says: "cpu" (also where it is not set) or "cuda". ValueError: something else."""
    name = os.environ.get(VARIABLE) or "cpu"
    if name not in ("cpu", "cuda"):
        raise ValueError(f"{VARIABLE} must be cpu or cuda, got {name!r}")
    return name


def run(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float | None = 600, **kwargs: Any
) -> list[Any]:
    """:func:`isthmus.launch.run` on the device, exact; skips the test where that has too few GPUs."""
    if reason := lacking(world_size):
        pytest.skip(reason)
    return launch.run(world_size, function, *args, timeout=timeout, device=device(), exact=True, **kwargs)


def lacking(world_size: int) -> str | None:
    """What `world_size` ranks on the device lack here, None where nothing."""
    if device() == "cpu":
        return None
    if importlib.util.find_spec("transformer_engine") is None:
        return "models on a GPU are built of Transformer Engine's modules, and it is not installed"
    return launch.missing_gpus(world_size)


def skip_unbuildable(overrides: Mapping[str, Any]) -> None:
    """Skip the test where the device has no modules for these fields of the model config."""
    if device() == "cuda" and overrides.get("transformer_impl") == "local":
        pytest.skip(
            "on a GPU Megatron's local norms have no zero-centred weights and no sequence parallelism"
        )


# Of tests that run on CPU whatever ISTHMUS_DEVICE says.
cpu_only = pytest.mark.skipif(device() == "cuda", reason="runs on CPU only")
