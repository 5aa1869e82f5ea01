"""What a family's checkpoints look like, as data: the shape of every tensor, and variants of a tiny one."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from isthmus.config import HFConfig

# Ways to quantise any variant of any family, and what each is; `isthmus.testing.quantised` does it.
QUANTISED: Mapping[str, str] = {
    "fp8_block": "FP8 e4m3, a float32 scale for each block, as DeepSeek-V3 and Qwen3 have it",
    "fp8_block_e5m2": "FP8 e5m2, a bfloat16 scale for each block",
    "fp8_block_e8m0": "FP8 e4m3, a power of two for each block, named `.scale` as in DeepSeek-V4",
    "fp8_block_stacked": "fp8_block with stacked experts",
    "fp8_tensor": "FP8 e4m3, one scale for a tensor and one for its input",
    "fp8_tensor_stacked": "fp8_tensor with stacked experts and one scale for each expert",
    "fp8_channel": "FP8 e4m3, a bfloat16 scale for each row, as compressed-tensors has it",
    "mxfp4": "MXFP4 with stacked experts, as `_blocks` and `_scales`; all else is left",
    "mxfp4_packed": "FP8 with e8m0 scales, experts in packed MXFP4, as in DeepSeek-V4",
    "nvfp4": "NVFP4 with two levels of scales, as ModelOpt has it",
    "nvfp4_packed": "NVFP4 as compressed-tensors has it",
    "int4": "INT4 in groups of 32, symmetric, as compressed-tensors packs it",
    "int4_asymmetric": "INT4 in groups of 32 with zero points",
    "int8": "INT8, a scale for each row, as compressed-tensors has it",
    "int8_packed": "INT8 in groups of 32 with zero points, packed",
}
# Those that stack the experts.
STACKED = frozenset({"fp8_block_stacked", "fp8_tensor_stacked", "mxfp4"})


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
    quantised: str | None = None  # how linear weights are stored: a name of isthmus.testing.quantised
    reloaded: bool = False  # the conformance tests have transformers load what Megatron exports of it


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

    from isthmus.hosting.torch_functions import modeling_of

    model_class = getattr(modeling_of(hf.model_type), hf["architectures"][0])
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
    copies: Mapping[str, str] = field(default_factory=dict)
    """Patterns (fnmatch) of tensors that repeat another, and its name."""

    def shapes(self, variant: Variant) -> dict[str, tuple[int, ...]]:
        """Name and shape of each tensor of the variant's files."""
        shapes = self.tensors(HFConfig(variant.config), variant.mtp)
        if not variant.head:
            del shapes["lm_head.weight"]
        return _stacked(shapes) if variant.fused_experts else shapes

    def misshapen(self, config: HFConfig, found: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
        """Name -> what is wrong with its shape; `found` are the shapes of a checkpoint's tensors."""
        single = self.tensors(HFConfig(config.raw), True)
        wanted = single | _stacked(single)
        return {
            name: f"is {shape}, the config makes it {wanted[name]}"
            for name, shape in found.items()
            if name in wanted and wanted[name] != shape
        }


def stack_of(name: str) -> tuple[str, int] | None:
    """The stacked tensor that one expert's tensor is a part of, and its row there; None for all others."""
    match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
    if match is None:
        return None
    return f"{match[1]}.{'down_proj' if match[3] == 'down' else 'gate_up_proj'}", int(match[2])


def _stacked(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The same with the experts of a layer in one tensor."""
    stacked: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        place = stack_of(name)
        if place is None:
            stacked[name] = shape
            continue
        stack, expert = place
        rows = shape[0] * (2 if stack.endswith("gate_up_proj") else 1)
        count = max(stacked.get(stack, (0,))[0], expert + 1)
        stacked[stack] = (count, rows, *shape[1:])
    return stacked
