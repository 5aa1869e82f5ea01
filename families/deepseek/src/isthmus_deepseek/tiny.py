"""Tiny DeepSeeks: configs in the published layout, their parts fewer and smaller, in the same proportions.

The full-size ones were written down from the defaults of transformers' classes and public descriptions, not
fetched.
"""

import json
from importlib.resources import files
from typing import Any

from isthmus.tiny import Tiny, Variant
from isthmus_deepseek.tensors import tensors


def _full_size(name: str) -> dict[str, Any]:
    """A config.json in the layout that a release publishes."""
    return json.loads(files(__package__).joinpath(f"{name}.config.json").read_text())


V2, V2_LITE, V3 = (_full_size(name) for name in ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3"))
# DeepSeek-V3.2's is V3's with an indexer.
V32 = V3 | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
}

# What shrinks. Kept from the full size: heads together wider than the hidden state, half as many rotated dims
# as others, yarn with its factors, shared experts, the gates and their scale.
SHRUNK = {
    "vocab_size": 160,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "intermediate_size": 160,
    "moe_intermediate_size": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def tiny_v2(**overrides: Any) -> dict[str, Any]:
    """A small DeepSeek-V2: latent queries, 4 groups of 4 experts, of which 2 are chosen for 4 experts."""
    routing = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
    return V2 | SHRUNK | routing | {"q_lora_rank": 48} | overrides


def tiny_v2_lite(**overrides: Any) -> dict[str, Any]:
    """A small DeepSeek-V2-Lite: queries without a latent, the best 3 of 8 experts."""
    routing = {"n_routed_experts": 8, "num_experts_per_tok": 3}
    return V2_LITE | SHRUNK | routing | overrides


def tiny_v3(**overrides: Any) -> dict[str, Any]:
    """A small DeepSeek-V3 in bfloat16: V2's shape, V3's gate, one layer without experts, one MTP layer."""
    routing = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
    config = V3 | SHRUNK | routing | {"q_lora_rank": 48, "first_k_dense_replace": 1} | overrides
    del config["quantization_config"]
    return config


def tiny_v32(**overrides: Any) -> dict[str, Any]:
    """A small DeepSeek-V3.2: V3 with an indexer that chooses 8 keys."""
    indexer = {"index_head_dim": 16, "index_n_heads": 8, "index_topk": 8}
    config = tiny_v3(**{key: V32[key] for key in ("architectures", "model_type")}, **indexer)
    return config | overrides


# Where the usual, 0 and a size that keeps activations at 1, would not do. A spread router has no near ties.
# As in a trained model, a layer adds little to what it was given, or each multiplies the rounding of those
# before.
VALUES = {
    "*.embed_tokens.weight": (0.0, 0.6),
    "*norm.weight": (1.0, 0.2),
    "*.o_proj.weight": (0.0, 0.04),
    "*.down_proj.weight": (0.0, 0.08),
    "*.mlp.gate.weight": (0.0, 0.3),
    "*.e_score_correction_bias": (0.0, 0.3),
}
COPIES = {
    "model.layers.*.embed_tokens.weight": "model.embed_tokens.weight",
    "model.layers.*.shared_head.head.weight": "lm_head.weight",
}
BIAS = ("*.e_score_correction_bias",)

V2_VARIANTS = {
    "v2": Variant(tiny_v2(), "DeepSeek-V2 with fewer and smaller parts: 4 layers, 16 experts", reloaded=True),
    "lite": Variant(
        tiny_v2_lite(), "DeepSeek-V2-Lite: no latent of queries, 8 experts, no groups", reloaded=True
    ),
    "lite_plain_rope": Variant(tiny_v2_lite(rope_scaling=None), "lite, its rotary embedding not scaled"),
    "v2_odd_vocab": Variant(
        tiny_v2(vocab_size=151), "151 vocabulary rows, which tensor parallelism cannot divide"
    ),
    "v2_fused_experts": Variant(
        tiny_v2(),
        "the experts of a layer in one tensor, as transformers 5 holds them",
        fused_experts=True,
        reloaded=True,
    ),
    "lite_sharded": Variant(tiny_v2_lite(), "three safetensors files and an index", shards=3),
}
V3_VARIANTS = {
    "default": Variant(
        tiny_v3(),
        "in the published layout, with fewer and smaller parts: 16 experts, one MTP layer",
        fp32=BIAS,
        reloaded=True,
    ),
    "no_mtp": Variant(tiny_v3(num_nextn_predict_layers=0), "without the MTP layer", mtp=False, fp32=BIAS),
    "bf16_bias": Variant(tiny_v3(), "the router's bias in bfloat16, as some tools save it"),
    "plain_rope": Variant(tiny_v3(rope_scaling=None), "the rotary embedding not scaled", fp32=BIAS),
    "mscales": Variant(
        tiny_v3(rope_scaling=V3["rope_scaling"] | {"mscale": 0.8, "mscale_all_dim": 0.5}),
        "yarn that scales rotated rows, not only the softmax",
        fp32=BIAS,
    ),
    "no_groups": Variant(tiny_v3(n_group=1, topk_group=1), "experts without groups, like Kimi-K2", fp32=BIAS),
    "moonlight": Variant(
        tiny_v3(
            q_lora_rank=None,
            rms_norm_eps=1e-5,
            n_group=1,
            topk_group=1,
            rope_scaling=None,
            num_nextn_predict_layers=0,
            pad_token_id=79,  # which verify's sequences have
        ),
        "as Moonlight: no latent of queries, a norm epsilon of its own for the latents, a padding token",
        mtp=False,
        fp32=BIAS,
        reloaded=True,
    ),
    "three_of_groups": Variant(
        tiny_v3(num_experts_per_tok=3, num_nextn_predict_layers=0),
        "3 experts of 2 groups, whose scores Megatron would add up otherwise",
        mtp=False,
        fp32=BIAS,
    ),
    "odd_vocab": Variant(
        tiny_v3(vocab_size=151), "151 vocabulary rows, which tensor parallelism cannot divide", fp32=BIAS
    ),
    "fused_experts": Variant(
        tiny_v3(),
        "the experts of a layer in one tensor, as transformers 5 holds them",
        fused_experts=True,
        fp32=BIAS,
    ),
}

V32_VARIANTS = {
    "v32": Variant(
        tiny_v32(num_nextn_predict_layers=0),
        "DeepSeek-V3 with an indexer, without the MTP layer",
        mtp=False,
        fp32=BIAS,
        reloaded=True,
    ),
}

TINY = Tiny(V3_VARIANTS | V2_VARIANTS | V32_VARIANTS, tensors, VALUES, COPIES)
