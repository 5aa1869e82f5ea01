"""What a format is: codes that decode to numbers, and the numbers of each block that these are scaled by.

A matrix (R, C) is stored in parts, by role: `codes`, and beside them `scale` and what else a format has. Only
codes are large. value = (decoded code - zero point) * scale, computed in float32, then cast once.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from isthmus.quant.blocks import Block, apply_, extremes

CHUNK = 1 << 19  # values at a time: what is between codes and result stays in a core's cache
CODES = "codes"
_LARGEST = torch.finfo(torch.float32).max


class _Own(threading.local):
    """What each thread has for itself."""

    def __init__(self) -> None:
        self.tensors: dict[torch.dtype, Tensor] = {}
        self.views: dict[torch.dtype, Tensor] = {}  # the last ones: experts are all of one shape


_own = _Own()


def scratch(dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """This thread's one tensor of a dtype, in a shape: new memory costs more than what is done in it."""
    view = _own.views.get(dtype)
    if view is None or view.shape != shape:
        kept = _own.tensors.get(dtype)
        if kept is None or kept.numel() < shape.numel():
            kept = _own.tensors[dtype] = torch.empty(max(CHUNK, shape.numel()), dtype=dtype)
        view = _own.views[dtype] = kept[: shape.numel()].view(shape)
    return view


class Codec(ABC):
    """A format. Instances that are equal store alike."""

    label: str
    word: int = 1  # values along a row in the smallest piece of `codes` that can be read
    largest: float  # the size of the outermost code, less the zero point
    unit: float = 1.0  # what decoded numbers are still to be multiplied by

    @abstractmethod
    def shapes(self, rows: int, cols: int, block: Block) -> dict[str, tuple[int, ...]]:
        """The shape of each part of a matrix."""

    @abstractmethod
    def decode(self, codes: Tensor) -> Tensor:
        """Codes (n, ...) of n rows as float32 (n, values of a row), contiguous; the next call may reuse it.

        ValueError: NaN or Inf.
        """

    @abstractmethod
    def encode(self, numbers: Tensor) -> Tensor:
        """The codes nearest to float32 numbers, ties to even; those out of range become the outermost."""

    @abstractmethod
    def grids(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Scales and zero points (None for none) of all blocks, float32, from the parts other than codes."""

    @abstractmethod
    def fresh(self, low: Tensor, high: Tensor, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """Parts other than codes, for blocks whose values go from `low` to `high`."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """One tensor of real numbers, (R, C) or a stack (E, R, C), and the stored tensors that it is made of."""

    name: str
    shape: tuple[int, ...]
    codec: Codec
    block: Block
    parts: Mapping[str, str]  # role -> name of the stored tensor
    beside: Mapping[str, str] = field(default_factory=dict)  # stored tensors that its values do not depend on

    @property
    def label(self) -> str:
        """The format and its blocks, in words."""
        rows, cols = self.block
        if cols == self.shape[-1] and rows in (1, self.shape[-2]):
            return f"{self.codec.label}, a scale for each {'row' if rows == 1 else 'matrix'}"
        return f"{self.codec.label}, a scale for {rows} x {cols}"

    @property
    def codes(self) -> str:
        """The stored tensor of the codes."""
        return self.parts[CODES]


class Grids(NamedTuple):
    """What the decoded numbers of each block are multiplied by, and what is subtracted from them before."""

    scale: Tensor
    zero: Tensor | None
    unit: float  # all numbers are multiplied by this one first

    @classmethod
    def of(cls, codec: Codec, scale: Tensor, zero: Tensor | None, largest: float | None = None) -> "Grids":
        """The codec's unit is part of the scales where float32 has the product; `largest` is that of them."""
        unit = codec.unit
        if unit != 1 and (scale.amax().item() if largest is None else largest) * unit <= _LARGEST:
            scale, unit = scale * unit, 1.0
        return cls(scale, zero, unit)


def dequantise(
    codec: Codec,
    block: Block,
    codes: Tensor,
    grids: Grids,
    out: Tensor,
    *,
    row: int = 0,
    col: int = 0,
) -> Tensor:
    """Fills `out` (n, m) with the values of a matrix from row `row` and column `col` on.

    `codes` (n, ...) begin at the word that column `col` lies in; `grids` are those of the whole matrix.
    """
    rows, cols = out.shape
    if rows == 0 or cols == 0:
        return out
    scale, zero, unit = grids
    skipped = col % codec.word
    step = max(1, CHUNK // (codes.numel() // rows * codec.word))
    if step > block[0]:
        step -= step % block[0]
    for first in range(0, rows, step):
        band = (codes, out) if step >= rows else (codes[first : first + step], out[first : first + step])
        numbers = codec.decode(band[0])
        if numbers.shape[1] > skipped + cols:  # the last word is cut, or filled up
            numbers = numbers[:, : skipped + cols].contiguous()
        if zero is not None:
            apply_(Tensor.sub_, numbers, zero, block, row + first, col - skipped)
        if unit != 1:
            numbers.mul_(unit)
        apply_(Tensor.mul_, numbers, scale, block, row + first, col - skipped)
        band[1].copy_(numbers[:, skipped:] if skipped else numbers)
    return out


def quantise(
    codec: Codec,
    block: Block,
    values: Tensor,
    dtypes: Mapping[str, torch.dtype],
    parts: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """All parts of a matrix of finite values: with the `parts` given beside the codes, or new ones."""
    values = values.float()
    if parts is None:
        parts = codec.fresh(*extremes(values, block), dtypes)
    scale, zero = codec.grids(parts)
    numbers = values.clone()
    apply_(Tensor.div_, numbers, scale.where(scale != 0, 1.0), block, 0, 0)
    if zero is not None:
        apply_(Tensor.add_, numbers, zero, block, 0, 0)
    return {CODES: codec.encode(numbers), **parts}


def requantise(
    codec: Codec,
    block: Block,
    values: Tensor,
    dtype: torch.dtype,
    dtypes: Mapping[str, torch.dtype],
    parts: Mapping[str, Tensor] | None,
) -> dict[str, Tensor]:
    """All parts of a matrix: the source's own `parts` where they give exactly these values in `dtype`.

    So a tensor that nobody has changed comes back code by code, and one that was trained has scales of its
    own. Where the source's codes are not among its parts, they are found again with its scales.
    """
    if parts is not None:
        found = dict(parts) if CODES in parts else quantise(codec, block, values, dtypes, parts)
        again = torch.empty(values.shape, dtype=dtype)
        dequantise(codec, block, found[CODES], Grids.of(codec, *codec.grids(parts)), again)
        if torch.equal(again.float(), values.float()):
            return found
    if not torch.isfinite(values).all():
        raise ValueError("NaN or Inf has no code in any quantised format")
    return quantise(codec, block, values, dtypes)
