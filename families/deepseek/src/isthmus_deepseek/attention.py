"""HF's latent attention, hosted, and how it divides by heads."""

from typing import Any

from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from isthmus.hosting import attention
from isthmus.hosting.torch_functions import import_modeling
from isthmus.weights import Heads
from isthmus_deepseek.heads import latent_attention

STEMS = {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3"}
"""What the names of a model_type's classes begin with, in transformers."""


class HostedAttention(attention.HostedAttention):
    """transformers' own attention of a DeepSeek as a layer's self_attention; its input norm stays outside."""

    def heads(self, config: TransformerConfig) -> Heads:
        """Heads of queries, keys and values; what makes the latents is whole."""
        return latent_attention(config)

    def build_hf_module(self, config: TransformerConfig) -> nn.Module:
        """HF's module for one layer of `config`."""
        return self._hf_class("Attention")(self._hf_config(config), layer_idx=0)

    def build_rotary(self, config: TransformerConfig) -> nn.Module:
        """HF's rotary embedding of the rotated part of each head."""
        return self._hf_class("RotaryEmbedding")(self._hf_config(config))

    def _hf_class(self, name: str) -> Any:
        architecture = architecture_of(self.config)
        modeling = import_modeling(f"transformers.models.{architecture}.modeling_{architecture}")
        return getattr(modeling, STEMS[architecture] + name)

    def _hf_config(self, config: Any) -> Any:
        """HF's config of the attention alone, of the heads that `config` has."""
        hf = self._hf_class("Config")(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_attention_heads,
            q_lora_rank=config.q_lora_rank,
            kv_lora_rank=config.kv_lora_rank,
            qk_nope_head_dim=config.qk_head_dim,
            qk_rope_head_dim=config.qk_pos_emb_head_dim,
            v_head_dim=config.v_head_dim,
            attention_dropout=config.attention_dropout,
            initializer_range=config.init_method_std,
            num_hidden_layers=1,
            rope_parameters=_rope_parameters(config),
        )
        hf._attn_implementation = self.implementation
        return hf


def architecture_of(config: Any) -> str:
    """The model_type whose modules compute what `config` describes: V2's router is a softmax."""
    return "deepseek_v2" if config.moe_router_score_function == "softmax" else "deepseek_v3"


def _rope_parameters(config: Any) -> dict[str, Any]:
    """HF's parameters of the rotary embedding that Megatron's fields describe."""
    if config.rope_type == "rope":
        return {"rope_type": "default", "rope_theta": config.rotary_base}
    factor, every = config.rotary_scaling_factor, config.mscale_all_dim
    return {
        "rope_type": "yarn",
        "rope_theta": config.rotary_base,
        "factor": factor,
        "original_max_position_embeddings": config.original_max_position_embeddings,
        "beta_fast": config.beta_fast,
        "beta_slow": config.beta_slow,
        "mscale_all_dim": every,
        "attention_factor": _yarn_get_concentration_factor(factor, config.mscale, every),
    }
