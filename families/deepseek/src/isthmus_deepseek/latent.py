"""Latent attention and its rotary embedding, from config.json to the fields of an MLATransformerConfig."""

import math
from typing import Any

from isthmus.config import HFConfig
from isthmus.decoder import Rope, rope

LATENT_NORM_EPS = 1e-6
"""Of the norms of the latents: Hugging Face's modules have it, whatever `rms_norm_eps` is."""

_YARN = {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"} | {
    *("mscale", "mscale_all_dim", "attention_factor", "truncate"),
}


def latent_attention(hf: HFConfig) -> dict[str, Any]:
    """Megatron's fields for the attention.

    HF stores the rotated rows of queries and keys in pairs; Megatron's module takes them so.

    Raises:
        ValueError: heads share keys and values, or the rotary embedding is none that Megatron's module has.
    """
    heads, groups = hf["num_attention_heads"], hf["num_key_value_heads"]
    if groups != heads:
        raise ValueError(
            f"config.json: num_key_value_heads={groups}, num_attention_heads={heads}: every head of latent"
            " attention has keys and values of its own, so that both are the same"
        )
    if hf.get("rope_interleave", True) is not True:
        raise ValueError(
            "config.json: rope_interleave=False is not supported: Megatron's latent attention takes rotated"
            " rows in pairs, as the released checkpoints have them"
        )
    return {
        "multi_latent_attention": True,
        "q_lora_rank": hf["q_lora_rank"],
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
        "kv_channels": hf["v_head_dim"],
        "qk_layernorm": True,
        "rotary_interleaved": False,  # of Megatron's other attention
        "apply_rope_fusion": False,
    }


def rotary(hf: HFConfig) -> dict[str, Any]:
    """Megatron's fields for the rotary embedding, unscaled or yarn. ValueError: it is another."""
    found = rope(hf)
    if found.partial != 1:
        raise ValueError(
            f"config.json: partial_rotary_factor={found.partial} has no meaning in latent attention, where"
            " qk_rope_head_dim says what is rotated. Remove it"
        )
    theta = int(found.theta) if float(found.theta).is_integer() else found.theta
    fields = {"position_embedding_type": "rope", "rotary_base": theta, "rotary_percent": 1.0}
    if found.kind == "default" and not found.scaling:
        unscaled = {"rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
        return {**fields, "rope_type": "rope", **unscaled}
    if found.kind != "yarn":
        raise ValueError(
            f"config.json: rope_type {found.kind!r} with {found.scaling} is not supported, only 'default' and"
            " 'yarn'"
        )
    return {**fields, "rope_type": "yarn", **_yarn(hf, found)}


def _yarn(hf: HFConfig, found: Rope) -> dict[str, Any]:
    """HF's yarn in Megatron's fields, where two numbers decide two factors.

    With `g(m) = 0.1 m ln(factor) + 1`: HF multiplies cosine and sine by g(mscale) / g(mscale_all_dim), or by
    g(1) unless both are given, or by `attention_factor`; and the softmax scale by g(mscale_all_dim)^2, where
    that is given. Megatron always has g(mscale) / g(mscale_all_dim) and g(mscale_all_dim)^2, and g(0) is 1.
    """
    scaling = {name: value for name, value in found.scaling.items() if value is not None}
    if unknown := sorted(scaling.keys() - _YARN):
        raise ValueError(
            f"config.json: yarn's {', '.join(unknown)} is not understood (known: {sorted(_YARN)})"
        )
    if not scaling.get("truncate", True):
        raise ValueError(
            "config.json: yarn with truncate=False is not supported: Megatron's latent attention rounds the"
            " range that is interpolated to whole dims"
        )
    if "original_max_position_embeddings" not in scaling:
        raise ValueError(
            "config.json: yarn without original_max_position_embeddings. Add the value used in training"
        )
    original = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or hf["max_position_embeddings"] / original
    log = math.log(factor) / 10 if factor > 1 else 0.0
    every = scaling.get("mscale_all_dim") or 0.0
    mscale = scaling.get("mscale") or 1.0
    both = bool(scaling.get("mscale") and every)
    if "attention_factor" in scaling or not both:
        wanted = scaling.get("attention_factor", log + 1)
        if not log and wanted != 1:
            raise ValueError(
                f"config.json: yarn's attention_factor={wanted} with factor={factor}: Megatron's latent"
                " attention has none where nothing is scaled"
            )
        mscale = (wanted * (log * every + 1) - 1) / log if log else 1.0
    return {
        "rotary_scaling_factor": float(factor),
        "original_max_position_embeddings": original,
        "beta_fast": float(scaling.get("beta_fast") or 32),
        "beta_slow": float(scaling.get("beta_slow") or 1),
        "mscale": float(mscale),
        "mscale_all_dim": float(every),
    }
