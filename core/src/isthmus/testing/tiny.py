"""A tiny random checkpoint of a family, in the layout of its published ones.

Values depend on the seed and the tensor's name alone: variants of one seed hold the same numbers. Files are
written by safetensors itself, so that a tiny checkpoint tests isthmus' reader and not its own writer.
"""

import json
import zlib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save

from isthmus.checkpoint.dtypes import name_of
from isthmus.checkpoint.folder import Staging
from isthmus.config import HFConfig
from isthmus.config_text import write_config
from isthmus.family import Family
from isthmus.testing.quantised import STORAGE, quantise_tensors
from isthmus.testing.tokenizer import write_tokenizer
from isthmus.tiny import Tiny, Variant, stack_of


def write_tiny(
    family: Family,
    target: str | Path,
    variant: str | Variant = "default",
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> None:
    """Write a tiny checkpoint of `family`, a variant of its own or another; `dtype` None is the config's.

    LookupError names the variants there are; ValueError where the target folder is not empty.
    """
    chosen = variant if isinstance(variant, Variant) else family.variant(variant)
    assert family.tiny is not None
    stated = dict(chosen.config)
    text = {**stated.get("text_config", {}), **stated}
    kept: torch.dtype = dtype or getattr(torch, text.get("dtype") or text["torch_dtype"])
    tensors = make_tensors(family.tiny, chosen, seed, kept)
    if chosen.quantised is not None:
        tensors, stated["quantization_config"] = quantise_tensors(tensors, STORAGE[chosen.quantised])
    with Staging(target, overwrite) as staging:
        _write_shards(staging.path, tensors, chosen.shards)
        config = write_config(json.dumps(stated, indent=2) + "\n", {"torch_dtype": name_of(kept)})
        (staging.path / "config.json").write_text(config, encoding="utf-8")
        write_tokenizer(staging.path, text)
        staging.publish()


def make_tensors(tiny: Tiny, variant: Variant, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The variant's tensors by name, in the dtypes they have in the files."""
    config = HFConfig(variant.config)
    shapes = tiny.tensors(config, variant.mtp)
    tensors = {
        name: _random(_original(name, tiny.copies), shape, tiny.values, seed)
        for name, shape in shapes.items()
    }
    if config["tie_word_embeddings"]:
        embedding = next(name for name in tensors if name.endswith(".embed_tokens.weight"))
        tensors["lm_head.weight"] = tensors[embedding].clone()
    if variant.fused_experts:
        tensors = stacked_experts(tensors)
    return {
        name: tensors[name].to(torch.float32 if _matches(name, variant.fp32) else dtype)
        for name in tiny.shapes(variant)
    }


def _original(name: str, copies: Mapping[str, str]) -> str:
    """The tensor whose content `name` has: its own, unless it is a copy."""
    return next((original for pattern, original in copies.items() if fnmatchcase(name, pattern)), name)


def _random(
    name: str, shape: tuple[int, ...], values: Mapping[str, tuple[float, float]], seed: int
) -> torch.Tensor:
    """Normal numbers around 0, vectors of spread 0.2, matrices such that a product keeps its input's size."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode(), seed))
    usual = (0.0, 0.2 if len(shape) == 1 else prod(shape[1:]) ** -0.5)
    centre, spread = next((value for key, value in values.items() if fnmatchcase(name, key)), usual)
    return centre + spread * torch.randn(shape, generator=generator)


def stacked_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts as transformers 5 holds them: `gate_up_proj` (E, 2F, H) and `down_proj` (E, H, F).

    Those that are held so already, and all other tensors, are the same.
    """
    result: dict[str, torch.Tensor] = {}
    rows: dict[
        str, dict[int, torch.Tensor]
    ] = {}  # in whatever order the tensors come: files have 10 before 2
    for name, tensor in tensors.items():
        place = stack_of(name)
        if place is None:
            result[name] = tensor
            continue
        stack, expert = place
        if name.endswith(".gate_proj.weight"):
            tensor = torch.cat([tensor, tensors[name.replace(".gate_proj.", ".up_proj.")]])
        if not name.endswith(".up_proj.weight"):
            rows.setdefault(stack, {})[expert] = tensor
    return result | {
        stack: torch.stack([parts[expert] for expert in range(len(parts))]) for stack, parts in rows.items()
    }


def _write_shards(folder: Path, tensors: Mapping[str, torch.Tensor], count: int) -> None:
    """`count` files, each with its share of the tensors in order; an index where there are several."""
    names = list(tensors)
    if count == 1:
        _write(folder / "model.safetensors", tensors)
        return
    weight_map = {}
    for number in range(count):
        file = f"model-{number + 1:05}-of-{count:05}.safetensors"
        held = names[number * len(names) // count : (number + 1) * len(names) // count]
        _write(folder / file, {name: tensors[name] for name in held})
        weight_map |= dict.fromkeys(held, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """A file of the usual mode: safetensors' own `save_file` makes one that nobody else may read."""
    path.write_bytes(save(dict(tensors), metadata={"format": "pt"}))


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
