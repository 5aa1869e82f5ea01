"""Live Megatron names and canonical ones: the only file that knows how Megatron spells its parameters.

A live name depends on the rank and the backend: layers count from the chunk's first, experts from the rank's
first, norms may be fused into a linear, experts grouped or in a list, and wrappers add ``module.``. The
canonical name is the same on every rank and in every layout:

================================================  ==================================================
live                                              canonical
================================================  ==================================================
``decoder.layers.0.*`` on the second stage        ``decoder.layers.{first layer of the stage}.*``
``self_attention.linear_qkv.layer_norm_weight``   ``input_layernorm.weight``
``self_attention.in_proj.layer_norm_weight``      ``input_layernorm.weight``
``mlp.linear_fc1.layer_norm_weight``              ``pre_mlp_layernorm.weight``
``self_attention.linear_q_up_proj.layer_norm_*``  ``self_attention.q_layernorm.*``
``self_attention.linear_kv_up_proj.layer_norm_*`` ``self_attention.kv_layernorm.*``
``mlp.experts.linear_fc1.weight3``                ``mlp.experts.{first expert + 3}.linear_fc1.weight``
``mlp.experts.local_experts.3.linear_fc1.weight`` the same
``mtp.layers.0.mtp_model_layer.*``                ``mtp.layers.0.layer.*``
``mtp.layers.0.transformer_layer.*``              the same
================================================  ==================================================
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

_NORM_BEFORE = {
    "self_attention.linear_qkv": "input_layernorm",
    "self_attention.in_proj": "input_layernorm",
    "self_attention.linear_q_up_proj": "self_attention.q_layernorm",
    "self_attention.linear_kv_up_proj": "self_attention.kv_layernorm",
    "mlp.linear_fc1": "pre_mlp_layernorm",
}
_FUSED_NORM = re.compile(rf"({'|'.join(map(re.escape, _NORM_BEFORE))})\.layer_norm_(weight|bias)$")
_GROUPED = re.compile(r"(mlp\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)$")
_SEQUENTIAL = re.compile(r"(mlp\.experts)\.local_experts\.(\d+)\.")
_MTP_LAYER = re.compile(r"^(mtp\.layers\.\d+)\.(?:mtp_model_layer|transformer_layer)\.")
_LAYER = re.compile(r"^((?:decoder|mtp)\.layers)\.(\d+)\.")


class LiveTensor(NamedTuple):
    """A parameter or persistent buffer of this rank, by both names."""

    canonical: str
    live: str
    tensor: torch.Tensor


def canonical(live: str, layers: Mapping[str, int], first_expert: int) -> str:
    """The canonical name of `live` (without ``module.`` wrappers).

    `layers` gives each local layer's global index, ``{"decoder.layers.0": 4}``; `first_expert` is the rank's
    first.
    """
    name = _MTP_LAYER.sub(r"\1.layer.", live) if live.startswith("mtp.") else live
    name = _LAYER.sub(lambda m: f"{m[1]}.{layers[f'{m[1]}.{m[2]}']}.", name)
    if ".layer_norm_" in name:
        name = _FUSED_NORM.sub(lambda m: f"{_NORM_BEFORE[m[1]]}.{m[2]}", name)
    if "mlp.experts." in name:
        name = _GROUPED.sub(lambda m: f"{m[1]}.{first_expert + int(m[4])}.{m[2]}.{m[3]}", name)
        name = _SEQUENTIAL.sub(lambda m: f"{m[1]}.{first_expert + int(m[2])}.", name)
    return name


def live_tensors(chunks: Iterable[nn.Module]) -> Iterator[LiveTensor]:
    """Every parameter and persistent buffer of the model `chunks` that this rank holds."""
    for chunk in chunks:
        model = unwrapped(chunk)
        layers: dict[str, int] = {
            name: module.layer_number - 1
            for name, module in model.named_modules()
            if re.fullmatch(r"(?:decoder|mtp)\.layers\.\d+", name)
        }
        first_expert = _first_expert(model)
        for name, tensor in _persistent(model):
            yield LiveTensor(canonical(name, layers, first_expert), name, tensor)


def unwrapped(module: nn.Module) -> Any:
    """The model inside DDP and mixed-precision wrappers: a nn.Module with Megatron's own attributes."""
    while isinstance(inner := getattr(module, "module", None), nn.Module):
        module = inner
    return module


def _first_expert(model: Any) -> int:
    """Global index of the rank's first routed expert."""
    experts = model.config.num_moe_experts
    if not experts:
        return 0
    group = model.pg_collection.ep
    return group.rank() * (experts // group.size())


def _persistent(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer
