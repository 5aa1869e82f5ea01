"""Qwen3.5's config.json in Megatron's fields: the arithmetic of the language model, and nothing else."""

from collections.abc import Mapping
from typing import Any

from isthmus.config import HFConfig
from isthmus.decoder import decoder_config, rope, rope_fields, tied_head
from isthmus_qwen3_5.names import has_experts, has_vision, text_config
from isthmus_qwen3_5.vision_fields import vision_fields
from isthmus_qwen3_next.config import check_silu, delta_net_fields, moe_fields, mtp_layers, without_mtp

# `mamba_ssm_dtype` is what the releases keep A_log in: the files themselves say it, tensor by tensor.
# `pad_token_id` counts in the language model's section alone, where it is read.
INERT = frozenset({"mamba_ssm_dtype", "output_router_logits", "pad_token_id"})
# What each stated value must be: Hugging Face's model has no other.
FIXED = {"attn_output_gate": True, "mtp_use_dedicated_embeddings": False}


def megatron_config(hf: HFConfig, keys: frozenset[str]) -> dict[str, Any]:
    """Fields of GPTModelConfig and TransformerConfig that compute what Hugging Face's Qwen3.5 does on text.

    Args:
        keys: tensor names of the checkpoint; empty where only the config is known.

    Raises:
        ValueError: the config contradicts itself or the checkpoint, has keys nobody understands, or asks for
            arithmetic that Megatron does not have.
    """
    text = text_config(hf)
    experts = has_experts(hf)
    head_dim = text["head_dim"]
    fields = decoder_config(
        text,
        position_fields=_rope(text, head_dim),
        ffn_hidden_size=text["moe_intermediate_size"] if experts else None,
    )
    layers = fields["num_layers"]
    sparse = [int(experts)] * layers
    check_silu(text)
    for key, value in FIXED.items():
        if (stated := text.get(key, value)) != value:
            raise ValueError(f"config.json: {key}={stated!r}, expected {value!r}: no Qwen3.5 has another")
    fields |= {
        "share_embeddings_and_output_weights": tied_head(hf, text, keys),
        "layernorm_zero_centered_gamma": True,
        "qk_layernorm": True,
        "attention_output_gate": True,
        **delta_net_fields(text),
        "moe_layer_freq": sparse,
        **(moe_fields(text, renormalise=True) if experts else {}),
        "mtp_num_layers": mtp_layers(text, keys, sparse),
        "part": "text",
    }
    if has_vision(hf):
        fields |= {"part": "all", "vision": vision_fields(hf, text)}
    hf.check_all_understood(INERT)
    return fields


def overruled(hf: HFConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Fields in which the tensors of a checkpoint overrule its config.json."""
    return without_mtp(text_config(hf), shapes, "text_config." if has_vision(hf) else "")


def _rope(text: HFConfig, head_dim: int) -> dict[str, Any]:
    """Rotary fields. On text, time, height and width count alike: the sections then choose among equals."""
    found = rope(text)
    for key in ("mrope_section", "mrope_interleaved"):
        found.scaling.pop(key, None)
    return rope_fields(found, head_dim)
