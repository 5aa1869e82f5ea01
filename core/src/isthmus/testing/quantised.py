"""Tiny checkpoints in every quantised format, of any family: which tensors, how, under which names.

A variant `fp8_block` is the family's default variant stored so; `tied+fp8_block` is another one's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from isthmus.quant.blocks import Block
from isthmus.quant.codec import CODES, Codec, quantise
from isthmus.quant.float8 import Float8

# What releases leave as it is: lookup tables, heads, routers and gates, norms, convolutions, joins of MTP.
LEFT = (
    "*embed*",
    "*head*",
    "*gate.weight",
    "*router*",
    "*norm*",
    "*conv*",
    "*fc.weight",
    "*eh_proj*",
    "*_ba.*",
)
LEFT += ("*visual*", "*vision*", "*projector*")
BLOCK = (
    48,
    48,
)  # divides hardly any tiny matrix, so that last blocks are partial, and none lies between ranks


@dataclass(frozen=True, slots=True)
class Storage:
    """How a format's checkpoints look."""

    config: Mapping[str, Any]  # the quantization_config
    codec: Codec
    block: Callable[[int, int], Block]  # of a matrix (rows, columns)
    names: Mapping[str, str]  # role -> ending of the stored name: "_x" is added, ".x" takes `.weight`'s place
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)  # of the parts beside the codes
    left_key: str = "modules_to_not_convert"
    fused: bool = False  # experts are stacked
    stack: Callable[[str, list[Tensor]], Tensor] = lambda role, parts: torch.stack(parts)


def _constant(block: Block) -> Callable[[int, int], Block]:
    return lambda rows, cols: block


def _fp8(**stated: Any) -> dict[str, Any]:
    return {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", **stated}


E4M3 = Float8(torch.float8_e4m3fn)
SCALE_INV = {CODES: "", "scale": "_scale_inv"}
FLOAT32 = {"scale": torch.float32}

STORAGE: Mapping[str, Storage] = {
    # DeepSeek-V3, Qwen3 FP8
    "fp8_block": Storage(_fp8(weight_block_size=list(BLOCK)), E4M3, _constant(BLOCK), SCALE_INV, FLOAT32),
}


def quantise_tensors(
    tensors: Mapping[str, Tensor], storage: Storage
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors as they are stored, and the `quantization_config`."""
    stored: dict[str, Tensor] = {}
    left = []
    for name, tensor in tensors.items():
        if not is_quantised(name, tensor):
            stored[name] = tensor
            if name.endswith(".weight") and tensor.dim() == 2:
                left.append(name.removesuffix(".weight"))
            continue
        matrices = [tensor] if tensor.dim() == 2 else list(tensor)
        parts = [
            quantise(storage.codec, storage.block(*matrix.shape), matrix, storage.dtypes)
            for matrix in matrices
        ]
        for role, ending in storage.names.items():
            found = [part[role] for part in parts]
            stem = name.removesuffix(".weight") if ending.startswith(".") else name
            stored[stem + ending] = found[0] if tensor.dim() == 2 else storage.stack(role, found)
    return stored, {**storage.config, storage.left_key: left}


def is_quantised(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is quantised: matrices and stacks of them are, but for :data:`LEFT`."""
    matrices = tensor.dim() == 2 or (tensor.dim() == 3 and ".experts." in name)
    return matrices and not any(fnmatchcase(name, pattern) for pattern in LEFT)
