"""A checkpoint's Megatron model, as the commands check, build and fill it."""

import argparse
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from isthmus.cli.progress import announce, progress

if TYPE_CHECKING:
    from isthmus.bridge import AutoBridge
    from isthmus.layout import Layout

BUILD = {"build": "building the model"}  # words for a Stopwatch
SEED_DIGITS = 19  # of 2**63
DTYPES = ("float32", "bfloat16", "float16")


def add_seed_argument(parser: argparse.ArgumentParser, of: str) -> None:
    """`--seed`, of what; numbers that every generator takes."""
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help=f"of {of} (default: 0)")


def _seed(text: str) -> int:
    if not text.isdecimal() or len(text) > SEED_DIGITS or int(text) >= 1 << 63:
        shown = text if len(text) <= 2 * SEED_DIGITS else f"{text[: 2 * SEED_DIGITS]}..."
        raise argparse.ArgumentTypeError(f"{shown!r} is not a whole number from 0 to 2**63-1")
    return int(text)


def add_dtype_argument(parser: argparse.ArgumentParser) -> None:
    """`--dtype`: of the Megatron parameters; the checkpoint's own where it is not given."""
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the parameters (default: the checkpoint's)")


def check(bridge: "AutoBridge", layout: "Layout", fields: Mapping[str, Any] | None = None) -> None:
    """ValueError with every reason why the model cannot be divided so; costs nothing, starts nothing.

    `fields` of the model config are what the user asked for, and none that makes it another model's.
    """
    from isthmus import arithmetic

    arithmetic.check(bridge.megatron_fields, fields or {}, "the model of --set")
    layout.check(bridge.family, {**bridge.megatron_fields, **bridge.choices, **(fields or {})})


def build(
    bridge: "AutoBridge", layout: "Layout", dtype: str | None = None, fields: Mapping[str, Any] | None = None
) -> list[Any]:
    """The model chunks of this rank, weights not loaded, with these `fields` of the model config."""
    import torch

    overrides = {**(fields or {}), **layout.config_overrides()}
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
    """Seconds by name: `with watch("load"): ...`. `words` tell people of the stages that take time."""

    def __init__(self, words: Mapping[str, str] = MappingProxyType({})) -> None:
        self.seconds: dict[str, float] = {}
        self._words = words

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if name in self._words:
            announce(self._words[name])
        begin = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - begin, 3)


def slowest(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Each stage's seconds on the rank that took longest."""
    return {name: max(rank["seconds"][name] for rank in ranks) for name in ranks[0]["seconds"]}
