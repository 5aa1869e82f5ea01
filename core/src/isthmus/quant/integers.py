"""INT4 and INT8 as compressed-tensors stores them: value = (code - zero point) * scale.

`pack-quantized`: `X.weight_packed` (int32) holds 32 / bits codes of a row in each word, the first in the
lowest bits, each with 2**(bits - 1) added; `X.weight_zero_point` holds zero points in the same way, along the
rows; `X.weight_shape` the matrix's own shape. `int-quantized`: `X.weight` (int8) as it is.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from isthmus.quant.blocks import Block, grid_shape
from isthmus.quant.codec import CODES, Codec, Quantised
from isthmus.quant.layout import Checkpoint

SCALES = (torch.float32, torch.bfloat16, torch.float16)


class Integers(Codec):
    """Codes of `bits` bits, `packed` into words or int8; with zero points, or symmetric around 0."""

    def __init__(self, bits: int, *, packed: bool, zero: bool) -> None:
        self.bits, self.packed, self.zero = bits, packed, zero
        self.label = f"INT{bits}{' with zero points' if zero else ''}"
        self.word = 32 // bits if packed else 1
        self.half = 2 ** (bits - 1)
        self.largest = 2.0**bits - 1 if zero else float(self.half)

    def shapes(self, rows: int, cols: int, block: Block) -> dict[str, tuple[int, ...]]:
        groups = grid_shape(rows, cols, block)
        found: dict[str, tuple[int, ...]] = {CODES: (rows, -(-cols // self.word)), "scale": groups}
        if self.zero:
            found["zero"] = (-(-groups[0] // self.word), groups[1])
        return found

    def decode(self, codes: Tensor) -> Tensor:
        return self._unpacked(codes) if self.packed else codes.float()

    def encode(self, numbers: Tensor) -> Tensor:
        codes = numbers.round().clamp(-self.half, self.half - 1).int()
        return self._packed(codes) if self.packed else codes.to(torch.int8)

    def grids(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        scale = parts["scale"].float()
        if not self.zero:
            return scale, None
        zero = parts["zero"]
        return scale, self._unpacked(zero.T).T[: len(scale)] if self.packed else zero.float()

    def fresh(self, low: Tensor, high: Tensor, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        if not self.zero:
            scale = torch.maximum(-low, high) / (self.half - 1)
            return {"scale": scale.where(scale > 0, 1.0).to(dtypes["scale"])}
        low, high = low.clamp(max=0), high.clamp(min=0)
        scale = (high - low) / (2 * self.half - 1)
        scale = scale.where(scale > 0, 1.0).to(dtypes["scale"])
        zero = (-self.half - low / scale.float()).round().clamp(-self.half, self.half - 1).int()
        return {"scale": scale, "zero": self._packed(zero.T).T if self.packed else zero.to(dtypes["zero"])}

    def _unpacked(self, words: Tensor) -> Tensor:
        """The codes of rows of words (n, W), as float32 (n, W * codes of a word)."""
        shifts = torch.arange(0, 32, self.bits, dtype=torch.int32)
        codes = (words[:, :, None] >> shifts) & (2 * self.half - 1)
        return (codes - self.half).float().flatten(1)

    def _packed(self, codes: Tensor) -> Tensor:
        """Inverse of `_unpacked`, from int32; the last word is filled with zero bits."""
        shifts = torch.arange(0, 32, self.bits, dtype=torch.int32)
        filled = pad(codes + self.half, (0, -codes.shape[1] % self.word))
        return (filled.view(len(codes), -1, self.word) << shifts).sum(2, dtype=torch.int32)


def recognise(name: str, checkpoint: Checkpoint) -> Quantised | None:
    """The tensor whose integer codes `name` holds; None where it holds none, or what is wrong is noted."""
    info, settings = checkpoint.tensors[name], checkpoint.settings
    if settings is None or settings.method != "compressed-tensors" or len(info.shape) < 2:
        return None
    packed = name.endswith("_packed") and info.dtype == torch.int32
    if not packed and not (info.dtype == torch.int8 and name.endswith("weight")):
        return None
    logical = name.removesuffix("_packed")
    scale = checkpoint.beside(logical, ["_scale"])
    zero = checkpoint.beside(logical, ["_zero_point"])
    order = checkpoint.beside(logical, ["_g_idx"])
    beside = checkpoint.beside(logical, ["_shape", ".input_scale", ".input_zero_point"])
    all_parts = [part for group in (scale, zero, order, beside) for part in group.values()]
    if order:
        what = "columns grouped in another order than they lie in (actorder), which is not supported"
        checkpoint.wrong(what, name, "use a checkpoint without weight_g_idx", all_parts)
        return None
    if not scale:
        checkpoint.wrong("integer codes without a scale", name, "looked for X_scale", all_parts)
        return None
    roles = {CODES: name, "scale": scale["_scale"], **({"zero": zero["_zero_point"]} if zero else {})}
    tried = []
    for said in settings.weights:
        if said.kind != "int" or (said.bits not in (4, 8) if packed else said.bits != 8):
            continue
        if said.symmetric is not None and said.symmetric == bool(zero):
            continue
        codec = Integers(said.bits, packed=packed, zero=bool(zero))
        groups = checkpoint.tensors[roles["scale"]].shape[-1:]
        cols = info.shape[-1] * codec.word
        if said.block and groups:  # the last word may be filled up
            cols = min(cols, max(groups[0] * said.block[1], cols - codec.word + 1))
        shape = (*info.shape[:-1], cols)
        block = said.block or ((1, cols) if said.strategy == "channel" else (info.shape[-2], cols))
        tried.append(Quantised(logical, shape, codec, block, roles, beside))
        if not checkpoint.misfits(tried[-1]):
            return tried[-1]
    if tried:
        return checkpoint.checked(tried[-1])
    kind = f"{'packed' if packed else '8-bit'} integer codes {'with' if zero else 'without'} zero points"
    checkpoint.wrong(f"{kind}, and {settings.key} says otherwise", name, "", all_parts)
    return None
