"""Canonical names from every live spelling, the same in every layout."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from isthmus.names import canonical, live_tensors

# The second of two stages of a model with 8 layers, on the second of two expert-parallel ranks with 4 each.
LAYERS = {"decoder.layers.0": 4, "decoder.layers.1": 5, "mtp.layers.0": 0}
FIRST_EXPERT = 4

SPELLINGS = {
    "embedding.word_embeddings.weight": "embedding.word_embeddings.weight",
    "decoder.final_layernorm.weight": "decoder.final_layernorm.weight",
    "output_layer.weight": "output_layer.weight",
    # a stage's first layer
    "decoder.layers.0.self_attention.k_layernorm.bias": "decoder.layers.4.self_attention.k_layernorm.bias",
    "decoder.layers.1.mlp.router.weight": "decoder.layers.5.mlp.router.weight",
    "decoder.layers.1.mlp.router.expert_bias": "decoder.layers.5.mlp.router.expert_bias",
    # norms by themselves, and fused into the linear after them
    "decoder.layers.1.input_layernorm.weight": "decoder.layers.5.input_layernorm.weight",
    "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight": "decoder.layers.5.input_layernorm.weight",
    "decoder.layers.1.self_attention.linear_qkv.layer_norm_bias": "decoder.layers.5.input_layernorm.bias",
    "decoder.layers.0.self_attention.in_proj.layer_norm_weight": "decoder.layers.4.input_layernorm.weight",
    "decoder.layers.1.pre_mlp_layernorm.weight": "decoder.layers.5.pre_mlp_layernorm.weight",
    "decoder.layers.1.mlp.linear_fc1.layer_norm_weight": "decoder.layers.5.pre_mlp_layernorm.weight",
    "decoder.layers.0.self_attention.linear_q_up_proj.layer_norm_weight": (
        "decoder.layers.4.self_attention.q_layernorm.weight"
    ),
    "decoder.layers.0.self_attention.linear_kv_up_proj.layer_norm_weight": (
        "decoder.layers.4.self_attention.kv_layernorm.weight"
    ),
    # experts, grouped and in a list
    "decoder.layers.0.mlp.experts.linear_fc1.weight3": "decoder.layers.4.mlp.experts.7.linear_fc1.weight",
    "decoder.layers.0.mlp.experts.linear_fc2.bias0": "decoder.layers.4.mlp.experts.4.linear_fc2.bias",
    "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight": (
        "decoder.layers.4.mlp.experts.7.linear_fc1.weight"
    ),
    "decoder.layers.0.mlp.shared_experts.linear_fc1.weight": (
        "decoder.layers.4.mlp.shared_experts.linear_fc1.weight"
    ),
    # an HF module inside a layer keeps its own names
    "decoder.layers.0.self_attention.linear_attn.in_proj_qkvz.weight": (
        "decoder.layers.4.self_attention.linear_attn.in_proj_qkvz.weight"
    ),
    # the MTP block's layers count on their own
    "mtp.layers.0.enorm.weight": "mtp.layers.0.enorm.weight",
    "mtp.layers.0.eh_proj.weight": "mtp.layers.0.eh_proj.weight",
    "mtp.layers.0.transformer_layer.mlp.router.weight": "mtp.layers.0.layer.mlp.router.weight",
    "mtp.layers.0.mtp_model_layer.self_attention.linear_qkv.layer_norm_weight": (
        "mtp.layers.0.layer.input_layernorm.weight"
    ),
    "mtp.layers.0.mtp_model_layer.mlp.experts.linear_fc1.weight0": (
        "mtp.layers.0.layer.mlp.experts.4.linear_fc1.weight"
    ),
}


@pytest.mark.parametrize(("live", "expected"), SPELLINGS.items())
def test_canonical_name_of(live: str, expected: str) -> None:
    assert canonical(live, LAYERS, FIRST_EXPERT) == expected


@pytest.mark.parametrize("name", sorted(set(SPELLINGS.values())))
def test_a_canonical_name_on_the_only_rank_is_itself(name: str) -> None:
    layers = {f"{kind}.layers.{i}": i for kind in ("decoder", "mtp") for i in range(8)}
    assert canonical(name, layers, 0) == name


class Norm(nn.Module):
    """A layer with a parameter, a persistent buffer and one that is not saved."""

    def __init__(self, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("bias", torch.zeros(2))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def chunk(*layer_numbers: int) -> nn.Module:
    model = nn.Module()
    model.config = SimpleNamespace(num_moe_experts=None)
    model.decoder = nn.Module()
    model.decoder.layers = nn.ModuleList(Norm(number) for number in layer_numbers)
    return model


def test_layers_of_all_chunks_count_by_their_own_number() -> None:
    chunks = [chunk(3, 4), chunk(7, 8)]
    for model in (chunks, [Wrapper(Wrapper(each)) for each in chunks]):
        names = [(tensor.canonical, tensor.live) for tensor in live_tensors(model)]
        assert [name for name, _ in names if name.endswith("weight")] == [
            f"decoder.layers.{i}.weight" for i in (2, 3, 6, 7)
        ]
        assert ("decoder.layers.6.bias", "decoder.layers.0.bias") in names
        assert not any(name.endswith("cache") for name, _ in names)
