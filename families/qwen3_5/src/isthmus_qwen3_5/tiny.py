"""Tiny Qwen3.5: the fields of the releases with fewer and smaller parts, in the same proportions."""

from typing import Any

from isthmus.tiny import Tiny, Variant
from isthmus_qwen3_5.tensors import tensors
from isthmus_qwen3_next import tiny as qwen3_next

# What the two language models share. Not copies of released files: sizes are the defaults of transformers'
# classes, which are made from the 9B and the 35B-A3B release.
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

# As Qwen3-Next's. Kept: three delta nets to one attention layer, a quarter of each head rotated, two value
# heads to a key head, experts on every layer or on none.
SHRUNK = qwen3_next.SHRUNK | {
    "rope_parameters": COMMON["rope_parameters"] | {"mrope_section": [2, 1, 1]},
}


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """A small dense Qwen3.5 config.json; `overrides` are fields of it."""
    return DENSE | SHRUNK | qwen3_next.SHRUNK_MLP | overrides


def tiny_moe_config(**overrides: Any) -> dict[str, Any]:
    """A small Qwen3.5 config.json with experts; `overrides` are fields of it."""
    return MOE | SHRUNK | qwen3_next.SHRUNK_EXPERTS | overrides


# Of the 9B and the 35B-A3B, as transformers' classes have it.
VISION: dict[str, Any] = {
    "deepstack_visual_indexes": [],
    "depth": 27,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 4096,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
TOKENS = {
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
}
SHRUNK_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": qwen3_next.SHRUNK["hidden_size"],
    "patch_size": 4,
}
SHRUNK_TOKENS = {
    "image_token_id": 150,
    "video_token_id": 149,
    "vision_start_token_id": 148,
    "vision_end_token_id": 147,
}


def vision_language(
    text: dict[str, Any], vision: dict[str, Any] | None = None, **overrides: Any
) -> dict[str, Any]:
    """The config.json of the release with a vision tower that has this language model; a small one."""
    kind = text["model_type"].removesuffix("_text")
    name = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[kind]
    inner = {key: value for key, value in text.items() if key != "architectures"}
    return {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": kind,
        "text_config": inner,
        "tie_word_embeddings": text["tie_word_embeddings"],
        **SHRUNK_TOKENS,
        "vision_config": {"model_type": f"{kind}_vision", **VISION, **SHRUNK_VISION, **(vision or {})},
        **overrides,
    }


# As the releases have them, in fp32 whatever the rest: Qwen3.6 has these in bf16 too.
FP32 = ("*.linear_attn.A_log", "*.linear_attn.norm.weight")

VARIANTS = {
    "default": Variant(
        tiny_config(), "dense, with fewer and smaller parts than the 9B", reloaded=True, fp32=FP32
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
    "moe": Variant(
        tiny_moe_config(),
        "with experts, fewer and smaller than in the 35B-A3B",
        reloaded=True,
        fp32=FP32,
    ),
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
    "vision": Variant(
        vision_language(tiny_config()), "dense, with a vision tower of two blocks", reloaded=True, fp32=FP32
    ),
    "vision_tied": Variant(
        vision_language(tiny_config(tie_word_embeddings=True)),
        "with a vision tower; the head is the embedding, in no file",
        head=False,
        reloaded=True,
        fp32=FP32,
    ),
    "vision_moe": Variant(
        vision_language(tiny_moe_config()), "experts and a vision tower", reloaded=True, fp32=FP32
    ),
    "vision_moe_fused_experts": Variant(
        vision_language(tiny_moe_config()),
        "stacked experts and a vision tower, as Qwen3.6",
        fused_experts=True,
        reloaded=True,
        fp32=FP32,
    ),
}

# As Qwen3-Next's; a dense MLP has five times an expert's rows.
VALUES = {
    "*.mlp.down_proj.weight": (0.0, 0.015),
    "model.language_model.embed_tokens.weight": qwen3_next.VALUES["model.embed_tokens.weight"],
    **qwen3_next.VALUES,
}

TINY = Tiny(VARIANTS, tensors, VALUES)
