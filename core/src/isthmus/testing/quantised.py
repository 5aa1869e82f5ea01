"""Tiny checkpoints in every quantised format, of any family: which tensors, how, under which names.

A variant `fp8_block` is the family's default variant stored so; `tied+fp8_block` is another one's.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from isthmus.quant.blocks import Block
from isthmus.quant.codec import CODES, Codec, quantise
from isthmus.quant.float4 import Mxfp4, Nvfp4
from isthmus.quant.float8 import Float8
from isthmus.quant.integers import Integers

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
class Kind:
    """How tensors are stored."""

    codec: Codec
    block: Callable[[int, int], Block]  # of a matrix (rows, columns)
    names: Mapping[str, str]  # role -> ending of the stored name: "_x" is added, ".x" takes `.weight`'s place
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)  # of the parts beside the codes
    beside: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)  # ending -> of a matrix


@dataclass(frozen=True, slots=True)
class Storage:
    """How a format's checkpoints look."""

    config: Mapping[str, Any]  # the quantization_config
    kind: Kind
    experts: Kind | None = None  # where these are stored otherwise
    left: tuple[str, ...] = ()  # what more is left as it is
    left_key: str = "modules_to_not_convert"


def _constant(rows: int, cols: int) -> Callable[[int, int], Block]:
    return lambda r, c: (rows, cols)


def _whole(rows: int, cols: int) -> Block:
    return rows, cols


def _row(rows: int, cols: int) -> Block:
    return 1, cols


def _fp8(**stated: Any) -> dict[str, Any]:
    return {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", **stated}


def _compressed(packing: str, **weights: Any) -> dict[str, Any]:
    stated = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "observer": "minmax",
    }
    group = {"targets": ["Linear"], "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": packing,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "weights": {**stated, **weights}}},
    }


def _int(bits: int, symmetric: bool) -> Storage:
    """Packed integers in groups of 32."""
    names = {CODES: "_packed", "scale": "_scale"} | ({} if symmetric else {"zero": "_zero_point"})
    kind = Kind(
        Integers(bits, packed=True, zero=not symmetric),
        _constant(1, 32),
        names,
        {"scale": torch.bfloat16, "zero": torch.int32},
        {"_shape": lambda matrix: torch.tensor(matrix.shape)},
    )
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32, "symmetric": symmetric}
    return Storage(_compressed("pack-quantized", **weights), kind, left_key="ignore")


E4M3, E5M2 = Float8(torch.float8_e4m3fn), Float8(torch.float8_e5m2)
SCALE_INV = {CODES: "", "scale": "_scale_inv"}
SCALE = {CODES: "", "scale": "_scale"}
FLOAT32, BFLOAT16, E8M0 = ({"scale": d} for d in (torch.float32, torch.bfloat16, torch.float8_e8m0fnu))
BLOCKWISE = _fp8(weight_block_size=list(BLOCK))
V4 = Kind(E4M3, _constant(*BLOCK), {CODES: "", "scale": ".scale"}, E8M0)
INPUT = {".input_scale": lambda matrix: torch.tensor(0.25)}
ONE_EACH = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}

STORAGE: Mapping[str, Storage] = {
    "fp8_block": Storage(BLOCKWISE, Kind(E4M3, _constant(*BLOCK), SCALE_INV, FLOAT32)),
    "fp8_block_stacked": Storage(BLOCKWISE, Kind(E4M3, _constant(*BLOCK), SCALE_INV, FLOAT32)),
    "fp8_block_e5m2": Storage(
        {**BLOCKWISE, "fmt": "e5m2"}, Kind(E5M2, _constant(*BLOCK), SCALE_INV, BFLOAT16)
    ),
    "fp8_block_e8m0": Storage({**BLOCKWISE, "scale_fmt": "ue8m0"}, V4),
    "fp8_tensor": Storage(_fp8(activation_scheme="static"), Kind(E4M3, _whole, SCALE, FLOAT32, INPUT)),
    "fp8_tensor_stacked": Storage(_fp8(), Kind(E4M3, _whole, SCALE, FLOAT32)),
    "fp8_channel": Storage(
        _compressed("float-quantized", **ONE_EACH), Kind(E4M3, _row, SCALE, BFLOAT16), left_key="ignore"
    ),
    "mxfp4": Storage(
        {"quant_method": "mxfp4"},
        Kind(
            Mxfp4(blocks=True),
            _constant(1, 32),
            {CODES: "_blocks", "scale": "_scales"},
            {"scale": torch.uint8},
        ),
        left=("*proj*.weight",),
    ),
    "mxfp4_packed": Storage(
        {**BLOCKWISE, "scale_fmt": "ue8m0", "expert_dtype": "fp4"},
        V4,
        Kind(Mxfp4(dtype=torch.int8), _constant(1, 32), {CODES: "", "scale": ".scale"}, E8M0),
    ),
    "nvfp4": Storage(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        Kind(
            Nvfp4(divides=False),
            _constant(1, 16),
            {CODES: "", "scale": "_scale", "global": "_scale_2"},
            beside=INPUT,
        ),
        left_key="ignore",
    ),
    "nvfp4_packed": Storage(
        _compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        Kind(
            Nvfp4(divides=True),
            _constant(1, 16),
            {CODES: "_packed", "scale": "_scale", "global": "_global_scale"},
        ),
        left_key="ignore",
    ),
    "int4": _int(4, symmetric=True),
    "int4_asymmetric": _int(4, symmetric=False),
    "int8": Storage(
        _compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
        Kind(Integers(8, packed=False, zero=False), _row, SCALE, BFLOAT16),
        left_key="ignore",
    ),
    "int8_packed": _int(8, symmetric=False),
}


def quantise_tensors(
    tensors: Mapping[str, Tensor], storage: Storage
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors as they are stored, and the `quantization_config`."""
    stored: dict[str, Tensor] = {}
    left = []
    for name, tensor in tensors.items():
        if is_quantised(name, tensor, storage.left):
            kind = storage.experts if storage.experts and ".experts." in name else storage.kind
            stored |= _stored(name, tensor, kind)
        else:
            stored[name] = tensor
            if name.endswith(".weight") and tensor.dim() == 2:
                left.append(name.removesuffix(".weight"))
    return stored, {**storage.config, storage.left_key: left}


def is_quantised(name: str, tensor: Tensor, left: Iterable[str] = ()) -> bool:
    """Whether a tensor is quantised: matrices and stacks of them are, but for :data:`LEFT` and `left`."""
    matrices = tensor.dim() == 2 or (tensor.dim() == 3 and ".experts." in name)
    return matrices and not any(fnmatchcase(name, pattern) for pattern in (*LEFT, *left))


def _stored(name: str, tensor: Tensor, kind: Kind) -> dict[str, Tensor]:
    """The stored tensors of a matrix or a stack."""
    matrices = list(tensor) if tensor.dim() == 3 else [tensor]
    parts = [quantise(kind.codec, kind.block(*matrix.shape), matrix, kind.dtypes) for matrix in matrices]
    found = {ending: [part[role] for part in parts] for role, ending in kind.names.items()}
    found |= {ending: [make(matrix) for matrix in matrices] for ending, make in kind.beside.items()}
    return {
        (name.removesuffix(".weight") if ending.startswith(".") else name) + ending: (
            torch.stack(made) if tensor.dim() == 3 else made[0].contiguous()
        )
        for ending, made in found.items()
    }
