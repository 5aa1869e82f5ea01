"""Megatron -> HF: shards are gathered over TP and ETP on one owner a tensor, unpacked, and handed out.

`plan` decides, alike on every rank and before anything moves, which tensors come out, in which order, shape
and dtype, and which rank owns each. Owners are spread over all ranks that hold a tensor, so that they write
side by side.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from isthmus.checkpoint.collector import collector_paused
from isthmus.checkpoint.gather import (
    Exchange,
    Holding,
    Item,
    batches,
    broadcast,
    check_copies,
    holdings,
    places,
)
from isthmus.checkpoint.load import hf_shape
from isthmus.checkpoint.place import Place
from isthmus.names import LiveTensor
from isthmus.weights import Bound, HFTensor, Rule, WeightMap, collapse


@dataclass(slots=True)
class Output:
    """An HF tensor to come: its full shape, dtype, and the rank that assembles it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Piece(NamedTuple):
    """An HF tensor, or row `index` of a stacked one."""

    name: str
    index: int | None
    tensor: torch.Tensor


@dataclass(slots=True)
class ExportPlan:
    """What an export will do; the same on every rank."""

    rank: int
    world_size: int
    device: torch.device
    items: list[Item]
    outputs: dict[str, Output]
    held: dict[str, torch.Tensor] = field(default_factory=dict)  # this rank's own tensors, by canonical name

    def steps(self) -> Iterator[tuple[Item, list[Piece]]]:
        """Each item in plan order, with its HF tensors where this rank owns it. Collective: run it out."""
        unpack = _Unpacker()
        started = (
            (batch, Exchange(batch, self.held, self.rank, self.device)) for batch in batches(self.items)
        )
        for batch, exchange in _one_ahead(started):
            exchange.wait()
            for item in batch:
                found = []
                if self.rank == item.owner:
                    for hf, tensor in unpack(item.bound, exchange.shards(item)):
                        found.append(Piece(hf.name, hf.index, tensor.to(self.outputs[hf.name].dtype)))
                yield item, found

    def pieces(self) -> Iterator[Piece]:
        """The HF tensors that this rank owns, in plan order. Collective: run it to its end."""
        for _, found in self.steps():
            yield from found


def _one_ahead[T](values: Iterable[T]) -> Iterator[T]:
    """The same values; each is asked for before the one before it is handed out, so that it can travel."""
    rest = iter(values)
    current = list(itertools.islice(rest, 1))
    for following in rest:
        yield current.pop()
        current.append(following)
    yield from current


@collector_paused()
def plan(
    held: Sequence[LiveTensor],
    model: Any,
    weights: WeightMap,
    *,
    dtype_of: Callable[[str, torch.dtype], torch.dtype] = lambda name, dtype: dtype,
    order: Mapping[str, int] | None = None,
) -> ExportPlan:
    """Decide the export of this rank's tensors `held` of `model`. Collective.

    `dtype_of(hf_name, dtype of the parameter)` is the dtype to come; `order` the position of HF names in the
    source. What is held may also be gradients, under the names of their parameters. ValueError where a tensor
    of the map is held by no rank, or a held one has no rule.
    """
    mine = Place.of(model)
    known = holdings(held, model, mine)
    _check_complete(weights, known)
    copies = [bound for bound in weights.megatron.values() if not bound.rule.exported]
    check_copies(held, known, {copy.megatron: weights.hf[copy.hf[0].name][0] for copy in copies}, model)

    choose = _Owners(places(mine), known)
    exported = [bound for bound in weights.megatron.values() if bound.rule.exported]
    if order is not None:
        exported.sort(key=lambda bound: (order.get(bound.hf[0].name, len(order)), bound.hf[0].index or 0))
    items: list[Item] = []
    outputs: dict[str, Output] = {}
    for bound in exported:
        holding = known[bound.megatron]
        _, size = mine.shard(bound.rule)
        shapes = [hf_shape(bound.rule, k, holding.shape, size) for k in range(len(bound.hf))]
        stacked = outputs.get(bound.hf[0].name)
        owner, holders = choose(bound.rule, holding, stacked.owner if stacked else None)
        items.append(Item(bound, owner, holders, holding))
        for hf, shape in (*zip(bound.hf, shapes, strict=True), *((copy, shapes[0]) for copy in bound.also)):
            output = outputs.get(hf.name)
            if output is None:
                full = shape if hf.index is None else (0, *shape)
                output = outputs[hf.name] = Output(hf.name, full, dtype_of(hf.name, holding.dtype), owner)
            if hf.index is not None:
                output.shape = (max(output.shape[0], hf.index + 1), *shape)
        choose.charge(owner, holding, len(holders))
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = held[0].tensor.device if held else torch.device("cpu")
    return ExportPlan(
        rank, world_size, device, items, outputs, {live.canonical: live.tensor.detach() for live in held}
    )


def _check_complete(weights: WeightMap, known: Mapping[str, Holding]) -> None:
    absent = [bound.megatron for bound in weights.megatron.values() if bound.rule.exported]
    absent = [name for name in absent if name not in known]
    unmapped = [name for name in known if name not in weights.megatron]
    problems = []
    if absent:
        problems.append(f"no rank holds ({len(absent)}): " + ", ".join(collapse(absent)))
    if unmapped:
        problems.append(
            f"no rule for these Megatron tensors ({len(unmapped)}): " + ", ".join(collapse(unmapped))
        )
    if problems:
        raise ValueError("cannot export this model:\n  " + "\n  ".join(problems))


class _Owners:
    """Chooses each tensor's owner: of all ranks that hold a shard of it, the one with the least to do."""

    def __init__(self, everyone: Sequence[Place], known: Mapping[str, Holding]) -> None:
        self.load = [0] * len(everyone)
        self.dense: dict[int, list[tuple[int, ...]]] = {}  # stage -> the TP groups on it
        self.experts: dict[tuple[int, int], list[tuple[int, ...]]] = {}  # (stage, ep rank) -> the ETP groups
        dense: dict[tuple[int, int, int], dict[int, int]] = {}
        experts: dict[tuple[int, int, int], dict[int, int]] = {}
        for rank, place in enumerate(everyone):
            dense.setdefault((place.pp, place.cp, place.dp), {})[place.tp] = rank
            experts.setdefault((place.pp, place.ep, place.edp), {})[place.etp] = rank
        for (stage, _, _), group in sorted(dense.items()):
            self.dense.setdefault(stage, []).append(tuple(rank for _, rank in sorted(group.items())))
        for (stage, ep, _), group in sorted(experts.items()):
            self.experts.setdefault((stage, ep), []).append(tuple(rank for _, rank in sorted(group.items())))

    def __call__(self, rule: Rule, holding: Holding, owner: int | None) -> tuple[int, tuple[int, ...]]:
        """(owner, the ranks whose shards it needs); `owner` is given where it is chosen already."""
        stage = min(holding.stages)
        groups = self.experts[stage, min(holding.ep_ranks)] if rule.expert else self.dense[stage]
        if owner is None:
            owner = min((rank for group in groups for rank in group), key=self.load.__getitem__)
        group = next((group for group in groups if owner in group), groups[0])
        if rule.dim is None or len(group) == 1:
            return owner, ((owner,) if owner in group else (group[0],))
        return owner, group

    def charge(self, owner: int, holding: Holding, shards: int) -> None:
        """Count the tensor's bytes as the owner's work."""
        self.load[owner] += holding.nbytes * shards


class _Unpacker:
    """Shards of a Megatron tensor -> its HF tensors; where a shard holds one whole, it is a view."""

    def __init__(self) -> None:
        self.places: dict[tuple[int, int, int], list[list[tuple[int, int, int]]]] = {}

    def __call__(
        self, bound: Bound, shards: Sequence[torch.Tensor]
    ) -> Iterator[tuple[HFTensor, torch.Tensor]]:
        rule, first = bound.rule, shards[0]
        if first.dim() == 0:
            yield bound.hf[0], first
            return
        dim = rule.dim or 0
        local = first.size(dim)
        key = (id(rule), local, len(shards))
        if key not in self.places:
            self.places[key] = self._runs(rule, local, len(shards))
        for hf, runs in zip(bound.hf, self.places[key], strict=True):
            pieces = [shards[rank].narrow(dim, start, length) for rank, start, length in runs]
            tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
            yield hf, tensor
            for copy in bound.also:
                yield copy, tensor

    @staticmethod
    def _runs(rule: Rule, local: int, size: int) -> list[list[tuple[int, int, int]]]:
        """For each HF tensor what it is joined from, in order: (shard, row in the shard, length)."""
        found: list[list[tuple[int, int, int, int]]] = [[] for _ in rule.hf]
        for rank in range(size):
            for run in rule.runs(local, rank, size):
                found[run.source].append((run.hf_start, rank, run.start, run.length))
        return [[run[1:] for run in sorted(runs)] for runs in found]


def stream(planned: ExportPlan, *, everywhere: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """(HF name, whole tensor) in plan order: on every rank, or only on each tensor's owner. Collective."""
    stacks: dict[str, torch.Tensor] = {}
    rows: Counter[str] = Counter()
    for name, index, tensor in _broadcast(planned) if everywhere else planned.pieces():
        if index is None:
            yield name, tensor
            continue
        shape = planned.outputs[name].shape
        if name not in stacks:
            stacks[name] = tensor.new_empty(shape)
        stacks[name][index].copy_(tensor)
        rows[name] += 1
        if rows[name] == shape[0]:
            yield name, stacks.pop(name)


def _broadcast(planned: ExportPlan) -> Iterator[Piece]:
    """Every piece on every rank."""
    for item, found in planned.steps():
        for number, hf in enumerate((*item.bound.hf, *item.bound.also)):
            if planned.rank == item.owner:
                tensor = found[number].tensor
            else:
                output = planned.outputs[hf.name]
                shape = output.shape if hf.index is None else output.shape[1:]
                tensor = torch.empty(shape, dtype=output.dtype, device=planned.device)
            yield Piece(hf.name, hf.index, broadcast(tensor, item.owner))
