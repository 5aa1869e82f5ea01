"""Named parts of a fused weight, and where a rank's shard of it stands.

A fused weight holds named parts along dim 0, once per group. `linear_qkv` of a gated attention with 2 query
groups is ``per(2, "q gate k v")``; a `linear_fc1` is ``"gate up"``, one group. HF and Megatron hold the same
parts in another grouping, so from two `Parts` follows, by arithmetic on row numbers alone, which rows of
which HF tensor make up a rank's shard. This module knows nothing of tensors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Interval(NamedTuple):
    """`length` rows of part `part`, from its row `start` on (rows of the whole part, all groups)."""

    part: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Parts:
    """Named parts along dim 0: once per group, or, where `groups` is None, one after the other.

    One group is not the same as none: the rows are in the same order, but ranks divide them differently.
    """

    names: tuple[str, ...]
    groups: int | None = None

    def intervals(self, rows: Mapping[str, int]) -> Iterator[Interval]:
        """What the whole tensor holds, first row to last; `rows` is each part's size over all groups."""
        groups = self.groups or 1
        for group in range(groups):
            for name in self.names:
                length = rows[name] // groups
                yield Interval(name, group * length, length)

    def shard(self, rows: Mapping[str, int], rank: int, size: int) -> list[Interval]:
        """What `rank` of `size` holds.

        As in Megatron: interleaved groups are cut as one run of rows (a rank owns whole groups, or a part of
        one where there are fewer groups than ranks); concatenated parts are each divided, so that a rank owns
        its share of every part.
        """
        if self.groups is None:
            _check_divides({name: rows[name] for name in self.names}, size)
            return [Interval(n, rank * (rows[n] // size), rows[n] // size) for n in self.names]
        total = sum(rows[name] for name in self.names)
        _check_divides({" + ".join(self.names): total}, size)
        return list(_cut(self.intervals(rows), rank * (total // size), total // size))


def per(groups: int, names: str) -> Parts:
    """The space-separated parts `names`, repeated for each of `groups` groups."""
    return Parts(tuple(names.split()), groups)


def concatenated(names: str) -> Parts:
    """The space-separated parts `names`, one after the other."""
    return Parts(tuple(names.split()))


def _cut(intervals: Iterator[Interval], start: int, length: int) -> Iterator[Interval]:
    """The rows [start, start + length) of a tensor that holds `intervals`."""
    position = 0
    for part, first, count in intervals:
        begin, end = max(start, position), min(start + length, position + count)
        if begin < end:
            yield Interval(part, first + begin - position, end - begin)
        position += count


def _check_divides(rows: Mapping[str, int], size: int) -> None:
    uneven = {name: count for name, count in rows.items() if count % size}
    if uneven:
        raise ValueError(f"cannot divide rows {uneven} over {size} tensor-parallel ranks")
