"""Where a hosted module's activations enter and leave Megatron's parallel layout, and what gradients do
there.

An entry and an exit are a pair: which backward the entry needs follows from the exit. With y = f(x) mixing
the whole sequence, the gradient of one rank's slice of x is the sum of what the outputs of *all* ranks
contribute. Either the exit's backward has already brought every rank the whole output gradient, and the entry
may only take its own slice of an input gradient that is complete; or it has not, and the entry must sum. A
slice after an exit that did not gather loses every cross-rank term; a sum after an exit that did inflates by
the group's size.

============  ===========================  ===================  ===========================  ==============
work          entry, forward               backward             exit, forward                backward
============  ===========================  ===================  ===========================  ==============
repeated, tp  gather (seq. parallel)       own slice            own slice                    gather
repeated, cp  gather, natural order        reduce-scatter, sum  own tokens                   zeros elsewhere
divided, tp   gather (seq. parallel)       reduce-scatter, sum  reduce-scatter, sum          gather
divided, tp   as it is (not seq. parallel) all-reduce, sum      all-reduce, sum              as it is
divided, cp   gather, natural order        reduce-scatter, sum  own order, reduce-scatter    gather
============  ===========================  ===================  ===========================  ==============

Tokens are dim 0. Locally they are divided over context parallelism first, and each rank's run of them over
tensor parallelism where sequences are parallel. A group of size 1 costs nothing.
"""

from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from isthmus.hosting.sequence import Row


@dataclass(frozen=True, slots=True)
class Groups:
    """The ranks that share a sequence; `sequence_parallel`: the tensor-parallel ones hold a slice each."""

    tp: ProcessGroup
    cp: ProcessGroup
    sequence_parallel: bool

    def tokens(self, local: int) -> int:
        """Tokens over all ranks, from those of one."""
        return local * self.cp.size() * (self.tp.size() if self.sequence_parallel else 1)


def enter_replicated(local: Tensor, groups: Groups, row: Row) -> Tensor:
    """Tokens of all ranks in natural order, (S local, ...) -> (S, ...), for work that every rank repeats.

    Pairs with :func:`leave_replicated`, whose backward gathers the whole output gradient over tensor
    parallelism (so a slice is complete) and not over context parallelism (so gradients are summed).
    """
    if groups.sequence_parallel:
        local = gather_over_repeated_work(local, groups.tp)
    return gather_over_context(local, groups.cp, row)


def leave_replicated(full: Tensor, groups: Groups, row: Row) -> Tensor:
    """This rank's tokens of work that every rank repeated, (S, ...) -> (S local, ...)."""
    if groups.cp.size() > 1:
        full = _own_rows(full, groups.cp, row)
    return scatter_over_repeated_work(full, groups.tp) if groups.sequence_parallel else full


def enter_heads(local: Tensor, groups: Groups, row: Row) -> Tensor:
    """Tokens of all ranks in natural order, (S local, ...) -> (S, ...), for work on this rank's heads.

    Backward sums over all ranks: each has the input gradient of its own heads. Pairs with
    :func:`leave_heads`.
    """
    if groups.sequence_parallel:
        local = gather_from_sequence_parallel_region(local, group=groups.tp)
    elif groups.tp.size() > 1:
        local = copy_to_tensor_model_parallel_region(local, group=groups.tp)
    return gather_over_context(local, groups.cp, row)


def leave_heads(full: Tensor, groups: Groups, row: Row) -> Tensor:
    """This rank's tokens of the sum over all ranks' heads, (S, ...) -> (S local, ...); backward gathers."""
    if groups.cp.size() > 1:
        full = reduce_scatter_to_sequence_parallel_region(_permuted(full, row.order, row.natural), groups.cp)
    if groups.sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(full, groups.tp)
    if groups.tp.size() > 1:
        return reduce_from_tensor_model_parallel_region(full.clone(), groups.tp)  # it sums in place
    return full


def gather_over_repeated_work(local: Tensor, group: ProcessGroup) -> Tensor:
    """Tokens of all ranks; backward takes this rank's slice, unsummed: every rank computes the same whole."""
    return gather_from_sequence_parallel_region(local, tensor_parallel_output_grad=False, group=group)


def scatter_over_repeated_work(full: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's slice of tokens; backward gathers: the other slices' gradients arrive only here."""
    return scatter_to_sequence_parallel_region(full, group=group)


def gather_over_context(local: Tensor, group: ProcessGroup, row: Row) -> Tensor:
    """Tokens of all context-parallel ranks in natural order; backward sums over the ranks."""
    if group.size() == 1:
        return local
    return _permuted(gather_from_sequence_parallel_region(local, group=group), row.natural, row.order)


def _own_rows(full: Tensor, group: ProcessGroup, row: Row) -> Tensor:
    count, rank = row.tokens // group.size(), group.rank()
    if row.order is None:
        return full.narrow(0, rank * count, count)
    return full.index_select(0, row.order.narrow(0, rank * count, count))


def scale_gradient(parameter: Tensor, factor: int) -> Tensor:
    """The parameter; its gradient times `factor`."""
    return _ScaledGradient.apply(parameter, factor)  # type: ignore[return-value]


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return grad * ctx.factor, None


def _permuted(tensor: Tensor, index: Tensor | None, inverse: Tensor | None) -> Tensor:
    """`tensor[index]` of a permutation; None is the identity."""
    return tensor if index is None else _Permuted.apply(tensor, index, inverse)  # type: ignore[return-value]


class _Permuted(torch.autograd.Function):
    """Indexing whose backward indexes too, where torch would add row by row into zeros."""

    @staticmethod
    def forward(ctx, tensor: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return tensor.index_select(0, index)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None
