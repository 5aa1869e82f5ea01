"""The only collectives of the weight path: who holds what, and moving shards to their owner."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from isthmus.checkpoint.place import Place
from isthmus.names import LiveTensor

_SENDS_IN_FLIGHT = (
    64  # a sender runs ahead of the owners by this many shards; it sends from its own parameters
)


@dataclass(slots=True)
class Holding:
    """A Megatron tensor as its holders have it: the shape of one rank's shard, and who they are."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stages: set[int] = field(default_factory=set)  # their pipeline ranks
    ep_ranks: set[int] = field(default_factory=set)  # their expert-parallel ranks


def places(mine: Place) -> list[Place]:
    """Every rank's place, by global rank."""
    if not dist.is_initialized():
        return [mine]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, tuple(mine))
    return [Place(*place) for place in found]


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
        found: list[Any] = [None] * group.size()
        dist.all_gather_object(found, own, group=group)
        own = {}
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
    the name of the tensor that is exported.
    """
    group = model.pg_collection.pp
    if group.size() == 1:
        return
    stages: dict[str, set[int]] = {}
    for name, holding in holdings.items():
        stages.setdefault(copy_of.get(name, name), set()).update(holding.stages)
    mine = [
        (name, hashlib.blake2b(_bytes(live.tensor), digest_size=16).hexdigest())
        for live in held
        if len(stages[name := copy_of.get(live.canonical, live.canonical)]) > 1
    ]
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, mine, group=group)
    digests: dict[str, set[str]] = {}
    for copies in found:
        for name, digest in copies:
            digests.setdefault(name, set()).add(digest)
    drifted = [f"{name} (stages {sorted(stages[name])})" for name, kinds in digests.items() if len(kinds) > 1]
    message = f"pipeline stages hold different copies of {', '.join(drifted)}; they must be kept equal"
    agree(ValueError(message) if drifted else None)


def agree(error: Exception | None) -> None:
    """Raise on every rank if any rank failed, so that none waits for one that has given up. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if error:
            raise error
        return
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, str(error) if error else None)
    if error:
        raise error
    for rank, message in enumerate(found):
        if message:
            raise ValueError(f"rank {rank}: {message}")


def from_first[T](make: Callable[[], T]) -> T:
    """What the first rank makes, on every rank; an error there is raised everywhere. Collective."""
    made: list[Any] = [None]
    error: Exception | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            made = [make()]
        except (OSError, ValueError, LookupError) as failure:
            error = failure
    agree(error)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(made, src=0)
    return made[0]


class Shards:
    """Moves shards to their owners, in an order that all ranks share; sends do not wait for the owner."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._sends: deque[tuple[Any, torch.Tensor]] = deque()

    def send(self, shard: torch.Tensor, owner: int) -> None:
        """Send this rank's shard; the memory stays in use until the owner has received it."""
        shard = shard.contiguous()
        self._sends.append((dist.isend(shard, owner), shard))
        while len(self._sends) > _SENDS_IN_FLIGHT:
            self._sends.popleft()[0].wait()

    def receive(
        self, holders: Sequence[int], own: torch.Tensor | None, holding: Holding
    ) -> list[torch.Tensor]:
        """The shards of `holders`, in that order; `own` is this rank's, where it is a holder itself."""
        shards, waits = [], []
        for rank in holders:
            if rank == self._rank and own is not None:
                shards.append(own)
                continue
            shards.append(torch.empty(holding.shape, dtype=holding.dtype, device=self._device))
            waits.append(dist.irecv(shards[-1], rank))
        for wait in waits:
            wait.wait()
        return shards

    def finish(self) -> None:
        """Wait until everything sent has been received."""
        while self._sends:
            self._sends.popleft()[0].wait()


def broadcast(tensor: torch.Tensor, owner: int) -> torch.Tensor:
    """`tensor` of the owner on every rank, received in place."""
    tensor = tensor.contiguous()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(tensor, owner)
    return tensor


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy()
