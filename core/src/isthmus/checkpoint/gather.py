"""The only collectives of the weight path: who holds what, and moving shards to their owner."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from isthmus.checkpoint.place import Place
from isthmus.names import LiveTensor
from isthmus.weights import Bound

BATCH = 4 << 20  # bytes that come to an owner at a time; small shards one by one cost 1 ms each on gloo


@dataclass(slots=True)
class Holding:
    """A Megatron tensor as its holders have it: the shape of one rank's shard, and who they are."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stages: set[int] = field(default_factory=set)  # their pipeline ranks
    ep_ranks: set[int] = field(default_factory=set)  # their expert-parallel ranks

    @property
    def nbytes(self) -> int:
        """Bytes of one shard."""
        return math.prod(self.shape) * self.dtype.itemsize


def holdings(held: Iterable[LiveTensor], model: Any, mine: Place) -> dict[str, Holding]:
    """What the ranks of this rank's pipeline and expert groups hold, by canonical name.

    Tensor- and data-parallel ranks hold the same names by construction, so nothing is asked of them.
    """
    own = {
        live.canonical: Holding(tuple(live.tensor.shape), live.tensor.dtype, {mine.pp}, {mine.ep})
        for live in held
    }
    for group in (model.pg_collection.pp, model.pg_collection.ep):
        if group.size() == 1:
            continue
        found, own = from_all(own, group), {}
        for names in found:
            for name, holding in names.items():
                known = own.setdefault(name, Holding(holding.shape, holding.dtype))
                if (known.shape, known.dtype) != (holding.shape, holding.dtype):
                    raise ValueError(
                        f"{name}: one rank holds {known.dtype} {known.shape}, another"
                        f" {holding.dtype} {holding.shape}"
                    )
                known.stages |= holding.stages
                known.ep_ranks |= holding.ep_ranks
    return own


def check_copies(
    held: Sequence[LiveTensor], holdings: dict[str, Holding], copy_of: Mapping[str, str], model: Any
) -> None:
    """ValueError, on every rank, where pipeline stages hold differing copies of one tensor. Collective.

    A copy has the same name (an MTP stage's embedding), or one of its own (a tied head): then `copy_of` gives
    the name of the tensor that is exported. A tied head beside an embedding of the same rank, as on a stage
    with an MTP block, is no copy: Megatron allocates it, uses the embedding, and never trains it.
    """
    group = model.pg_collection.pp
    if group.size() == 1:
        return
    own = {live.canonical for live in held}
    held = [live for live in held if copy_of.get(live.canonical) not in own]
    stages: dict[str, set[int]] = {}
    for name, holding in holdings.items():
        stages.setdefault(copy_of.get(name, name), set()).update(holding.stages)
    mine = [
        (name, hashlib.blake2b(_bytes(live.tensor), digest_size=16).hexdigest())
        for live in held
        if len(stages[name := copy_of.get(live.canonical, live.canonical)]) > 1
    ]
    digests: dict[str, set[str]] = {}
    for copies in from_all(mine, group):
        for name, digest in copies:
            digests.setdefault(name, set()).add(digest)
    drifted = [f"{name} (stages {sorted(stages[name])})" for name, kinds in digests.items() if len(kinds) > 1]
    message = f"pipeline stages hold different copies of {', '.join(drifted)}; they must be kept equal"
    agree(ValueError(message) if drifted else None)


def from_all[T](own: T, group: Any = None) -> list[T]:
    """The value of every rank of `group` (None: of all ranks), in rank order. Collective."""
    if not dist.is_initialized():
        return [own]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    return found


def agree(error: Exception | None) -> None:
    """Raise on every rank if any rank failed, so that none waits for one that has given up. Collective.

    The failed ranks raise their own error; the others a ValueError where that was an OSError, ValueError or
    LookupError (the request was wrong), else a RuntimeError.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if error:
            raise error
        return
    of_request = isinstance(error, OSError | ValueError | LookupError)
    found = from_all(error and (str(error) or type(error).__name__, of_request))
    if error:
        raise error
    for rank, other in enumerate(found):
        if other:
            message, of_request = other
            raise (ValueError if of_request else RuntimeError)(f"rank {rank}: {message}")


def attempt[T](work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What `work` returns, and the error that stopped it, for `agree`: of any kind, out of memory too."""
    try:
        return work(), None
    except Exception as error:
        return None, error


def on_every_rank[T](work: Callable[[], T]) -> T:
    """`work()` here; an error on every rank where it fails on any. Collective."""
    result, error = attempt(work)
    agree(error)
    return result  # type: ignore[return-value]  # it did not fail


def from_first[T](make: Callable[[], T]) -> T:
    """What the first rank makes, on every rank; an error there is raised everywhere. Collective."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    made: list[Any] = [on_every_rank(lambda: make() if first else None)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(made, src=0)
    return made[0]


class Item(NamedTuple):
    """A Megatron tensor on its way out: its owner and the ranks that hold its shards, in shard order."""

    bound: Bound
    owner: int
    holders: tuple[int, ...]
    holding: Holding
    in_place: bool = False  # nothing travels: the holders put their rows where they belong


def batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    """The items in their order, cut where an owner has `BATCH` bytes to receive; alike on every rank."""
    batch: list[Item] = []
    incoming: Counter[int] = Counter()
    for item in items:
        batch.append(item)
        others = 0 if item.in_place else len(item.holders) - (item.owner in item.holders)
        if others:
            incoming[item.owner] += others * item.holding.nbytes
            if incoming[item.owner] >= BATCH:
                yield batch
                batch, incoming = [], Counter()
    yield batch


class Exchange:
    """The shards of a batch on their way to their owners; what goes from one rank to another is one message.

    They travel from construction on, until `wait`. All ranks construct theirs in the same order; `held` are
    this rank's own tensors by canonical name.
    """

    def __init__(
        self, items: Sequence[Item], held: Mapping[str, torch.Tensor], rank: int, device: torch.device
    ) -> None:
        self._rank = rank
        self._held = held
        outgoing: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        incoming: dict[tuple[int, torch.dtype], list[Item]] = {}
        for item in items:
            if item.in_place:
                continue
            if rank == item.owner:
                for holder in item.holders:
                    if holder != rank:
                        incoming.setdefault((holder, item.holding.dtype), []).append(item)
            elif rank in item.holders:
                shard = held[item.bound.megatron]
                outgoing.setdefault((item.owner, item.holding.dtype), []).append(shard)
        operations = []
        for (owner, _), shards in outgoing.items():
            message = torch.cat([shard.reshape(-1) for shard in shards]) if len(shards) > 1 else shards[0]
            operations.append(dist.P2POp(dist.isend, message.contiguous(), owner))
        self._received: dict[tuple[str, int], torch.Tensor] = {}
        for (holder, dtype), coming in incoming.items():
            counts = [math.prod(item.holding.shape) for item in coming]
            message = torch.empty(sum(counts), dtype=dtype, device=device)
            operations.append(dist.P2POp(dist.irecv, message, holder))
            for item, shard in zip(coming, message.split(counts), strict=True):
                self._received[item.bound.megatron, holder] = shard.view(item.holding.shape)
        self._requests = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        """Until this rank's messages have gone and come."""
        for request in self._requests:
            request.wait()

    def shards(self, item: Item) -> list[torch.Tensor]:
        """On the owner: the shards of an item, in shard order."""
        name = item.bound.megatron
        return [
            self._held[name] if holder == self._rank else self._received[name, holder]
            for holder in item.holders
        ]


def broadcast(tensor: torch.Tensor, owner: int) -> torch.Tensor:
    """`tensor` of the owner on every rank, received in place."""
    tensor = tensor.contiguous()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(tensor, owner)
    return tensor


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy()
