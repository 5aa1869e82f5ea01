"""Tokens from the order in which context-parallel ranks hold them to one run of tokens a rank, and back.

Each rank sends what it holds once: 1/c of a sequence, where a gather receives all of it. The backward of
either is the other.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from isthmus.hosting.sequence import Row


def to_contiguous(local: Tensor, group: ProcessGroup, row: Row) -> Tensor:
    """This rank's tokens as the batch has them -> tokens [r n, (r + 1) n) in natural order; (n, ...) both."""
    return local if row.order is None else _Relayout.apply(local, group, row.order, False)  # type: ignore[return-value]


def from_contiguous(local: Tensor, group: ProcessGroup, row: Row) -> Tensor:
    """Inverse of :func:`to_contiguous`."""
    return local if row.order is None else _Relayout.apply(local, group, row.order, True)  # type: ignore[return-value]


class _Relayout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local: Tensor, group: ProcessGroup, order: Tensor, back: bool) -> Tensor:
        ctx.group, ctx.order, ctx.back = group, order, back
        return _exchange(local, group, order, back)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return _exchange(grad, ctx.group, ctx.order, not ctx.back), None, None, None


def _exchange(local: Tensor, group: ProcessGroup, order: Tensor, back: bool) -> Tensor:
    size, rank = group.size(), group.rank()
    count = order.numel() // size
    held = order.view(size, count)  # natural index of each token, by the rank that holds it
    # Sorted by natural index, a rank's tokens stand by the rank to which they go.
    mine = held[rank].argsort()
    going = torch.bincount(held[rank] // count, minlength=size).tolist()
    owner = torch.empty_like(order)
    owner[held.flatten()] = torch.arange(size, device=order.device).repeat_interleave(count)
    run = owner[rank * count : (rank + 1) * count]  # of the tokens that are to be here, who holds them
    theirs = run.argsort(stable=True)
    coming = torch.bincount(run, minlength=size).tolist()
    if back:
        mine, theirs, going, coming = theirs, mine, coming, going
    sent = local.index_select(0, mine).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, coming, going, group=group)
    return torch.empty_like(received).index_copy_(0, theirs, received)
