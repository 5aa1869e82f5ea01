"""A plain copy of a quantised checkpoint, for the Hugging Face model that a run is compared with.

Written from the formats' published definitions: whole tensors, the plainest arithmetic, safetensors' own
reader. Nothing here comes from `isthmus.quant`, or a mistake there would be on both sides.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from isthmus.testing.files import tensors


@contextmanager
def plain_folder(folder: Path) -> Iterator[Path]:
    """The folder itself where it is not quantised, else a temporary copy in the dtype of config.json."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    entry = config.pop("quantization_config", None)
    if not entry:
        yield folder
        return
    stored = tensors(folder)
    dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    with tempfile.TemporaryDirectory(prefix="isthmus-plain-") as name:
        plain = Path(name)
        for path in folder.iterdir():
            if path.is_file() and ".safetensors" not in path.name:
                shutil.copyfile(path, plain / path.name)
        (plain / "config.json").write_text(json.dumps(config), encoding="utf-8")
        values, used = dequantised(stored, entry)
        kept = {name: tensor for name, tensor in stored.items() if name not in used}
        made = {name: tensor.to(dtype).contiguous() for name, tensor in values.items()}
        save_file(kept | made, plain / "model.safetensors", metadata={"format": "pt"})
        yield plain


def dequantised(tensors: dict[str, Tensor], entry: dict[str, Any]) -> tuple[dict[str, Tensor], set[str]]:
    """Real numbers in float32 by name, and the names of the stored tensors that they were made of."""
    values: dict[str, Tensor] = {}
    used: set[str] = {name for name in tensors if name.endswith((".input_scale", "_shape"))}
    for name, codes in tensors.items():
        if name.endswith(("_scale", "_scales", "_scale_inv", ".scale", "_scale_2", "_zero_point")):
            continue
        kinds = (*_KINDS, _BYTEWISE[entry["quant_method"] == "compressed-tensors"])
        kind = next((kind for kind in kinds if kind.of(name, codes)), None)
        if kind is not None:
            parts = {}
            for role, endings in kind.endings.items():
                if found := [n for n in _names(kind.stem(name), endings) if n in tensors]:
                    parts[role] = tensors[found[0]]
                    used.add(found[0])
            used.add(name)
            values[kind.stem(name)] = kind.values(codes, parts, entry)
    return values, used


class _Kind(NamedTuple):
    """A way of storing: which tensors are its codes, what lies beside them, and what they mean."""

    suffix: str  # of the codes' name, after the weight's own
    dtypes: tuple[torch.dtype, ...]
    endings: Mapping[str, tuple[str, ...]]
    values: Callable[[Tensor, dict[str, Tensor], dict[str, Any]], Tensor]

    def of(self, name: str, codes: Tensor) -> bool:
        """Whether a tensor holds codes of this kind."""
        matrices = codes.dim() >= 2 and name.endswith(self.suffix)
        return matrices and codes.dtype in self.dtypes and (self.suffix != "" or "_packed" not in name)

    def stem(self, name: str) -> str:
        """The weight's own name."""
        return name.removesuffix(self.suffix)


def _names(name: str, endings: tuple[str, ...]) -> list[str]:
    """The names beside `name`; ".x" stands in place of `.weight`."""
    return [(name.removesuffix(".weight") if ending.startswith(".") else name) + ending for ending in endings]


def _float8(codes: Tensor, parts: dict[str, Tensor], entry: dict[str, Any]) -> Tensor:
    return codes.float() * _spread(parts["scale"].float(), codes.shape, entry.get("weight_block_size"))


def _nibbles(codes: Tensor) -> Tensor:
    """The codes of four bits of each byte, low half first, along the last dim."""
    codes = codes.view(torch.uint8)
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()


def _float4(codes: Tensor, parts: dict[str, Tensor], entry: dict[str, Any]) -> Tensor:
    numbers = _E2M1[_nibbles(codes)]
    scale = parts["scale"]
    if scale.dtype == torch.float8_e4m3fn:
        exact = scale.float()
        exact = (
            exact / parts["divisor"].float() if "divisor" in parts else exact * parts["multiplier"].float()
        )
    else:
        exact = torch.pow(2.0, scale.view(torch.uint8).double() - 127).float()
    numbers = numbers.flatten(scale.dim() - 1)  # the form with a dim for the bytes of a group
    return numbers * _along(exact, 16 if scale.dtype == torch.float8_e4m3fn else 32, numbers)


def _integers(codes: Tensor, parts: dict[str, Tensor], entry: dict[str, Any]) -> Tensor:
    [group] = entry["config_groups"].values()
    bits = group["weights"]["num_bits"]
    scale = parts["scale"].float()
    packed = codes.dtype == torch.int32
    numbers = _unpacked(codes, bits) if packed else codes.float()
    each = group["weights"].get("group_size") or numbers.shape[-1]
    if "zero" in parts:
        zero = parts["zero"]
        zero = _unpacked(zero.T, bits).T if packed else zero.float()
        numbers = numbers - _along(zero[: len(scale)], each, numbers)
    return numbers * _along(scale, each, numbers)


def _along(grid: Tensor, group: int, numbers: Tensor) -> Tensor:
    """The number of each value's group, of which the last of a row may be partial."""
    return grid.repeat_interleave(group, -1)[..., : numbers.shape[-1]]


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Signed numbers of `bits` bits out of words of 32, the lowest bits first, along the last dim."""
    columns = [(words.long() >> shift) % 2**bits - 2 ** (bits - 1) for shift in range(0, 32, bits)]
    return torch.stack(columns, -1).flatten(-2).float()


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_BYTES = (torch.uint8, torch.int8)
_PAIR = {"scale": ("_scale", ".scale"), "multiplier": ("_scale_2",), "divisor": ("_global_scale",)}
_WITH_ZERO = {"scale": ("_scale",), "zero": ("_zero_point",)}
_KINDS = (
    _Kind(
        "", (torch.float8_e4m3fn, torch.float8_e5m2), {"scale": ("_scale_inv", "_scale", ".scale")}, _float8
    ),
    _Kind("_blocks", (torch.uint8,), {"scale": ("_scales",)}, _float4),
    _Kind("_packed", (torch.uint8,), _PAIR, _float4),
    _Kind("_packed", (torch.int32,), _WITH_ZERO, _integers),
)
_BYTEWISE = _Kind("", _BYTES, _PAIR, _float4), _Kind("", (torch.int8,), _WITH_ZERO, _integers)


def _spread(scale: Tensor, shape: torch.Size, block: list[int] | None) -> Tensor:
    """A scale's number for each value of a matrix, or of each matrix of a stack."""
    if block is not None:
        rows = scale.repeat_interleave(block[0], -2)[..., : shape[-2], :]
        return rows.repeat_interleave(block[1], -1)[..., : shape[-1]]
    if scale.numel() == 1:
        return scale.reshape(())
    while scale.dim() < len(shape):  # one for each row, or for each matrix
        scale = scale[..., None]
    return scale
