"""FP4: codes of four bits, e2m1, two in a byte, the first in the low half; a scale for each group of a row.

Three published forms:

- MXFP4, `X_blocks` and `X_scales` (uint8): bytes of 32 values side by side in a dim of their own;
- MXFP4 packed, `X.weight` (int8) and `X.scale` (e8m0), as DeepSeek has its experts, or compressed-tensors'
  `X.weight_packed` and `X.weight_scale` (uint8, the bits of e8m0);
- NVFP4, groups of 16, the group's scale in e4m3 and another one for the whole matrix: ModelOpt's
  `X.weight_scale_2`, which multiplies, or compressed-tensors' `X.weight_global_scale`, which divides.

A stack of matrices is dequantised as it lies, (E, R, C) with groups along C.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from isthmus.quant.blocks import Block, grid_shape, powers_of_two
from isthmus.quant.codec import CODES, Codec, Quantised
from isthmus.quant.layout import Checkpoint

MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_VALUES = torch.cat([MAGNITUDES, -MAGNITUDES])  # by code: the highest bit is the sign
_BETWEEN = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
# The two values of each byte, low half first, as one number of 64 bits.
_PAIRS = torch.stack([_VALUES.repeat(16), _VALUES.repeat_interleave(16)], 1).contiguous().view(torch.int64)
_PAIRS = _PAIRS.flatten()
_MX, _NV = (1, 32), (1, 16)


class Float4(Codec):
    """e2m1 codes in bytes; what scales them is the subclass's."""

    word = 2
    largest = 6.0

    def decode(self, codes: Tensor) -> Tensor:
        bytes_ = codes.reshape(len(codes), -1).view(torch.uint8)
        return _PAIRS[bytes_.int()].view(torch.float32)

    def encode(self, numbers: Tensor) -> Tensor:
        size = numbers.abs()
        below = torch.bucketize(size, _BETWEEN)  # where a value lies just between two: the lower one
        above = torch.bucketize(size, _BETWEEN, right=True)
        codes = torch.where(below % 2 == 0, below, above) + 8 * torch.signbit(numbers)
        return (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)


class Mxfp4(Float4):
    """With powers of two as scales; `blocks`: the bytes of a group have a dim of their own."""

    def __init__(self, blocks: bool = False, dtype: torch.dtype = torch.uint8) -> None:
        self.blocks, self.dtype = blocks, dtype
        self.label = "MXFP4"
        self.word = 32 if blocks else 2

    def shapes(self, rows: int, cols: int, block: Block) -> dict[str, tuple[int, ...]]:
        groups = grid_shape(rows, cols, block)
        return {CODES: (*groups, 16) if self.blocks else (rows, cols // 2), "scale": groups}

    def encode(self, numbers: Tensor) -> Tensor:
        codes = super().encode(numbers).view(self.dtype)
        return codes.view(len(codes), -1, 16) if self.blocks else codes

    def grids(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, None]:
        return parts["scale"].contiguous().view(torch.float8_e8m0fnu).float(), None

    def fresh(self, low: Tensor, high: Tensor, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        largest = torch.maximum(-low, high) / MAGNITUDES[-1]
        scale = powers_of_two(largest.where(largest > 0, 1.0)).to(torch.float8_e8m0fnu)
        return {"scale": scale.view(dtypes["scale"])}


class Nvfp4(Float4):
    """With a scale in e4m3 for each group, and one for the matrix that these are divided or multiplied by."""

    def __init__(self, divides: bool) -> None:
        self.divides = divides
        self.label = "NVFP4"

    def shapes(self, rows: int, cols: int, block: Block) -> dict[str, tuple[int, ...]]:
        return {CODES: (rows, cols // 2), "scale": grid_shape(rows, cols, block), "global": ()}

    def grids(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, None]:
        scale, whole = parts["scale"].float(), parts["global"].float()
        return scale / whole if self.divides else scale * whole, None

    def fresh(self, low: Tensor, high: Tensor, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        group = torch.maximum(-low, high) / MAGNITUDES[-1]
        narrow = torch.finfo(torch.float8_e4m3fn)
        whole = group.amax() / narrow.max
        whole = whole.where(whole > 0, 1.0)
        scale = (group / whole).clamp(narrow.smallest_normal / 8, narrow.max).to(torch.float8_e4m3fn)
        return {"scale": scale, "global": 1 / whole if self.divides else whole}


def recognise(name: str, checkpoint: Checkpoint) -> Quantised | None:
    """The tensor whose FP4 codes `name` holds; None where it holds none, or what is wrong is noted."""
    info, settings = checkpoint.tensors[name], checkpoint.settings
    if settings is None or info.dtype not in (torch.uint8, torch.int8) or len(info.shape) < 2:
        return None
    if name.endswith("_blocks"):
        logical, codec, endings, block = name.removesuffix("_blocks"), Mxfp4(blocks=True), ["_scales"], _MX
    elif name.endswith("_packed"):
        logical, endings = name.removesuffix("_packed"), ["_scale"]
        divides = checkpoint.beside(logical, ["_global_scale"])
        codec, block = (Nvfp4(True), _NV) if divides else (Mxfp4(), _MX)
        endings += ["_global_scale"] if divides else []
    elif checkpoint.beside(name, ["_scale_2"]):
        logical, codec, endings, block = name, Nvfp4(False), ["_scale", "_scale_2"], _NV
    elif checkpoint.dtype_beside(name, ".scale") == torch.float8_e8m0fnu:
        logical, codec, endings, block = name, Mxfp4(dtype=info.dtype), [".scale"], _MX
    else:
        return None
    found = checkpoint.beside(logical, endings)
    beside = checkpoint.beside(logical, [".input_scale", ".input_global_scale"])
    parts = dict(zip(("scale", "global"), found.values(), strict=False))
    if len(found) < len(endings):
        looked = ", ".join(f"X{ending}" for ending in endings)
        checkpoint.wrong(f"{codec.label} codes without a scale", name, f"looked for {looked}", parts.values())
        return None
    said = settings.numbers("float", 4)
    if not said or all(numbers.block != block for numbers in said):
        what = f"{codec.label} codes, and {settings.key} ({settings.method}) says otherwise"
        checkpoint.wrong(what, name, "", (*parts.values(), *beside.values()))
        return None
    stored = info.shape[:-1] if name.endswith("_blocks") else info.shape
    shape = (*stored[:-1], stored[-1] * codec.word)
    return checkpoint.checked(Quantised(logical, shape, codec, block, {CODES: name, **parts}, beside))
