"""Tiny Qwen3-Next: the published config.json with fewer and smaller parts, in the same proportions."""

import json
from importlib.resources import files
from typing import Any

from isthmus.tiny import Tiny, Variant, v5_spelling
from isthmus_qwen3_next.tensors import tensors

# Qwen3-Next-80B-A3B-Instruct, as published (spelling of transformers 4).
PUBLISHED: dict[str, Any] = json.loads(files(__package__).joinpath("published.config.json").read_text())

# What shrinks. Kept as published: three delta nets to one attention layer, query heads together twice as wide
# as the hidden state, a quarter of each head rotated, two value heads to a key head, experts on every layer.
SHRUNK = {
    "vocab_size": 160,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SHRUNK_MLP = {"intermediate_size": 160}
SHRUNK_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """A small Qwen3-Next config.json in the published spelling; `overrides` are fields of it."""
    return PUBLISHED | SHRUNK | SHRUNK_MLP | SHRUNK_EXPERTS | overrides


VARIANTS = {
    "default": Variant(
        tiny_config(),
        "as published, with fewer and smaller parts: 4 layers, 8 experts, one MTP layer",
        reloaded=True,
    ),
    "tied": Variant(
        tiny_config(tie_word_embeddings=True),
        "the head is the embedding, and the files leave it out",
        head=False,
        reloaded=True,
    ),
    "tied_with_head": Variant(
        tiny_config(tie_word_embeddings=True), "the head is the embedding, and the files repeat it"
    ),
    "no_mtp": Variant(tiny_config(), "without the MTP layer", mtp=False),
    "odd_vocab": Variant(
        tiny_config(vocab_size=151), "151 vocabulary rows, which no tensor-parallel size divides"
    ),
    "five_layers": Variant(
        tiny_config(num_hidden_layers=5), "5 layers, which two pipeline stages cannot share evenly"
    ),
    "eight_layers": Variant(tiny_config(num_hidden_layers=8), "8 layers, for pipelines of many stages"),
    "dense_layers": Variant(tiny_config(mlp_only_layers=[1]), "layer 1 has a plain MLP in place of experts"),
    "v5_config": Variant(v5_spelling(tiny_config()), "config.json as transformers 5 writes it"),
    "fused_experts": Variant(
        tiny_config(),
        "the experts of a layer in one tensor, as transformers 5 holds them",
        fused_experts=True,
        reloaded=True,
    ),
    "sharded": Variant(tiny_config(), "three safetensors files and an index", shards=3),
    "fp32_a_log": Variant(
        tiny_config(),
        "A_log in float32, all else in bfloat16",
        fp32=("*.linear_attn.A_log",),
        reloaded=True,
    ),
    "fp32_norm": Variant(
        tiny_config(),
        "the delta net's norm in float32, all else in bfloat16",
        fp32=("*.linear_attn.norm.weight",),
    ),
}

# Where the usual, 0 and a size that keeps activations at 1, would not do. Decay is exp(-exp(A_log) dt), and
# near 1 it remembers; a spread router has no near ties. As in a trained model, a layer adds little to what it
# was given: else each multiplies the rounding of those before, and eight layers' gradients differ by 3e-5
# where their weights differ by one rounding.
VALUES = {
    "model.embed_tokens.weight": (0.0, 0.6),
    "*.o_proj.weight": (0.0, 0.02),
    "*.out_proj.weight": (0.0, 0.02),
    "*.down_proj.weight": (0.0, 0.04),
    "*.linear_attn.norm.weight": (1.0, 0.2),
    "*.linear_attn.A_log": (0.0, 0.5),
    "*.linear_attn.dt_bias": (-2.0, 0.5),
    "*.mlp.gate.weight": (0.0, 0.3),
}

TINY = Tiny(VARIANTS, tensors, VALUES)
