"""Tiny Qwen3.5: the published config.json with fewer and smaller parts, in the same proportions."""

from typing import Any

from isthmus.tiny import Tiny, Variant
from isthmus_qwen3_5.tensors import tensors

# What the two language models share; sizes are those of transformers' classes, made from the 9B and the
# 35B-A3B release.
COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 248320,
}
DENSE: dict[str, Any] = COMMON | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "model_type": "qwen3_5_text",
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}
MOE: dict[str, Any] = COMMON | {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "hidden_size": 2048,
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
}

# What shrinks. Kept as published: three delta nets to one attention layer, a quarter of each head rotated,
# two value heads to a key head, experts on every layer or on none.
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
    "rope_parameters": COMMON["rope_parameters"] | {"mrope_section": [2, 1, 1]},
}


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """A small dense Qwen3.5 config.json; `overrides` are fields of it."""
    return DENSE | SHRUNK | {"intermediate_size": 160} | overrides


def tiny_moe_config(**overrides: Any) -> dict[str, Any]:
    """A small Qwen3.5 config.json with experts; `overrides` are fields of it."""
    sizes = {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    }
    return MOE | SHRUNK | sizes | overrides


# As the releases have them, in fp32 whatever the rest: Qwen3.6 has these in bf16 too.
FP32 = ("*.linear_attn.A_log", "*.linear_attn.norm.weight")

VARIANTS = {
    "default": Variant(
        tiny_config(), "as published, dense, with fewer and smaller parts", reloaded=True, fp32=FP32
    ),
    "bf16_a_log": Variant(tiny_config(), "A_log and its norm in bfloat16 like the rest, as in Qwen3.6"),
    "tied": Variant(
        tiny_config(tie_word_embeddings=True),
        "the head is the embedding, in no file",
        head=False,
        reloaded=True,
        fp32=FP32,
    ),
    "tied_with_head": Variant(
        tiny_config(tie_word_embeddings=True), "the head is the embedding, repeated in the files", fp32=FP32
    ),
    "no_mtp": Variant(tiny_config(mtp_num_hidden_layers=0), "without the MTP block", mtp=False, fp32=FP32),
    "odd_vocab": Variant(
        tiny_config(vocab_size=151), "151 vocabulary rows, which no tensor-parallel size divides", fp32=FP32
    ),
    "moe": Variant(tiny_moe_config(), "as published, with fewer and smaller parts", reloaded=True, fp32=FP32),
    "moe_fused_experts": Variant(
        tiny_moe_config(),
        "the experts of a layer in one tensor, as Qwen3.6",
        fused_experts=True,
        reloaded=True,
        fp32=FP32,
    ),
    "moe_no_mtp": Variant(
        tiny_moe_config(mtp_num_hidden_layers=0), "without the MTP block", mtp=False, fp32=FP32
    ),
    "moe_sharded": Variant(tiny_moe_config(), "three safetensors files and an index", shards=3, fp32=FP32),
}

# Where the usual, 0 and a size that keeps activations at 1, would not do: see Qwen3-Next's. A dense MLP has
# five times an expert's rows.
VALUES = {
    "model.embed_tokens.weight": (0.0, 0.6),
    "*.o_proj.weight": (0.0, 0.04),
    "*.out_proj.weight": (0.0, 0.04),
    "*.mlp.down_proj.weight": (0.0, 0.03),
    "*.down_proj.weight": (0.0, 0.08),
    "*.linear_attn.norm.weight": (1.0, 0.2),
    "*.linear_attn.A_log": (0.0, 0.5),
    "*.linear_attn.dt_bias": (-2.0, 0.5),
    "*.mlp.gate.weight": (0.0, 0.3),
}

TINY = Tiny(VARIANTS, tensors, VALUES)
