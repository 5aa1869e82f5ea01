"""Megatron -> HF: shards are gathered over TP and ETP on one owner a tensor, unpacked, and handed out.

For files that all ranks of a machine can write to, only what is divided by columns is gathered: rows are
handed out where they are. `plan` decides, alike on every rank and before anything moves, which tensors come
out, in which order, shape and dtype, and which rank owns each. Owners are spread over all ranks that hold a
tensor, so that they write side by side.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
    from_all,
    holdings,
)
from isthmus.checkpoint.place import Place
from isthmus.checkpoint.unpack import Piece, Unpacker
from isthmus.checkpoint.writer import OutputTensor
from isthmus.names import LiveTensor
from isthmus.weights import Bound, HFTensor, Rule, WeightMap, collapse


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
        """Each item in plan order, with its HF tensors where this rank owns it. Collective: run it out.

        An item in place comes with the rows of it that this rank holds. Of a batch each rank has those for
        its own file first, then those for the next rank's: a file takes one write at a time.
        """
        unpack = Unpacker()
        started = (
            (batch, Exchange(batch, self.held, self.rank, self.device)) for batch in batches(self.items)
        )
        for batch, exchange in _one_ahead(started):
            exchange.wait()
            for item in sorted(batch, key=self._turn):
                yield item, self._found(unpack, item, exchange)

    def _turn(self, item: Item) -> int:
        """When this rank handles an item of a batch."""
        return (item.owner - self.rank) % self.world_size if item.in_place else 0

    def _found(self, unpack: Unpacker, item: Item, exchange: Exchange) -> list[Piece]:
        """What this rank hands out of an item: all of it, its own rows, or nothing."""
        rule, hf, also = item.bound.rule, item.bound.hf, item.bound.also
        size = len(item.holders)
        if item.in_place and size > 1:
            if self.rank not in item.holders:
                return []
            shard, rank = self.held[item.bound.megatron], item.holders.index(self.rank)
            return [
                self._piece(tensor, [rows], row)
                for source, row, rows in unpack.rows(rule, shard, rank, size)
                for tensor in (hf[source], *also)
            ]
        if self.rank != (item.holders[0] if item.in_place else item.owner):
            return []
        found = unpack(rule, exchange.shards(item))
        if also:
            hf, found = (*hf, *also), [*found, *found * len(also)]
        return [self._piece(h, parts) for h, parts in zip(hf, found, strict=True)]

    def _piece(self, hf: HFTensor, parts: list[torch.Tensor], row: int | None = None) -> Piece:
        dtype = self.outputs[hf.name].dtype
        if parts[0].dtype != dtype:
            parts = [self.cast(hf.name, part, dtype) for part in parts]
        return Piece(hf.name, hf.index, parts, row)

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
        """What this rank hands out, tensor by tensor, as `steps` has it. Collective: run it to its end."""
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
    in_place: Callable[[str], bool] = lambda name: False,
) -> ExportPlan:
    """Decide the export of this rank's tensors `held` of `model`. Collective.

    `dtype_of(hf_name, dtype of the parameter)` is the dtype to come; `order` the position of HF names in the
    source; `in_place(hf_name)` whether every rank can put rows of it where they belong, in the owner's file.
    What is held may also be gradients, under the names of their parameters. ValueError where a tensor of the
    map is held by no rank, or a held one has no rule, or would come out as numbers of another kind.
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

    everyone = from_all(mine)
    choose = _Owners(everyone)
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
            stay = (
                holders != (owner,)
                and (len(holders) == 1 or bound.rule.dim == 0)
                and len({everyone[rank].host for rank in (owner, *holders)}) == 1
                and all(in_place(hf.name) for hf in bound.hf)
            )
            items.append(Item(bound, owner, holders, holding, stay))
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
