"""Telling a quantised checkpoint from a plain one, so that raw codes are never taken for weights."""

from collections.abc import Mapping
from typing import Any

import torch

from isthmus.checkpoint.dtypes import name_of
from isthmus.checkpoint.header import TensorInfo

# Floats of a byte or less are codes wherever they stand; integers are where their name or a scale says so.
_CODES = {
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
}
_PACKED = (".qweight", ".qzeros", "_packed", "_blocks")
_SCALES = ("_scale_inv", "_scale", "_scales", ".absmax", ".SCB")  # after the weight's whole name
_SIBLINGS = (".scale", ".scales", ".SCB")  # in place of its `.weight`


def refuse_quantised(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    """ValueError where a checkpoint's config or its tensors say that it is quantised.

    `config` is config.json; nested configs are looked into.
    """
    reasons = [f"config.json has {key} ({method})" for key, method in sorted(_declared(config, "").items())]
    by_dtype: dict[str, list[str]] = {}
    for name, info in tensors.items():
        if _is_code(name, info, tensors):
            by_dtype.setdefault(name_of(info.dtype), []).append(name)
    if by_dtype:
        from isthmus.weights import collapse

        for dtype, names in by_dtype.items():
            shown = collapse(names)
            more = f" and {len(shown) - 3} more kinds" if len(shown) > 3 else ""
            reasons.append(f"{len(names)} tensors hold {dtype} codes: {', '.join(shown[:3])}{more}")
    if reasons:
        head = "this checkpoint is quantised, and quantised sources are not supported yet:"
        advice = "Use the bfloat16 release of the model, or dequantise it first and drop the config's entry"
        raise ValueError("\n  ".join([head, *reasons, advice]))


def _declared(config: Mapping[str, Any], prefix: str) -> dict[str, str]:
    """Dotted key -> method, for every quantisation entry of a config and of the configs in it."""
    found = {}
    for key, value in config.items():
        if key in ("quantization_config", "compression_config") and value:
            method = value.get("quant_method", "no method named") if isinstance(value, Mapping) else value
            found[prefix + key] = str(method)
        elif isinstance(value, Mapping):
            found |= _declared(value, f"{prefix}{key}.")
    return found


def _is_code(name: str, info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> bool:
    if info.dtype in _CODES:
        return True
    if info.dtype.is_floating_point or info.dtype.is_complex or info.dtype is torch.bool:
        return False
    stem = name.removesuffix(".weight")
    scales = (*(name + end for end in _SCALES), *(stem + end for end in _SIBLINGS if stem != name))
    return name.endswith(_PACKED) or any(scale in tensors for scale in scales)
