"""The registry of patches: a patch is a function with a name, a phase and one line of reason.

A patch's name is its function's, its reason the first line of the docstring. This file applies nothing by
itself.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

Phase = Literal["torch", "megatron", "training"]
PHASES: tuple[Phase, ...] = ("torch", "megatron", "training")


@dataclass(frozen=True, slots=True)
class Patch:
    name: str
    phase: Phase
    reason: str
    apply: Callable[[], None]


_patches: dict[str, Patch] = {}


def patch(phase: Phase) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Decorator: register the function as a patch of `phase`, in order of definition."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        name = function.__name__
        if name in _patches:
            raise ValueError(f"two patches are named {name!r}")
        reason = (function.__doc__ or "").strip().partition("\n")[0]
        if not reason:
            raise ValueError(f"patch {name!r} gives no reason: write it as the docstring's first line")
        _patches[name] = Patch(name, phase, reason, function)
        return function

    return register


def patches() -> tuple[Patch, ...]:
    """Every patch there is, in the order in which they are applied."""
    from isthmus.cpu import megatron_patches, torch_patches, training  # noqa: F401  (they fill the registry)

    return tuple(p for phase in PHASES for p in _patches.values() if p.phase == phase)


def check_names(names: Iterable[str]) -> None:
    """LookupError for every name that is no patch's."""
    known = [p.name for p in patches()]
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise LookupError(
            f"no patch of isthmus.cpu is named {', '.join(unknown)} (known: {', '.join(known)})"
        )


def apply(phase: Phase, skip: frozenset[str]) -> None:
    """Apply the patches of one phase, in order, but for those in `skip`."""
    for p in [p for p in _patches.values() if p.phase == phase and p.name not in skip]:
        p.apply()
