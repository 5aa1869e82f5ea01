"""Variants of a tiny checkpoint, as data: what its config.json says and how its files are written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from isthmus.config import HFConfig


@dataclass(frozen=True, slots=True)
class Variant:
    """One way a checkpoint of a family can look on disk. No tensors here: a writer makes them from this."""

    config: Mapping[str, Any]  # all of config.json, in the spelling that it is to have
    about: str = ""  # what it is, in a line
    mtp: bool = True  # the multi-token prediction layer is in the files
    head: bool = True  # `lm_head.weight` is in the files; a tied checkpoint may or may not have it
    fused_experts: bool = False  # experts of a layer stacked in one tensor, instead of one tensor each
    shards: int = 1  # safetensors files
    fp32: tuple[str, ...] = ()  # patterns (fnmatch) of tensors stored in float32 whatever the dtype


def v5_spelling(config: Mapping[str, Any]) -> dict[str, Any]:
    """A v4 config.json as transformers 5 writes it: `dtype`, `rope_parameters`, `layer_types`."""
    config = dict(config)
    layers, interval = config["num_hidden_layers"], config.pop("full_attention_interval")
    config["dtype"] = config.pop("torch_dtype")
    config["layer_types"] = [
        "linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)
    ]
    config["rope_parameters"] = {
        "partial_rotary_factor": config.pop("partial_rotary_factor"),
        "rope_theta": config.pop("rope_theta"),
        **(config.pop("rope_scaling") or {"rope_type": "default"}),
    }
    config["transformers_version"] = "5.24.0"
    return dict(sorted(config.items()))


def transformers_tensors(hf: HFConfig, mtp: bool) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor of transformers' own model, for files that are named as it is in memory.

    `mtp` does not matter: transformers has no block for it. Families whose files differ write theirs down.
    """
    import torch

    from isthmus.hosting.torch_functions import import_modeling

    kind = hf.model_type
    modeling = import_modeling(f"transformers.models.{kind}.modeling_{kind}")
    model_class = getattr(modeling, hf["architectures"][0])
    with torch.device("meta"):
        model = model_class(model_class.config_class.from_dict(dict(hf.raw)))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@dataclass(frozen=True, slots=True)
class Tiny:
    """What a family provides for tiny checkpoints: its variants, and every tensor of a published one."""

    variants: Mapping[str, Variant]
    tensors: Callable[[HFConfig, bool], dict[str, tuple[int, ...]]] = transformers_tensors
    """Name and shape of each tensor on disk, experts one by one, for a config; with or without MTP block."""
    values: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Patterns (fnmatch) of tensors and the (centre, spread) of their random values, where these are not 0
    and what keeps activations of size 1."""
