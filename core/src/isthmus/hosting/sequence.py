"""Where the tokens of a batch lie: sequences as bounds, and the order in which ranks hold them. Pure.

Positions are those of a whole row, over all ranks, in natural order.
"""

import weakref
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from isthmus.zigzag import order


@dataclass(frozen=True, slots=True)
class Row:
    """A row of `tokens` over all ranks: its sequences, and how context parallelism divides it.

    `order` (tokens,) is the natural index of each token, rank by rank as they are held; None where that is
    the natural order. `natural` is its inverse.
    """

    tokens: int
    bounds: tuple[tuple[int, int], ...]
    order: torch.Tensor | None
    natural: torch.Tensor | None


def row(
    packed: PackedSeqParams | None, tokens: int, batch: int, cp_size: int, layout: str, device: torch.device
) -> Row:
    """The row of (tokens, batch, h), `tokens` counted over all ranks. ValueError: see `sequence_bounds`."""
    if packed is None:
        return _row(((0, tokens),), tokens, cp_size, layout, device)
    key = (tokens, batch, cp_size, layout, device)
    last = _last.get("row")
    if last is None or last[0]() is not packed or last[1] != key:
        # All layers ask for the same; reading the bounds waits for the GPU.
        found = _row(tuple(sequence_bounds(packed, tokens, batch)), tokens, cp_size, layout, device)
        last = _last["row"] = (weakref.ref(packed), key, found)
    return last[2]


_last: dict[str, Any] = {}  # the last packed row: (reference to its parameters, key, Row)


@lru_cache(maxsize=8)
def _row(
    bounds: tuple[tuple[int, int], ...], tokens: int, cp_size: int, layout: str, device: torch.device
) -> Row:
    if cp_size == 1:
        return Row(tokens, bounds, None, None)
    held = order(list(bounds), cp_size, layout)
    if bool((held == torch.arange(tokens)).all()):
        return Row(tokens, bounds, None, None)
    return Row(tokens, bounds, held.to(device), held.argsort().to(device))


def sequence_bounds(packed: PackedSeqParams, tokens: int, batch: int) -> list[tuple[int, int]]:
    """Where each sequence of (tokens, batch, h) lies, [(start, stop)] in order, covering all tokens.

    Padding after a sequence counts as its tail, padding after the last as a sequence of its own: a causal
    module lets neither reach a real token. What does not describe `tokens` tokens of one row is a ValueError.
    """
    if packed.qkv_format != "thd":
        raise ValueError(f"packed sequences must be in qkv_format 'thd', got {packed.qkv_format!r}")
    if batch != 1:
        raise ValueError(f"packed sequences need a batch of 1, got {batch}: pack rows into one")
    starts = _cumulative(packed.cu_seqlens_q, packed.cu_seqlens_q_padded)
    if starts != _cumulative(packed.cu_seqlens_kv, packed.cu_seqlens_kv_padded):
        raise ValueError("a hosted module needs equal cu_seqlens_q and cu_seqlens_kv")
    if starts[:1] != [0] or starts != sorted(starts) or starts[-1] > tokens:
        raise ValueError(
            f"cu_seqlens must rise from 0 to at most the {tokens} packed tokens, got {starts}. It counts the "
            "tokens of all tensor-parallel (under sequence parallelism) and context-parallel ranks"
        )
    starts.append(tokens)
    return [(start, stop) for start, stop in pairwise(starts) if stop > start]


def boundaries(packed: PackedSeqParams | None) -> torch.Tensor | None:
    """The sequences' starts and the last stop, in tokens of the packed layout as it lies in memory.

    None for rows that are not packed. ValueError: a packed row that does not say.
    """
    return None if packed is None else _chosen(packed.cu_seqlens_q, packed.cu_seqlens_q_padded)


def _cumulative(actual, padded) -> list[int]:
    return _chosen(actual, padded).tolist()


def _chosen(actual: torch.Tensor | None, padded: torch.Tensor | None) -> torch.Tensor:
    chosen = actual if padded is None else padded
    if chosen is None:
        raise ValueError("packed sequences need cu_seqlens_q and cu_seqlens_kv")
    return chosen
