"""What config.json says about quantisation, in one form for all spellings."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from isthmus.config_values import SECTION, misfits, raise_any
from isthmus.quant.fields import LEFT, wrong_fields

KEYS = ("quantization_config", "compression_config")
METHODS = ("fp8", "mxfp4", "compressed-tensors", "modelopt")  # quant_method of what can be read


@dataclass(frozen=True, slots=True)
class Numbers:
    """One way in which weights are said to be stored; None is not stated."""

    kind: str  # "float" or "int"
    bits: int
    strategy: str | None = None  # tensor, channel, block, group
    block: tuple[int, int] | None = None  # (rows, columns)
    symmetric: bool | None = None
    fmt: str | None = None  # e4m3 or e5m2


@dataclass(frozen=True, slots=True)
class Settings:
    """The quantisation entry of a config."""

    key: str  # where it stands, dotted
    method: str
    weights: tuple[Numbers, ...] = ()
    left: tuple[str, ...] = ()  # the modules that are said not to be quantised, as the config names them
    every_linear: bool = True  # the config is for all linear layers but for `left`
    power_scales: bool = False  # new scales are powers of two
    raw: Mapping[str, Any] = field(default_factory=dict)

    def numbers(self, kind: str, bits: int) -> list[Numbers]:
        """What is said about weights of this kind."""
        return [said for said in self.weights if (said.kind, said.bits) == (kind, bits)]


def entries(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of every quantisation entry of a config and of the configs in it."""
    found = {}
    for key, value in config.items():
        if key in KEYS and value is not None and value != {}:
            found[prefix + key] = value
        elif isinstance(value, Mapping):
            found |= entries(value, f"{prefix}{key}.")
    return found


def method_of(entry: Any) -> str:
    """The method that an entry names, in words where it names none."""
    return str(entry.get("quant_method", "no method named") if isinstance(entry, Mapping) else entry)


def read_settings(config: Mapping[str, Any]) -> Settings | None:
    """The config's one entry; None where it has none. ValueError: several that differ, unknown method."""
    found = entries(config)
    if not found:
        return None
    key, entry = next(iter(found.items()))
    if any(other != entry for other in found.values()):
        raise ValueError(f"config.json says twice how it is quantised: {', '.join(found)}. Keep the true one")
    raise_any(list(misfits({key: entry}, {key: SECTION}, "")))
    method = method_of(entry)
    if method not in METHODS:
        raise ValueError(
            f"config.json has {key} ({method}): this checkpoint is quantised in a way that is not known here"
            f" (known: {', '.join(METHODS)}). Use the bfloat16 release of the model, or dequantise it first"
        )
    raise_any(wrong_fields(method, entry, key))
    left = tuple(dict.fromkeys(name for spelling in LEFT for name in entry.get(spelling) or ()))
    power = entry.get("scale_fmt") == "ue8m0"
    return Settings(
        key, method, tuple(_weights(method, entry)), left, _every_linear(method, entry), power, entry
    )


def plain_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype of dequantised weights: what config.json states, bfloat16 where it states none."""
    text = config.get("text_config")
    sections = (config, text if isinstance(text, Mapping) else {})
    for stated in (section.get(key) for section in sections for key in ("dtype", "torch_dtype")):
        dtype = getattr(torch, stated, None) if isinstance(stated, str) else None
        if dtype in (torch.float32, torch.bfloat16, torch.float16):
            return dtype
    return torch.bfloat16


def _every_linear(method: str, entry: Mapping[str, Any]) -> bool:
    """Whether tensors of one kind are stored alike; compressed-tensors may name other `targets`."""
    if method != "compressed-tensors":
        return entry.get("quant_algo") != "MIXED_PRECISION"
    groups = (entry.get("config_groups") or {}).values()
    return any("Linear" in (group.get("targets") or ()) for group in groups if group)


def _weights(method: str, entry: Mapping[str, Any]) -> Iterator[Numbers]:
    if method == "fp8":
        block = entry.get("weight_block_size")
        size = None if block is None else (block[0], block[1])
        yield Numbers("float", 8, "block" if size else None, size, fmt=entry.get("fmt"))
        yield Numbers("float", 4, "group", (1, 32))  # experts, beside it (`expert_dtype`)
    elif method == "mxfp4":
        yield Numbers("float", 4, "group", (1, 32))
    elif method == "modelopt":
        group = entry.get("group_size") or 16
        if str(entry.get("quant_algo", "NVFP4")).upper() != "FP8":
            yield Numbers("float", 4, "group", (1, group))
        yield Numbers("float", 8, "tensor")
    else:
        for group in (entry.get("config_groups") or {}).values():
            if stored := (group or {}).get("weights"):
                yield _of_group(stored)


def _of_group(said: Mapping[str, Any]) -> Numbers:
    """One entry of compressed-tensors' config_groups."""
    strategy = said.get("strategy")
    block = None
    if strategy in ("group", "tensor_group"):
        block = (1, said["group_size"])
    elif strategy == "block":
        rows, cols = said["block_structure"]
        block = (rows, cols)
    kind = "group" if strategy == "tensor_group" else strategy
    return Numbers(str(said.get("type", "int")), said["num_bits"], kind, block, said.get("symmetric"))
