"""Megatron -> HF: shards are gathered over TP and ETP on one owner a tensor, unpacked, and handed out.

`plan` decides, alike on every rank and before anything moves, which tensors come out, in which order, shape
and dtype, and which rank owns each. Owners are spread over all ranks that hold a tensor, so that they write
side by side.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from isthmus.checkpoint.dtypes import name_of, narrower, other_kind, overflows
from isthmus.checkpoint.gather import (
    Exchange,
    Holding,
    Item,
    agree,
    batches,
    broadcast,
    check_copies,
    holdings,
    places,
)
from isthmus.checkpoint.place import Place
from isthmus.checkpoint.writer import OutputTensor
from isthmus.names import LiveTensor
from isthmus.weights import Bound, HFTensor, Rule, WeightMap, collapse


class Piece(NamedTuple):
    """An HF tensor, or row `index` of a stacked one, in `parts` that are its rows one after the other."""

    name: str
    index: int | None
    parts: Sequence[torch.Tensor]

    @property
    def tensor(self) -> torch.Tensor:
        return self.parts[0] if len(self.parts) == 1 else torch.cat(list(self.parts))


@dataclass(slots=True)
class ExportPlan:
    """What an export will do; the same on every rank."""

    rank: int
    world_size: int
    device: torch.device
    items: list[Item]
    outputs: dict[str, OutputTensor]  # the HF tensors to come, by name
    owners: dict[str, int]  # the rank that assembles each
    held: dict[str, torch.Tensor] = field(default_factory=dict)  # this rank's own tensors, by canonical name
    narrows: bool = False  # whether a tensor is cast to a dtype of a smaller range
    infinite: dict[str, torch.dtype] = field(default_factory=dict)  # HF tensors that this overflowed, here

    def steps(self) -> Iterator[tuple[Item, list[Piece]]]:
        """Each item in plan order, with its HF tensors where this rank owns it. Collective: run it out."""
        unpack = _Unpacker()
        started = (
            (batch, Exchange(batch, self.held, self.rank, self.device)) for batch in batches(self.items)
        )
        for batch, exchange in _one_ahead(started):
            exchange.wait()
            for item in batch:
                if self.rank != item.owner:
                    yield item, []
                    continue
                rule, hf, also = item.bound.rule, item.bound.hf, item.bound.also
                found = unpack(rule, exchange.shards(item))
                if also:
                    hf, found = (*hf, *also), [*found, *found * len(also)]
                yield item, [self._piece(h, parts) for h, parts in zip(hf, found, strict=True)]

    def _piece(self, hf: HFTensor, parts: list[torch.Tensor]) -> Piece:
        dtype = self.outputs[hf.name].dtype
        if parts[0].dtype != dtype:
            parts = [self.cast(hf.name, part, dtype) for part in parts]
        return Piece(hf.name, hf.index, parts)

    def cast(self, name: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """(A part of) an HF tensor in another dtype; one that becomes infinite is remembered."""
        cast = values.to(dtype)
        if overflows(values, cast):
            self.infinite[name] = dtype
        return cast

    def overflow(self) -> ValueError | None:
        """The error that names all tensors which a cast on this rank has made infinite."""
        if not self.infinite:
            return None
        dtypes = ", ".join(sorted({name_of(dtype) for dtype in self.infinite.values()}))
        return ValueError(
            f"finite values become infinite in {dtypes} ({len(self.infinite)} tensors):"
            f" {', '.join(collapse(sorted(self.infinite)))}; export in a dtype of a larger range (--dtype)"
        )

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
    of the map is held by no rank, or a held one has no rule, or would come out as numbers of another kind.
    """
    mine = Place.of(model)
    known = holdings(held, model, mine)
    coverage = weights.cover(megatron=known)
    for bound in weights.megatron.values():
        for hf in (*bound.hf, *bound.also) if bound.rule.exported and bound.megatron in known else ():
            stored = known[bound.megatron].dtype
            if strange := other_kind(dtype_of(hf.name, stored), stored):
                coverage.misfit(strange, hf.name)
    if problems := coverage.problems():
        raise ValueError("cannot export this model:\n  " + "\n  ".join(problems))
    copies = [bound for bound in weights.megatron.values() if not bound.rule.exported]
    check_copies(held, known, {copy.megatron: weights.hf[copy.hf[0].name][0] for copy in copies}, model)

    choose = _Owners(places(mine))
    exported = [bound for bound in weights.megatron.values() if bound.rule.exported]
    if order is not None:
        exported.sort(key=lambda bound: (order.get(bound.hf[0].name, len(order)), bound.hf[0].index or 0))
    shapes = _Shapes(mine)
    groups: dict[str, list[Bound]] = {}  # each stands where its first tensor does
    for bound in exported:
        groups.setdefault(weights.group(bound.hf[0].name), []).append(bound)
    items: list[Item] = []
    outputs: dict[str, OutputTensor] = {}
    owners: dict[str, int] = {}
    for group in groups.values():
        owner = None  # one for all of a group, and so for all rows of a stack
        for bound in group:
            holding = known[bound.megatron]
            owner, holders = choose(bound.rule, holding, owner)
            items.append(Item(bound, owner, holders, holding))
            for hf, shape in zip((*bound.hf, *bound.also), shapes(bound.rule, holding.shape), strict=True):
                if hf.name not in outputs:
                    full = shape if hf.index is None else (len(weights.hf[hf.name]), *shape)
                    outputs[hf.name] = OutputTensor(hf.name, dtype_of(hf.name, holding.dtype), full)
                    owners[hf.name] = owner
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = held[0].tensor.device if held else torch.device("cpu")
    tensors = {live.canonical: live.tensor.detach() for live in held}
    narrows = any(
        narrower(item.holding.dtype, outputs[hf.name].dtype)
        for item in items
        for hf in (*item.bound.hf, *item.bound.also)
    )
    return ExportPlan(rank, world_size, device, items, outputs, owners, tensors, narrows)


class _Shapes:
    """Shapes of a rule's HF tensors (rows where stacked), then of their copies; worked out once a kind."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.known: dict[tuple[int, tuple[int, ...]], list[tuple[int, ...]]] = {}

    def __call__(self, rule: Rule, local: tuple[int, ...]) -> list[tuple[int, ...]]:
        found = self.known.get((id(rule), local))
        if found is None:
            _, size = self.place.shard(rule)
            found = [rule.hf_shape(source, local, size) for source in range(len(rule.hf))]
            found += [found[0]] * len(rule.also)
            self.known[id(rule), local] = found
        return found


class _Owners:
    """Chooses each tensor's owner: of all ranks that hold a shard of it, the one with the least to do."""

    def __init__(self, everyone: Sequence[Place]) -> None:
        self.load = [0] * len(everyone)
        # (stage, EP rank, None for what is no expert's) -> each rank there -> its TP or ETP group
        self.groups: dict[tuple[int, int | None], dict[int, tuple[int, ...]]] = {}
        members: dict[tuple[int, int | None, int, int], dict[int, int]] = {}
        for rank, place in enumerate(everyone):
            members.setdefault((place.pp, None, place.cp, place.dp), {})[place.tp] = rank
            members.setdefault((place.pp, place.ep, 0, place.edp), {})[place.etp] = rank
        for (stage, ep, _, _), ranks in members.items():
            group = tuple(rank for _, rank in sorted(ranks.items()))
            self.groups.setdefault((stage, ep), {}).update(dict.fromkeys(group, group))

    def __call__(self, rule: Rule, holding: Holding, owner: int | None) -> tuple[int, tuple[int, ...]]:
        """(owner, the ranks whose shards it needs); `owner` is given where it is chosen already."""
        groups = self.groups[min(holding.stages), min(holding.ep_ranks) if rule.expert else None]
        if owner is None:
            owner = min(groups, key=self.load.__getitem__)
        holders = groups.get(owner) or next(iter(groups.values()))
        if rule.dim is None:
            holders = (owner if owner in groups else holders[0],)
        self.load[owner] += holding.nbytes * len(holders)
        return owner, holders


class _Unpacker:
    """Shards of a Megatron tensor -> the parts of each HF tensor; views, unless it is divided by columns."""

    def __init__(self) -> None:
        self.places: dict[tuple[int, int, int], list[list[tuple[int, int, int]]]] = {}

    def __call__(self, rule: Rule, shards: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        first = shards[0]
        if first.dim() == 0:
            return [[first]]
        dim = rule.dim or 0
        local = first.size(dim)
        key = (id(rule), local, len(shards))
        places = self.places.get(key)
        if places is None:
            places = self.places[key] = self._runs(rule, local, len(shards))
        found = []
        for runs in places:
            parts = [
                shards[rank] if length == local else shards[rank].narrow(dim, start, length)
                for rank, start, length in runs
            ]
            # On a GPU one copy of the whole is better than many of parts.
            found.append(parts if len(parts) == 1 or (dim == 0 and first.is_cpu) else [torch.cat(parts, dim)])
        return found

    @staticmethod
    def _runs(rule: Rule, local: int, size: int) -> list[list[tuple[int, int, int]]]:
        """For each HF tensor what it is joined from, in order: (shard, row in the shard, length)."""
        found: list[list[tuple[int, int, int, int]]] = [[] for _ in rule.hf]
        for rank in range(size):
            for run in rule.runs(local, rank, size):
                found[run.source].append((run.hf_start, rank, run.start, run.length))
        return [[run[1:] for run in sorted(runs)] for runs in found]


def stream(planned: ExportPlan, *, everywhere: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """(HF name, whole tensor) in plan order: on every rank, or only on each tensor's owner. Collective.

    ValueError at its end where finite values became infinite in the dtype asked for.
    """
    stacks: dict[str, torch.Tensor] = {}
    rows: Counter[str] = Counter()
    for piece in _broadcast(planned) if everywhere else planned.pieces():
        name, index, tensor = piece.name, piece.index, piece.tensor
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
    if planned.narrows:
        agree(planned.overflow())


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
            yield Piece(hf.name, hf.index, [broadcast(tensor, item.owner)])
