"""Which token stands where: sequences, positions and context-parallel order of a batch. Pure.

`T` tokens over all context-parallel ranks, in natural order.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch

from isthmus.zigzag import zigzag


@dataclass(frozen=True, slots=True)
class Tokens:
    """One row of tokens: `sequence` (T,) index, `position` (T,) in it, `valid` (T,) False for padding.

    `order[r]` are the indices into T of rank r's tokens, in the order in which it holds them.
    """

    sequence: torch.Tensor
    position: torch.Tensor
    valid: torch.Tensor
    order: tuple[torch.Tensor, ...]


def one_sequence(length: int, cp_size: int = 1) -> Tokens:
    """Tokens of a single sequence of `length` over all ranks."""
    return packed([0, length], [0, length], length, cp_size)


def packed(starts: list[int], real_starts: list[int], total: int, cp_size: int = 1) -> Tokens:
    """Tokens of sequences that begin at `starts` (padding included); `real_starts` counts their real tokens.

    Tokens behind the last sequence are padding: a sequence of their own in which none is valid.

    Raises:
        ValueError: a sequence does not divide into 2 * cp_size chunks.
    """
    if starts[-1] < total:
        starts, real_starts = [*starts, total], [*real_starts, real_starts[-1]]
    sequence, position, valid = [], [], []
    order: list[list[torch.Tensor]] = [[] for _ in range(cp_size)]
    for i, ((start, stop), (real_start, real_stop)) in enumerate(
        zip(pairwise(starts), pairwise(real_starts), strict=True)
    ):
        length = stop - start
        here = torch.arange(length)
        sequence.append(torch.full((length,), i))
        position.append(here)
        valid.append(here < real_stop - real_start)
        for rank in range(cp_size):
            order[rank].append(start + zigzag(length, rank, cp_size))
    return Tokens(
        torch.cat(sequence), torch.cat(position), torch.cat(valid), tuple(torch.cat(parts) for parts in order)
    )
