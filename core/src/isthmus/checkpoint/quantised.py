"""Telling a quantised checkpoint from a plain one, so that raw codes are never taken for weights."""

from collections.abc import Mapping
from typing import Any, NamedTuple

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


class Findings(NamedTuple):
    """What says that a checkpoint is quantised; both empty where nothing does."""

    declared: dict[str, Any]  # dotted key of config.json -> what it says
    codes: dict[str, list[str]]  # dtype -> tensors of it that hold codes, not numbers

    @property
    def method(self) -> str | None:
        """The method that the config names first."""
        return next(map(_method, self.declared.values()), None)

    @property
    def format(self) -> str | None:
        """The format of the codes that the config names first."""
        entry = next(iter(self.declared.values()), None)
        return entry.get("fmt", entry.get("format")) if isinstance(entry, Mapping) else None


def find_quantised(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Findings:
    """What in config.json `config`, nested configs included, and the tensors says that they are codes."""
    codes: dict[str, list[str]] = {}
    for name, info in tensors.items():
        if _is_code(name, info, tensors):
            codes.setdefault(name_of(info.dtype), []).append(name)
    return Findings(_declared(config, ""), codes)


def refuse_quantised(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    """ValueError where a checkpoint's config or its tensors say that it is quantised."""
    from isthmus.weights import collapse

    found = find_quantised(config, tensors)
    reasons = [f"config.json has {key} ({_method(entry)})" for key, entry in sorted(found.declared.items())]
    for dtype, names in found.codes.items():
        shown = collapse(names)
        more = f" and {len(shown) - 3} more kinds" if len(shown) > 3 else ""
        reasons.append(f"{len(names)} tensors hold {dtype} codes: {', '.join(shown[:3])}{more}")
    if reasons:
        head = "this checkpoint is quantised, and quantised sources are not supported yet:"
        advice = "Use the bfloat16 release of the model, or dequantise it first and drop the config's entry"
        raise ValueError("\n  ".join([head, *reasons, advice]))


def _declared(config: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Dotted key -> value of every quantisation entry of a config and of the configs in it."""
    found = {}
    for key, value in config.items():
        if key in ("quantization_config", "compression_config") and value:
            found[prefix + key] = value
        elif isinstance(value, Mapping):
            found |= _declared(value, f"{prefix}{key}.")
    return found


def _method(entry: Any) -> str:
    return str(entry.get("quant_method", "no method named") if isinstance(entry, Mapping) else entry)


def _is_code(name: str, info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> bool:
    if info.dtype in _CODES:
        return True
    if info.dtype.is_floating_point or info.dtype.is_complex or info.dtype is torch.bool:
        return False
    stem = name.removesuffix(".weight")
    scales = (*(name + end for end in _SCALES), *(stem + end for end in _SIBLINGS if stem != name))
    return name.endswith(_PACKED) or any(scale in tensors for scale in scales)
