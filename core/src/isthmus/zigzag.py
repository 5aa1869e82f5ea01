"""How context parallelism divides a sequence over ranks: Megatron's zigzag, or one run of tokens each. Pure.

Zigzag cuts a sequence into 2 * size chunks and gives a rank one from the front and its mirror from the back,
so that causal attention costs every rank the same.
"""

import torch

LAYOUTS = ("zigzag", "contiguous")


def zigzag(length: int, rank: int, cp_size: int) -> torch.Tensor:
    """Positions of `rank`'s tokens: of 2 * cp_size chunks, the rank-th from the front and from the back.

    Raises:
        ValueError: `length` does not divide into that many chunks.
    """
    if cp_size == 1:
        return torch.arange(length)
    chunk, rest = divmod(length, 2 * cp_size)
    if rest:
        raise ValueError(
            f"cannot divide a sequence of {length} tokens into the {2 * cp_size} chunks of "
            f"context_parallel_size={cp_size}: pad it"
        )
    back = 2 * cp_size - 1 - rank
    return torch.cat(
        [torch.arange(rank * chunk, (rank + 1) * chunk), torch.arange(back * chunk, (back + 1) * chunk)]
    )


def order(bounds: list[tuple[int, int]], cp_size: int, layout: str) -> torch.Tensor:
    """(T,) natural index of each token, rank by rank in the order in which the ranks hold them.

    `bounds` are the sequences, [(start, stop)], that follow each other and make up all T tokens; each is cut
    by itself under "zigzag", the whole row under "contiguous".

    Raises:
        ValueError: a sequence, or the row, does not divide; or an unknown layout.
    """
    total = bounds[-1][1] if bounds else 0
    if layout == "contiguous":
        if total % cp_size:
            raise ValueError(
                f"cannot divide {total} tokens over context_parallel_size={cp_size}: pad them at the end"
            )
        return torch.arange(total)
    if layout != "zigzag":
        raise ValueError(f"cp_layout must be one of {LAYOUTS}, got {layout!r}")
    pieces = [
        start + zigzag(stop - start, rank, cp_size) for rank in range(cp_size) for start, stop in bounds
    ]
    return torch.cat(pieces) if pieces else torch.arange(0)
