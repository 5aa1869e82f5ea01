"""A checkpoint's Megatron model on this rank, as the commands build and fill it. Runs in workers only."""

import argparse
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from isthmus.cli.progress import progress

if TYPE_CHECKING:
    from isthmus.bridge import AutoBridge
    from isthmus.layout import Layout

DTYPES = ("float32", "bfloat16", "float16")


def add_dtype_argument(parser: argparse.ArgumentParser) -> None:
    """`--dtype`: of the Megatron parameters; the checkpoint's own where it is not given."""
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the parameters (default: the checkpoint's)")


def build(bridge: "AutoBridge", layout: "Layout", dtype: str | None = None) -> list[Any]:
    """The model chunks of this rank, weights not loaded."""
    import torch

    overrides = layout.config_overrides()
    if dtype is not None:
        overrides["params_dtype"] = getattr(torch, dtype)
    return bridge.build_model(bridge.get_model_config(**overrides))


def load(bridge: "AutoBridge", model: list[Any]) -> Any:
    """Fill the chunks under a progress bar; returns the LoadReport."""
    nbytes = sum(
        parameter.numel() * parameter.element_size() for chunk in model for parameter in chunk.parameters()
    )
    with progress("loading", nbytes) as advance:
        return bridge.load_hf_weights(model, advance=advance)


def peak_rss_mb() -> float:
    """The most memory this process has held at once, in MiB; pages of mapped files count."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


class Stopwatch:
    """Seconds by name: `with watch("load"): ...`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - begin, 3)
