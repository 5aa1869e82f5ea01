"""Where a hosted module's activations enter and leave Megatron's parallel layout, and what gradients do
there.

An entry and an exit are a pair: which backward the entry needs follows from the exit. With y = f(x) mixing
the whole sequence, the gradient of one rank's slice of x is the sum of what the outputs of *all* ranks
contribute. Either the exit's backward has already brought every rank the whole output gradient, and the entry
may only take its own slice of an input gradient that is complete; or it has not, and the entry must sum. A
slice after an exit that did not gather loses every cross-rank term; a sum after an exit that did inflates by
the group's size.

Shapes are local unless said otherwise; S tokens are dim 0, and a group of size 1 costs nothing.
"""

import torch
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)


def enter_replicated(local: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """Tokens of all ranks, (S / size, ...) -> (S, ...); backward takes this rank's slice, unsummed.

    For work that every rank of `group` repeats in full, left through :func:`leave_replicated`: that exit's
    backward gives every rank the whole output gradient, so every rank computes the whole, equal input
    gradient.
    """
    return gather_from_sequence_parallel_region(local, tensor_parallel_output_grad=False, group=group)


def leave_replicated(full: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """This rank's slice of tokens, (S, ...) -> (S / size, ...); backward gathers the gradients of all ranks.

    The gather is what makes replicated work exact: a rank's output slice is one of `size` slices that its
    input influences, and the gradients of the others arrive only here. Pairs with :func:`enter_replicated`.
    """
    return scatter_to_sequence_parallel_region(full, group=group)
