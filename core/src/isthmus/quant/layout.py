"""How the formats find the parts of a tensor: names beside a name, shapes that fit."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from isthmus.checkpoint.header import Defects, TensorInfo
from isthmus.quant.codec import CODES, Quantised
from isthmus.quant.settings import Settings


@dataclass(slots=True)
class Checkpoint:
    """The stored tensors, what the config says of them, and what is wrong with them so far."""

    tensors: Mapping[str, TensorInfo]
    settings: Settings | None
    defects: Defects
    reported: set[str] = field(default_factory=set)  # tensors in a defect, and what belongs to them

    def beside(self, name: str, endings: Iterable[str]) -> dict[str, str]:
        """Ending -> tensor, of those that are there: `X_scale` beside `X`, `X.scale` for `X.weight`."""
        found = {}
        for ending in endings:
            stem = name.removesuffix(".weight") if ending.startswith(".") else name
            if stem + ending in self.tensors:
                found[ending] = stem + ending
        return found

    def dtype_beside(self, name: str, ending: str) -> torch.dtype | None:
        """The dtype of the tensor beside `name`; None where there is none."""
        found = self.beside(name, [ending])
        return self.tensors[found[ending]].dtype if found else None

    def misfits(self, item: Quantised) -> list[str]:
        """Parts whose shape is not that of the format, as `name is (2, 3), expected (2, 4)`."""
        *lead, rows, cols = item.shape
        found = []
        for role, expected in item.codec.shapes(rows, cols, item.block).items():
            stored = self.tensors[item.parts[role]]
            shared = role != CODES and fits(stored.shape, *expected)  # by all matrices of a stack
            if not shared and not fits(stored.shape, *lead, *expected):
                found.append(f"{stored.name} is {stored.shape}, expected {(*lead, *expected)}")
        return found

    def checked(self, item: Quantised) -> Quantised | None:
        """The tensor if its parts fit; else None, and what is wrong is noted."""
        if misfits := self.misfits(item):
            detail = f"{', '.join(misfits)} for {item.label} of {item.shape}"
            self.wrong("a scale grid that does not fit", item.codes, detail, item.parts.values())
            return None
        return item

    def wrong(self, what: str, name: str, detail: str = "", also: Iterable[str] = ()) -> None:
        """A defect of the tensor `name`, and of `also` with it."""
        self.defects.add(what, name, detail)
        self.reported |= {name, *also}


def fits(shape: Sequence[int], *expected: int) -> bool:
    """Whether a stored shape is the expected one, up to dims of 1: (), (1,) and (1, 1) are one number."""
    return [size for size in shape if size != 1] == [size for size in expected if size != 1]
