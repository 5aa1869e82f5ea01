"""A checkpoint's Megatron model, as the commands check, build and fill it."""

import argparse
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from isthmus.cli.progress import progress

if TYPE_CHECKING:
    from isthmus.bridge import AutoBridge
    from isthmus.layout import Layout

SIZES = ("tp", "pp", "vp", "ep", "etp", "cp", "dp")
DTYPES = ("float32", "bfloat16", "float16")


def add_dtype_argument(parser: argparse.ArgumentParser) -> None:
    """`--dtype`: of the Megatron parameters; the checkpoint's own where it is not given."""
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the parameters (default: the checkpoint's)")


def check(bridge: "AutoBridge", layout: "Layout") -> None:
    """ValueError with every reason why the model cannot be divided so; costs nothing, starts nothing."""
    if problems := [*_unsupported(bridge, layout), *layout.problems(bridge.megatron_fields)]:
        raise ValueError("this layout does not fit the model:" + "".join(f"\n  {line}" for line in problems))


def build(
    bridge: "AutoBridge", layout: "Layout", dtype: str | None = None, fields: Mapping[str, Any] | None = None
) -> list[Any]:
    """The model chunks of this rank, weights not loaded; `fields` of the model config win."""
    import torch

    overrides = {**layout.config_overrides(), **(fields or {})}
    if dtype is not None:
        overrides["params_dtype"] = getattr(torch, dtype)
    return bridge.build_model(bridge.get_model_config(**overrides))


def _unsupported(bridge: "AutoBridge", layout: "Layout") -> list[str]:
    """A line for each kind of parallelism that the family is not tested for."""
    asked = {name: getattr(layout, name) for name in SIZES if getattr(layout, name) > 1}
    if layout.sequence_parallel:
        asked["sp"] = "on"
    family = bridge.family
    known = " ".join(axis for axis in ("tp", "sp", *SIZES[1:]) if axis in family.axes)
    return [
        f"family {family.name} does not support {axis}={value} (it supports: {known})"
        for axis, value in asked.items()
        if axis not in family.axes
    ]


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


def slowest(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Each stage's seconds on the rank that took longest."""
    return {name: max(rank["seconds"][name] for rank in ranks) for name in ranks[0]["seconds"]}
