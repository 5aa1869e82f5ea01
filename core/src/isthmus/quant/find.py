"""Which tensors of a checkpoint are codes, and what each is scaled by: from config.json and headers alone.

The config says what is to be expected; each tensor's dtype, shape and the tensors beside it confirm it. Where
they disagree, where codes have no scale or a scale no codes, that is an error: a raw code is never a weight.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from isthmus.checkpoint.dtypes import name_of
from isthmus.checkpoint.header import Defects, TensorInfo
from isthmus.quant import float4, float8, integers
from isthmus.quant.codec import Quantised
from isthmus.quant.fields import exceptions
from isthmus.quant.layout import Checkpoint
from isthmus.quant.plain import suspects
from isthmus.quant.settings import Settings, read_settings

# Of each format: the tensor whose codes the stored tensor `name` holds; None where it is not of that format.
FORMATS: tuple[Callable[[str, Checkpoint], Quantised | None], ...] = (
    float4.recognise,
    integers.recognise,
    float8.recognise,
)

# Floats of a byte or less are codes wherever they stand; integers are where their name or a scale says so.
_NARROW = {
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
# What is a scale by its name alone: no model calls a weight so.
_ORPHANS = ("_scale_inv", "weight_scale", "weight_scale_2", "weight_global_scale", "_scales", "_zero_point")


@dataclass(slots=True)
class Found:
    """What a checkpoint's config and tensors say about quantisation."""

    quantised: dict[str, Quantised] = field(default_factory=dict)  # by logical name, in file order
    stored: set[str] = field(default_factory=set)  # names of stored tensors that are parts of those
    raw: dict[str, list[str]] = field(default_factory=dict)  # dtype -> codes that nothing here can read
    settings: Settings | None = None
    problem: str | None = None  # with the config's entry
    defects: Defects = field(default_factory=Defects)


def find(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Found:
    """Look at config.json `config`, nested configs included, and the tensors; raises nothing."""
    found = Found()
    try:
        found.settings = read_settings(config)
    except ValueError as error:
        found.problem = str(error)
    checkpoint = Checkpoint(tensors, found.settings, found.defects)
    if found.settings is not None:
        for recognise in FORMATS:
            for name in tensors:
                if name not in found.stored and (item := recognise(name, checkpoint)):
                    found.quantised[item.name] = item
                    found.stored |= {*item.parts.values(), *item.beside.values()}
    order = {name: position for position, name in enumerate(tensors)}
    found.quantised = dict(sorted(found.quantised.items(), key=lambda item: order[item[1].codes]))
    for name, info in tensors.items():
        if name in found.stored or name in checkpoint.reported:
            continue
        if _is_code(name, info, tensors):
            found.raw.setdefault(name_of(info.dtype), []).append(name)
        elif found.settings is not None and name.endswith(_ORPHANS):
            found.defects.add("a scale of no quantised tensor", name)
    if found.settings is not None:
        _check_left(found, found.settings)
        known = found.stored | checkpoint.reported
        plain = {name: info for name, info in tensors.items() if name not in known}
        for name, sibling in suspects(plain, found.quantised, found.settings):
            what = f"plain numbers where {found.settings.key} says codes, without an entry for an exception"
            found.defects.add(what, name, f"{sibling} is quantised")
    return found


def _check_left(found: Found, settings: Settings) -> None:
    """Notes what is quantised though the config says that it is not."""
    naming = exceptions(settings.left)
    for name in found.quantised:
        if entry := naming(name.removesuffix(".weight")):
            found.defects.add(f"quantised, and {settings.key} says that it is not", name, f"entry {entry}")


def code_dtypes(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> list[str]:
    """The dtypes of stored tensors that are codes, readable or not; sorted."""
    found = find(config, tensors)
    known = {name_of(tensors[item.codes].dtype) for item in found.quantised.values()}
    return sorted({name_of(i.dtype) for n, i in tensors.items() if _is_code(n, i, tensors)} | known)


def find_or_refuse(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], where: Any
) -> dict[str, Quantised]:
    """The quantised tensors by name, none in a plain checkpoint. ValueError lists all that is wrong."""
    found = find(config, tensors)
    if found.problem is not None:
        raise ValueError(found.problem)
    if found.settings is None:
        for dtype, names in found.raw.items():
            what = "quantised, and config.json has no quantization_config:"
            what += f" {len(names)} tensors hold {dtype} codes"
            for name in names:
                found.defects.add(what, name)
    else:
        for dtype, names in found.raw.items():
            for name in names:
                found.defects.add(f"{dtype} codes that no known format explains", name)
    found.defects.raise_any(where)
    if found.settings is not None and not found.quantised:
        raise ValueError(
            f"{where}: config.json has {found.settings.key} ({found.settings.method}), and no tensor is"
            " quantised. Drop the entry if the weights are plain numbers"
        )
    return found.quantised


def _is_code(name: str, info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> bool:
    if info.dtype in _NARROW:
        return True
    if info.dtype.is_floating_point or info.dtype.is_complex or info.dtype is torch.bool:
        return False
    if info.dtype.itemsize == 1 and name.endswith(".weight") and len(info.shape) > 1:
        return True
    stem = name.removesuffix(".weight")
    scales = (*(name + end for end in _SCALES), *(stem + end for end in _SIBLINGS if stem != name))
    return name.endswith(_PACKED) or any(scale in tensors for scale in scales)
