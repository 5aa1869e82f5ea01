"""HF's latent attention, hosted, and how it divides by heads."""

from typing import Any, ClassVar

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from isthmus.hosting import attention
from isthmus.hosting.torch_functions import import_modeling
from isthmus.weights import Heads
from isthmus_deepseek.heads import latent_attention, sparse_attention

STEMS = {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3", "deepseek_v32": "DeepseekV32"}
"""What the names of a model_type's classes begin with, in transformers."""


class HostedAttention(attention.HostedAttention):
    """transformers' own attention of a DeepSeek as a layer's self_attention; its input norm stays outside."""

    index_sizes: ClassVar[dict[str, str]] = {}  # HF's name of what an indexer has -> Megatron's

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
            **{name: getattr(config, field) for name, field in self.index_sizes.items()},
        )
        hf._attn_implementation = self.implementation
        return hf


def architecture_of(config: Any) -> str:
    """The model_type whose modules compute what `config` describes: V2's router is a softmax."""
    if config.dsa_indexer_topk is not None:
        return "deepseek_v32"
    return "deepseek_v2" if config.moe_router_score_function == "softmax" else "deepseek_v3"


class HostedSparseAttention(HostedAttention):
    """DeepSeek-V3.2's: each token sees the keys that an indexer chooses, which every rank runs whole.

    The indexer is frozen: HF's gives no gradient, and its training has a loss that HF's model does not have.
    """

    index_sizes: ClassVar[dict[str, str]] = {
        "index_topk": "dsa_indexer_topk",
        "index_head_dim": "dsa_indexer_head_dim",
        "index_n_heads": "dsa_indexer_n_heads",
    }

    def heads(self, config: TransformerConfig) -> Heads:
        """Heads of queries, keys and values; what makes the latents, and the indexer, are whole."""
        return sparse_attention(config)

    def build_hf_module(self, config: TransformerConfig) -> nn.Module:
        """HF's module for one layer of `config`, its indexer frozen."""
        module: Any = super().build_hf_module(config)
        module.indexer.requires_grad_(False)
        return module

    def mask(self, hidden: Tensor) -> Tensor:
        """(b, 1, s, s): HF adds the indexer's choice to it, whatever the implementation."""
        batch, length = hidden.shape[:2]
        if self.implementation == "eager":
            return attention.additive_mask(hidden).expand(batch, 1, length, length)
        seen = torch.ones(length, length, dtype=torch.bool, device=hidden.device).tril()
        return seen.expand(batch, 1, length, length)


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
