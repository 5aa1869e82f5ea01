"""The tokens of a comparison: which sequence goes to which rank and microbatch, the same on every process."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, pairwise

import torch
from torch import Tensor

type Inputs = Mapping[str, Tensor]
"""Vision inputs of a sequence, by HF's names: of its images one after the other, or of its L tokens."""

type Sample = Callable[[Tensor, str, torch.Generator], tuple[Tensor, Inputs]]
"""(tokens, kind, random numbers) -> the tokens with placeholders of that kind of image, and the inputs."""

PER_TOKEN = "token_type_ids"
"""How the names of inputs end that have a number for each token."""

PIXELS = "pixel_values"
"""How the names of inputs begin that the first pipeline stage alone needs."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences in the order of data-parallel ranks, then of microbatches.

    A sequence of L tokens to run holds L + 1: the last is a label only. All microbatches are alike in
    lengths, so that a mean over tokens does not depend on how the sequences are divided.
    """

    sequences: tuple[Tensor, ...]  # (L + 1,), int64
    per_microbatch: int
    packed: bool  # a microbatch is one row of sequences end to end, instead of one row for each
    multiple: int = 1  # packed: each sequence is padded to a multiple of this,
    row_multiple: int = 1  # and the last one until the row is a multiple of this
    vocabulary: int | None = None  # placeholders of images may lie beyond it
    inputs: tuple[Inputs, ...] = ()  # of each sequence, of a vision-language model; none for one of text

    @property
    def tokens(self) -> int:
        """Tokens to run, over all sequences."""
        return sum(len(sequence) - 1 for sequence in self.sequences)

    def labels(self, sequence: Tensor) -> Tensor:
        """(L,) next tokens; 0 for one that is none of the vocabulary's, which no model can predict."""
        following = sequence[1:]
        return following if self.vocabulary is None else following.where(following < self.vocabulary, 0)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """Where the sequences of a row lie, [(start, stop)] with their padding."""
        lengths = [len(sequence) - 1 for sequence in self.sequences[: self.per_microbatch]]
        if not self.packed:
            return [(0, lengths[0])]
        padded = [length + -length % self.multiple for length in lengths]
        padded[-1] += -sum(padded) % self.row_multiple
        return list(pairwise([0, *accumulate(padded)]))

    @property
    def row(self) -> int:
        """Tokens of one row of a microbatch, with padding."""
        return self.bounds[-1][1]

    @property
    def kept(self) -> Tensor:
        """Positions in a row that are no padding, in order."""
        lengths = [len(sequence) - 1 for sequence in self.sequences[: self.per_microbatch]]
        return torch.cat(
            [torch.arange(start, start + n) for (start, _), n in zip(self.bounds, lengths, strict=False)]
        )

    def microbatches(self, rank: int, size: int) -> list[list[Tensor]]:
        """The sequences of data-parallel `rank` of `size`, one list for each microbatch."""
        count = len(self.sequences) // size
        return self._divided(self.sequences[rank * count : (rank + 1) * count])

    def vision_inputs(self, rank: int, size: int) -> list[list[Inputs]]:
        """What :meth:`microbatches` gives of `inputs`."""
        count = len(self.inputs) // size
        return self._divided(self.inputs[rank * count : (rank + 1) * count])

    def _divided[T](self, own: Sequence[T]) -> list[list[T]]:
        return [list(own[i : i + self.per_microbatch]) for i in range(0, len(own), self.per_microbatch)]


def random_batch(
    vocabulary: int,
    *,
    tokens: int,
    seed: int,
    ranks: int,
    microbatches: int,
    packed: bool,
    tp: int = 1,
    cp: int = 1,
    sample: Sample | None = None,
    kinds: Sequence[str] = (),
) -> Batch:
    """Uniformly random token ids; `ranks` data-parallel ranks with `microbatches` each.

    Args:
        tokens: length of a sequence. Packed: two rows' worth of tokens in three unequal sequences, none of a
            length that divides evenly into anything.
        tp, cp: ranks that a row is divided over; packed sequences are padded for them where cp > 1.
        sample, kinds: of a vision-language model, what puts images of these kinds, in turn, into sequences.
    """
    if packed and tokens < 8:
        raise ValueError(f"cannot pack sequences of {tokens} tokens; use at least 8")
    first, second = tokens // 2 + 1, tokens // 4 + 2
    lengths = [first, second, 2 * tokens - first - second] if packed else [tokens, tokens]
    generator = torch.Generator().manual_seed(seed)
    sequences = tuple(
        torch.randint(vocabulary, (length + 1,), generator=generator)
        for _ in range(ranks * microbatches)
        for length in lengths
    )
    multiple = 2 * cp if cp > 1 else 1
    row_multiple = math.lcm(multiple, cp * tp) if cp > 1 else 1
    inputs: tuple[Inputs, ...] = ()
    if sample is not None:
        pairs = [sample(tokens, kind, generator) for tokens, kind in zip(sequences, cycle(kinds))]
        sequences, inputs = (tuple(part) for part in zip(*pairs, strict=True))  # type: ignore[assignment]
    return Batch(sequences, len(lengths), packed, multiple, row_multiple, vocabulary, inputs)
