"""Whether scales can be what they say: finite, not negative, neither too large nor too small for the dtype.

All is seen from the scales, which are few; codes are looked at again only where the scales leave a doubt.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from isthmus.quant.codec import CODES, Grids, Quantised, dequantise


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales and zero points of all blocks of a matrix, and what may go wrong with them in a dtype."""

    scale: Tensor
    zero: Tensor | None
    grids: Grids  # of the two
    large: bool  # the outermost code is too large for the dtype in some block
    lost: Tensor | None  # blocks in which every code would be 0; None where there are none


def check_parts(item: Quantised, parts: Mapping[str, Tensor]) -> tuple[float, float]:
    """The least and the largest scale. ValueError: one in `parts`, or a product, is NaN, Inf or negative."""
    floats = {role: part for role, part in parts.items() if role != CODES and part.is_floating_point()}
    found = 1.0, 1.0
    for role, part in floats.items():
        low, high = found = _extremes(part.float())
        if not (isfinite(low) and isfinite(high)):
            raise ValueError(f"{item.parts[role]}: a scale is NaN or Inf")
        if low < 0:
            raise ValueError(f"{item.parts[role]}: a scale is negative: {low:g}")
    if len(floats) == 1:
        return found
    found = _extremes(item.codec.grids(parts)[0])
    if not all(map(isfinite, found)):
        raise ValueError(f"{' with '.join(_scale_names(item))}: a scale is NaN or Inf")
    return found


def scales_of(item: Quantised, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Scales:
    """The scales of a matrix from its `parts` beside the codes, for values in `dtype`. Raises as above."""
    least, largest = check_parts(item, parts)
    scale, zero = item.codec.grids(parts)
    low, high = least * item.codec.largest, largest * item.codec.largest
    limits, lost = torch.finfo(dtype), None
    if low < limits.tiny:
        outermost = scale.double() * item.codec.largest
        lost = (outermost.to(dtype) == 0) & ~_rounded_to_zero(parts)
        lost = lost if lost.any() else None
    return Scales(scale, zero, Grids.of(item.codec, scale, zero, largest), high > limits.max, lost)


def check_values(
    item: Quantised, codes: Tensor, scales: Scales, values: Tensor, *, row: int, col: int
) -> None:
    """ValueError where `values`, of `codes` from (`row`, `col`) on, have Inf, or 0 for another code."""
    wrong = values.isinf() if scales.large else None
    what = f"is more than {values.dtype} has ({torch.finfo(values.dtype).max:g})"
    if wrong is None and scales.lost is None:
        return
    numbers = torch.empty(values.shape)
    at = {"row": row, "col": col}
    if (wrong is None or not wrong.any()) and scales.lost is not None:
        lost = dequantise(
            item.codec,
            item.block,
            codes,
            Grids.of(item.codec, scales.lost.float(), scales.zero),
            numbers,
            **at,
        )
        wrong, what = lost != 0, f"is 0 in {values.dtype}, as all codes of its block would be"
    if wrong is None or not wrong.any():
        return
    ones = Grids.of(item.codec, torch.ones_like(scales.scale), scales.zero)
    dequantise(item.codec, item.block, codes, ones, numbers, **at)
    i, j = wrong.nonzero()[0].tolist()
    code = numbers[i, j].item()
    scale = scales.scale[(row + i) // item.block[0], (col + j) // item.block[1]].item()
    low, high = (number.item() for number in scales.scale.aminmax())
    raise ValueError(
        f"code {code:g} times scale {scale:g} = {code * scale:g} {what}, at [{row + i}, {col + j}] and"
        f" {int(wrong.sum())} places in all; the scales are from {low:g} to {high:g}. Download"
        f" {' and '.join(_scale_names(item))} again, or state a dtype that has such values in config.json"
    )


def _extremes(numbers: Tensor) -> tuple[float, float]:
    """The least and the largest number, NaN where one is NaN; 1 and 1 of no numbers.

    One pass and no tensor: a checkpoint has a scale for each of its tens of thousands of matrices.
    """
    if numbers.numel() == 0:
        return 1.0, 1.0
    low, high = numbers.aminmax()
    return low.item(), high.item()


def _scale_names(item: Quantised) -> list[str]:
    return [name for role, name in item.parts.items() if role not in (CODES, "zero")]


def _rounded_to_zero(parts: Mapping[str, Tensor]) -> Tensor:
    """Groups of NVFP4 whose own scale is 0, since e4m3 has no smaller one; none where all are 0."""
    scale = parts["scale"]
    zero = scale.float() == 0
    return zero & (scale.dtype == torch.float8_e4m3fn and not bool(zero.all()))
