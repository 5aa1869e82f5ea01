"""Long lists of tensor names, shortened for people: `model.layers.{0..47}.x`."""

import re
from collections.abc import Iterable

_NUMBER = re.compile(r"(?<![^.\[])\d+(?![^.\]])")


def collapse(names: Iterable[str]) -> list[str]:
    """One line for each kind of name, its numbers as ranges; the kinds in order of first appearance.

    A range is only written where it is true: `{0..3}.experts.{0..7}` says that all 32 names are there.
    """
    kinds: dict[str, list[tuple[int, ...]]] = {}
    for name in names:
        numbers = tuple(int(number) for number in _NUMBER.findall(name))
        kinds.setdefault(_NUMBER.sub("{}", name), []).append(numbers)
    lines = []
    for kind, found in kinds.items():
        lines.extend(
            kind.format(*("{" + _ranges(v) + "}" if len(v) > 1 else v[0] for v in box))
            for box in _boxes(found)
        )
    return lines


def _boxes(found: list[tuple[int, ...]]) -> list[list[list[int]]]:
    """The index tuples as products of value lists: one where they form a grid, else by first index."""
    unique = sorted(set(found))
    axes = [sorted(set(axis)) for axis in zip(*unique, strict=True)]
    size = 1
    for axis in axes:
        size *= len(axis)
    if size == len(unique):
        return [axes]
    by_rest: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for first in axes[0]:
        by_rest.setdefault(tuple(index[1:] for index in unique if index[0] == first), []).append(first)
    return [[firsts, *box] for rest, firsts in by_rest.items() for box in _boxes(list(rest))]


def _ranges(values: list[int]) -> str:
    """Sorted integers as `0..3,5,7..9`."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs)
