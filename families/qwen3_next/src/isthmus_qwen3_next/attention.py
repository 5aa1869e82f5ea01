"""HF's gated attention, hosted: softmax attention under the same division as the delta net."""

from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from isthmus.hosting import attention
from isthmus.weights import Heads
from isthmus_qwen3_next import heads
from isthmus_qwen3_next.classes import CLASSES


class HostedAttention(attention.HostedAttention):
    """transformers' Qwen3NextAttention as a layer's self_attention; its input norm stays outside."""

    classes = CLASSES

    def heads(self, config: TransformerConfig) -> Heads:
        """Query heads with the key/value head they share."""
        return heads.attention(config)

    def build_hf_module(self, config: TransformerConfig) -> nn.Module:
        """HF's module for one full-attention layer of `config`."""
        return self.classes.attention(self._hf_config(config), layer_idx=0)

    def build_rotary(self, config: TransformerConfig) -> nn.Module:
        """HF's rotary embedding of part of each head."""
        return self.classes.rotary(self._hf_config(config))

    def _hf_config(self, config: TransformerConfig) -> Any:
        sizes: Any = {
            "head_dim": config.kv_channels,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_query_groups,
        }
        hf = self.classes.config(
            hidden_size=config.hidden_size,
            **sizes,
            attention_dropout=config.attention_dropout,
            rms_norm_eps=config.layernorm_epsilon,
            initializer_range=config.init_method_std,
            num_hidden_layers=1,
            layer_types=["full_attention"],
            rope_parameters=dict(self.rope),
        )
        hf._attn_implementation = self.implementation
        return hf
