"""FP8: codes of eight bits, e4m3 or e5m2, and a scale for each block, channel, tensor or expert.

DeepSeek's `weight_scale_inv` and `.scale`, compressed-tensors' and ModelOpt's `weight_scale`: all are what
the codes are multiplied by, whatever the name says.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from isthmus.quant.blocks import Block, grid_shape, powers_of_two
from isthmus.quant.codec import CODES, Codec, Quantised, scratch
from isthmus.quant.layout import Checkpoint, fits

SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)  # dtypes of a scale
ENDINGS = ("_scale_inv", "_scale", ".scale")
ACTIVATIONS = (".input_scale", ".activation_scale", ".input_scale_inv", ".k_scale", ".v_scale")
DTYPES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


class Float8(Codec):
    """Codes of one of torch's two dtypes; `power` where new scales are to be powers of two."""

    def __init__(self, dtype: torch.dtype, power: bool = False) -> None:
        self.dtype, self.power = dtype, power
        self.label = f"FP8 {DTYPES[dtype]}"
        self.largest = torch.finfo(dtype).max
        # Decoded by putting the bits where float16 has them, which torch converts many times faster. e5m2 is
        # float16's upper half; e4m3 has an exponent of four bits there, biased by 7 instead of 15.
        self.unit = 256.0 if dtype == torch.float8_e4m3fn else 1.0

    def shapes(self, rows: int, cols: int, block: Block) -> dict[str, tuple[int, ...]]:
        return {CODES: (rows, cols), "scale": grid_shape(rows, cols, block)}

    def decode(self, codes: Tensor) -> Tensor:
        # e4m3 has one NaN and no Inf; e5m2 has both in its last exponent. Of signed bytes positive ones are
        # the largest, of unsigned bytes the negative ones.
        invalid = 0x7F if self.dtype == torch.float8_e4m3fn else 0x7C
        signed = codes.view(torch.int8)
        if signed.max().item() >= invalid or codes.view(torch.uint8).max().item() >= 0x80 + invalid:
            raise ValueError(f"a code of {self.label} is NaN or Inf")
        bits = scratch(torch.int16, codes.shape).copy_(signed)
        if self.dtype == torch.float8_e4m3fn:  # a product is a shift, which torch has slower
            bits.mul_(0x80).bitwise_and_(0xBF80 - 0x10000)  # drops the sign's copy in bit 14
        else:
            bits.mul_(0x100)
        return scratch(torch.float32, codes.shape).copy_(bits.view(torch.float16))

    def encode(self, numbers: Tensor) -> Tensor:
        return numbers.clamp(-self.largest, self.largest).to(self.dtype)

    def grids(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, None]:
        return parts["scale"].float(), None

    def fresh(self, low: Tensor, high: Tensor, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        largest = torch.maximum(-low, high) / self.largest
        scale = largest.where(largest > 0, 1.0)
        if self.power or dtypes["scale"] == torch.float8_e8m0fnu:
            scale = powers_of_two(scale)
        return {"scale": scale.to(dtypes["scale"])}


def recognise(name: str, checkpoint: Checkpoint) -> Quantised | None:
    """The tensor whose FP8 codes `name` holds; None where it holds none, or what is wrong is noted."""
    info, settings = checkpoint.tensors[name], checkpoint.settings
    if info.dtype not in DTYPES or settings is None or name.endswith(ENDINGS):
        return None
    scales = checkpoint.beside(name, ENDINGS)
    beside = checkpoint.beside(name, ACTIVATIONS)
    fmt, all_parts = DTYPES[info.dtype], (*scales.values(), *beside.values())
    said = settings.numbers("float", 8)
    if not said:
        checkpoint.wrong(
            f"FP8 codes, and {settings.key} ({settings.method}) says otherwise", name, "", all_parts
        )
        return None
    if stated := next((numbers.fmt for numbers in said if numbers.fmt not in (None, fmt)), None):
        checkpoint.wrong(f"FP8 {fmt} codes, and {settings.key} says fmt {stated}", name, "", all_parts)
        return None
    if not scales:
        looked = ", ".join(f"X{ending}" for ending in ENDINGS)
        checkpoint.wrong("FP8 codes without a scale", name, f"looked for {looked}", all_parts)
        return None
    if len(scales) > 1:
        found = ", ".join(scales.values())
        checkpoint.wrong("FP8 codes with several scales: which one is it?", name, found, all_parts)
        return None
    [scale_name] = scales.values()
    scale = checkpoint.tensors[scale_name]
    if scale.dtype not in SCALES:
        checkpoint.wrong(f"a scale cannot be {scale.dtype}", scale_name, "", (name, *all_parts))
        return None
    if len(info.shape) not in (2, 3):
        checkpoint.wrong("FP8 codes that are neither a matrix nor a stack", name, f"{info.shape}", all_parts)
        return None
    block = next((b for n in said if (b := _block(info.shape, scale.shape, n.strategy, n.block))), None)
    if block is None:
        options = ", ".join(f"{n.strategy or 'tensor or channel'} {n.block or ''}".strip() for n in said)
        detail = f"{scale_name} is {scale.shape} for {info.shape}, config.json says {options}"
        if grids := [
            (*info.shape[:-2], *grid_shape(info.shape[-2], info.shape[-1], n.block)) for n in said if n.block
        ]:
            detail += f": expected {grids[0]}"
        checkpoint.wrong("a scale grid that does not fit", name, detail, all_parts)
        return None
    codec = Float8(info.dtype, settings.power_scales)
    return Quantised(name, info.shape, codec, block, {CODES: name, "scale": scale_name}, beside)


def _block(
    codes: tuple[int, ...], scale: tuple[int, ...], strategy: str | None, block: Block | None
) -> Block | None:
    """The block that a scale of this shape is of, as the config has it; None where there is none."""
    *lead, rows, cols = codes
    if block is not None:
        return block if fits(scale, *lead, *grid_shape(rows, cols, block)) else None
    if strategy in (None, "tensor") and (fits(scale) or fits(scale, *lead)):
        return rows, cols
    if strategy in (None, "channel") and fits(scale, *lead, rows):
        return 1, cols
    return None
