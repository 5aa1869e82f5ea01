"""Quantising again what a quantised checkpoint held: its own format, names, blocks and dtypes of scales."""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from isthmus.checkpoint.writer import OutputTensor
from isthmus.quant.codec import CODES, Quantised, requantise


class Requantiser:
    """Turns real numbers into the stored tensors of the source that `reader` reads, by the same names.

    A matrix whose values are still the source's comes back with the source's own scales, and so bit for bit.
    """

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self._quantised: Mapping[str, Quantised] = reader.quantised
        self._stored = reader.stored.tensors
        self._waiting: dict[str, dict[int, Tensor]] = {}  # of stacks that share a scale: all are needed

    def __contains__(self, name: str) -> bool:
        return name in self._quantised

    def names(self, name: str) -> list[str]:
        """The stored tensors that a tensor becomes: itself where it is not quantised."""
        item = self._quantised.get(name)
        return [name] if item is None else [*item.parts.values(), *item.beside.values()]

    def outputs(self, tensor: OutputTensor) -> list[OutputTensor]:
        """What is to be written for a tensor."""
        if tensor.name not in self._quantised:
            return [tensor]
        found = (self._stored[name] for name in self.names(tensor.name))
        return [OutputTensor(info.name, info.dtype, info.shape) for info in found]

    def __call__(
        self, name: str, index: int | None, tensor: Tensor
    ) -> Iterator[tuple[str, int | None, Tensor]]:
        """(stored name, matrix of a stack or None, tensor) of a tensor, or of its matrix `index`.

        ValueError where it has NaN or Inf, for which there is no code.
        """
        item = self._quantised.get(name)
        if item is None:
            yield name, index, tensor
            return
        tensor = tensor.cpu()
        if index is None and len(item.shape) == 3:
            for number, matrix in enumerate(tensor):
                yield from self(name, number, matrix)
            return
        if index in (None, 0):
            for beside in item.beside.values():
                yield beside, None, self._reader.stored.slice(beside)
        shared = {role for role in item.parts if role != CODES and self._is_shared(item, role)}
        if index is None or not shared:
            for role, part in self._matrix(item, index, tensor).items():
                stored = self._stored[item.parts[role]]
                shape = stored.shape if index is None else stored.shape[1:]
                yield stored.name, index, part.reshape(shape)
            return
        waiting = self._waiting.setdefault(name, {})
        waiting[index] = tensor
        if len(waiting) == item.shape[0]:
            del self._waiting[name]
            yield from self._stack(item, torch.cat([waiting[number] for number in sorted(waiting)]))

    def whole(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(stored name, whole stored tensor) of a whole tensor."""
        rows: dict[str, list[Tensor]] = {}
        for stored, index, part in self(name, None, tensor):
            if index is None:
                yield stored, part
            else:
                rows.setdefault(stored, []).append(part)
        for stored, parts in rows.items():
            yield stored, torch.stack(parts)

    def _matrix(self, item: Quantised, index: int | None, values: Tensor) -> dict[str, Tensor]:
        """The parts of one matrix."""
        return self._parts(item, item.block, values, self._reader.parts(item.name, index))

    def _stack(self, item: Quantised, values: Tensor) -> Iterator[tuple[str, None, Tensor]]:
        """The parts of all matrices (E * R, C), which have one scale between them."""
        block = values.shape[0], values.shape[1]
        given = {role: part for role, part in self._reader.parts(item.name, 0).items() if role != CODES}
        for role, part in self._parts(item, block, values, given).items():
            stored = self._stored[item.parts[role]]
            yield stored.name, None, part.reshape(stored.shape)

    def _parts(
        self, item: Quantised, block: tuple[int, int], values: Tensor, given: Mapping[str, Tensor] | None
    ) -> dict[str, Tensor]:
        dtypes = {role: self._stored[name].dtype for role, name in item.parts.items()}
        try:
            return requantise(item.codec, block, values, self._reader.dtype, dtypes, given)
        except ValueError as error:
            raise ValueError(f"{item.name}: {error}") from error

    def _is_shared(self, item: Quantised, role: str) -> bool:
        """Whether the matrices of a stack have one such part between them."""
        *lead, rows, cols = item.shape
        one = prod(item.codec.shapes(rows, cols, item.block)[role])
        return prod(lead) > 1 and prod(self._stored[item.parts[role]].shape) == one
