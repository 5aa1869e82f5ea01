"""A quantised checkpoint read as if it were a plain one: real numbers under the weights' own names.

Slices stay slices: a rank reads the codes of its own rows and columns, and the scales of those.
"""

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from isthmus.checkpoint.header import TensorInfo
from isthmus.checkpoint.reader import CheckpointReader, bounds
from isthmus.quant.codec import CODES, Quantised, dequantise
from isthmus.quant.find import find_or_refuse
from isthmus.quant.ranges import Scales, check_parts, check_values, scales_of
from isthmus.quant.settings import plain_dtype

type Span = slice | None


def open_checkpoint(folder: str | Path, config: Mapping[str, Any]) -> "CheckpointReader | DequantisedReader":
    """A reader of real numbers, with config.json `config`. ValueError: codes that cannot be read so."""
    return dequantised(CheckpointReader(folder), config)


def dequantised(
    stored: CheckpointReader, config: Mapping[str, Any]
) -> "CheckpointReader | DequantisedReader":
    """A reader of real numbers over one of stored tensors; the same where they are plain. Raises as above."""
    quantised = find_or_refuse(config, stored.tensors, stored.folder)
    return DequantisedReader(stored, quantised, plain_dtype(config)) if quantised else stored


def logical(
    stored: Mapping[str, TensorInfo], quantised: Mapping[str, Quantised], dtype: torch.dtype
) -> dict[str, TensorInfo]:
    """The tensors as a plain checkpoint of `dtype` would have them, each where its codes lie."""
    parts = {part for item in quantised.values() for part in (*item.parts.values(), *item.beside.values())}
    by_codes = {item.codes: item for item in quantised.values()}
    found = {}
    for name, info in stored.items():
        item = by_codes.get(name)
        if item is not None:
            nbytes = prod(item.shape) * dtype.itemsize
            found[item.name] = TensorInfo(item.name, dtype, item.shape, info.file, info.offset, nbytes)
        elif name not in parts:
            found[name] = info
    return found


class DequantisedReader:
    """What :class:`CheckpointReader` is, of the dequantised tensors; `stored` reads the stored ones."""

    def __init__(
        self, stored: CheckpointReader, quantised: Mapping[str, Quantised], dtype: torch.dtype
    ) -> None:
        self.folder = stored.folder
        self.stored = stored
        self.quantised = quantised
        self.dtype = dtype
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(logical(stored.tensors, quantised, dtype))
        self.bytes_read = 0  # bytes of dequantised tensors handed out by `slice`
        self._last: tuple[str, int | None] | None = None  # the matrix of `_scales`
        self._scales: Scales | None = None

    def slice(
        self,
        name: str,
        rows: Span = None,
        cols: Span = None,
        index: int | None = None,
        *,
        into: Tensor | None = None,
    ) -> Tensor:
        """`tensor[index]` where given, then its `[rows, cols]`; as :meth:`CheckpointReader.slice`.

        ValueError where a code or a scale in it is NaN or Inf, or a value is out of the dtype's range.
        """
        item = self.quantised.get(name)
        if item is None:
            before = self.stored.bytes_read
            result = self.stored.slice(name, rows, cols, index, into=into)
            self.bytes_read += self.stored.bytes_read - before
            return result
        straight = into if into is not None and into.dtype == self.dtype and into.is_cpu else None
        result = self._values(item, rows, cols, index, straight)
        self.bytes_read += result.nbytes
        return result if into is None or into is result else into.copy_(result)

    def parts(self, name: str, index: int | None = None) -> dict[str, Tensor]:
        """All stored parts of a quantised matrix, or of matrix `index` of a stack."""
        item = self.quantised[name]
        codes = self.stored.slice(item.codes, index=index)
        return {CODES: codes, **small_parts(item, self.stored, index)}

    def will_need(self, names: Iterable[str | tuple[str, int | None]]) -> None:
        """Says what `slice` will be asked for; scales are small, and lie where the codes are."""
        keys = ((name, None) if isinstance(name, str) else name for name in names)
        self.stored.will_need(
            (self.quantised[name].codes if name in self.quantised else name, index) for name, index in keys
        )

    def release(self) -> None:
        """As :meth:`CheckpointReader.release`."""
        self.stored.release()

    def close(self) -> None:
        """As :meth:`CheckpointReader.close`."""
        self.stored.close()

    def __enter__(self) -> "DequantisedReader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _values(
        self, item: Quantised, rows: Span, cols: Span, index: int | None, out: Tensor | None
    ) -> Tensor:
        info = self.tensors[item.name]
        shape = list(item.shape)
        if index is not None:
            if len(shape) < 3 or not 0 <= index < shape[0]:
                raise ValueError(f"{item.name}: no matrix {index} in shape {info.shape}")
            del shape[0]
        if len(shape) == 3:
            first, count = bounds(rows, 0, shape, info)
            _, height = bounds(cols, 1, shape, info)
            out = torch.empty(count, height, shape[2], dtype=self.dtype) if out is None else out
            for number in range(count):
                self._values(item, cols, None, first + number, out[number])
            return out
        row, height = bounds(rows, 0, shape, info)
        col, width = bounds(cols, 1, shape, info)
        word = item.codec.word
        words = slice(col // word, -(-(col + width) // word))
        codes = self.stored.slice(item.codes, slice(row, row + height), words, index)
        if (item.name, index) != self._last:
            self._scales, self._last = self._read_scales(item, index), (item.name, index)
        scales = self._scales
        assert scales is not None
        if out is None or out.shape != (height, width):
            out = torch.empty(height, width, dtype=self.dtype)
        try:
            dequantise(item.codec, item.block, codes, scales.grids, out, row=row, col=col)
            check_values(item, codes, scales, out, row=row, col=col)
            return out
        except ValueError as error:
            raise ValueError(f"{self.folder}: {item.codes}: {error}") from error

    def _read_scales(self, item: Quantised, index: int | None) -> Scales:
        if stated := item.beside.get("_shape"):  # compressed-tensors': the header cannot tell it for certain
            shape = self.stored.slice(stated).tolist()
            if shape != list(item.shape[-2:]):
                raise ValueError(f"{self.folder}: {stated} says {shape}, {item.codes} holds {item.shape}")
        try:
            return scales_of(item, _unchecked_parts(item, self.stored, index), self.dtype)
        except ValueError as error:
            raise ValueError(f"{self.folder}: {error}") from error


def small_parts(item: Quantised, stored: Any, index: int | None) -> dict[str, Tensor]:
    """The parts beside the codes of a matrix, each in the shape that its codec gives it.

    `stored` has `folder`, `tensors` and `slice` of :class:`CheckpointReader`. ValueError: a scale is NaN,
    Inf or negative.
    """
    found = _unchecked_parts(item, stored, index)
    try:
        check_parts(item, found)
    except ValueError as error:
        raise ValueError(f"{stored.folder}: {error}") from error
    return found


def _unchecked_parts(item: Quantised, stored: Any, index: int | None) -> dict[str, Tensor]:
    *_, rows, cols = item.shape
    found = {}
    for role, shape in item.codec.shapes(rows, cols, item.block).items():
        if role == CODES:
            continue
        name = item.parts[role]
        shared = prod(stored.tensors[name].shape) == prod(shape)  # by all matrices of a stack
        part = stored.slice(name, index=None if shared else index)
        found[role] = part if part.shape == shape else part.reshape(shape)
    return found
