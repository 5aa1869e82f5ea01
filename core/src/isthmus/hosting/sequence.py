"""Packed sequences as bounds in the packed dimension: pure, no tensors of activations."""

from itertools import pairwise

from megatron.core.packed_seq_params import PackedSeqParams


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
            f"cu_seqlens must rise from 0 to at most the {tokens} packed tokens, got {starts}. Under "
            "sequence parallelism it counts the tokens of all tensor-parallel ranks"
        )
    starts.append(tokens)
    return [(start, stop) for start, stop in pairwise(starts) if stop > start]


def _cumulative(actual, padded) -> list[int]:
    """The sequences' starts and the last stop, in tokens of the packed layout as it lies in memory."""
    chosen = actual if padded is None else padded
    if chosen is None:
        raise ValueError("packed sequences need cu_seqlens_q and cu_seqlens_kv")
    return chosen.tolist()
