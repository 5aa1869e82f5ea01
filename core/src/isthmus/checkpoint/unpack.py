"""From shards of a Megatron tensor to the HF tensors whose numbers they hold; no collective, no file."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from isthmus.weights import Rule, Run


class Piece(NamedTuple):
    """An HF tensor, or row `index` of a stacked one, in `parts` that are its rows one after the other."""

    name: str
    index: int | None
    parts: Sequence[torch.Tensor]
    row: int | None = None
    """Where the parts begin, if they are only some of the rows."""

    @property
    def tensor(self) -> torch.Tensor:
        return self.parts[0] if len(self.parts) == 1 else torch.cat(list(self.parts))


class Unpacker:
    """Works out once what all tensors of a rule and size have in common."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, int, int], list[list[tuple[int, int, int]]]] = {}
        self._runs: dict[tuple[int, int, int, int], tuple[Run, ...]] = {}

    def __call__(self, rule: Rule, shards: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """The parts of each HF tensor, from all shards; views, unless the tensor is divided by columns."""
        first = shards[0]
        if first.dim() == 0:
            return [[first]]
        dim = rule.dim or 0
        local = first.size(dim)
        key = (id(rule), local, len(shards))
        places = self._places.get(key)
        if places is None:
            places = self._places[key] = _places(rule, local, len(shards))
        found = []
        for runs in places:
            parts = [
                shards[rank] if length == local else shards[rank].narrow(dim, start, length)
                for rank, start, length in runs
            ]
            # On a GPU one copy of the whole is better than many of parts.
            found.append(parts if len(parts) == 1 or (dim == 0 and first.is_cpu) else [torch.cat(parts, dim)])
        return found

    def rows(
        self, rule: Rule, shard: torch.Tensor, rank: int, size: int
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """What a shard of a tensor divided by rows holds: (HF tensor by number, first row of it, rows)."""
        local = shard.size(0)
        key = (id(rule), local, rank, size)
        runs = self._runs.get(key)
        if runs is None:
            runs = self._runs[key] = rule.runs(local, rank, size)
        for run in runs:
            yield run.source, run.hf_start, shard.narrow(0, run.start, run.length)


def _places(rule: Rule, local: int, size: int) -> list[list[tuple[int, int, int]]]:
    """For each HF tensor what it is joined from, in order: (shard, row in the shard, length)."""
    found: list[list[tuple[int, int, int, int]]] = [[] for _ in rule.hf]
    for rank in range(size):
        for run in rule.runs(local, rank, size):
            found[run.source].append((run.hf_start, rank, run.start, run.length))
    return [[run[1:] for run in sorted(runs)] for runs in found]
