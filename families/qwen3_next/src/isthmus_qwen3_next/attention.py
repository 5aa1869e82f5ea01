"""HF's gated attention, hosted: softmax attention under the same division as the delta net."""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from isthmus.hosting.module import HostedModule
from isthmus.weights import Heads
from isthmus_qwen3_next import heads
from isthmus_qwen3_next.classes import CLASSES

IMPLEMENTATIONS = ("sdpa", "eager")


class HostedAttention(HostedModule):
    """transformers' Qwen3NextAttention as a layer's self_attention; its input norm stays outside.

    Causal, from position 0 of each sequence on; rotary embeddings are HF's, of those positions.
    """

    classes = CLASSES
    hosted_name = "self_attn"

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        rotary_base: float,
        rotary_percent: float,
        implementation: str = "sdpa",
        **kwargs: Any,
    ):
        """See HostedModule.

        Args:
            rotary_base, rotary_percent: of the model config; the TransformerConfig lacks them.
            implementation: HF's attention function, "sdpa" or "eager".
        """
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(f"implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}")
        self.implementation = implementation
        self.rope = {
            "rope_type": "default",
            "rope_theta": rotary_base,
            "partial_rotary_factor": rotary_percent,
        }
        super().__init__(config, *args, **kwargs)
        # Not a submodule: its frequencies are no weights, and stay float32 in a bf16 model.
        with torch.device("cpu"):
            self._rotary = (self.classes.rotary(self._hf_config(config)),)

    def heads(self, config: TransformerConfig) -> Heads:
        """Query heads with the key/value head they share."""
        return heads.attention(config)

    def build_hf_module(self, config: TransformerConfig) -> nn.Module:
        """HF's module for one full-attention layer of `config`."""
        return self.classes.attention(self._hf_config(config), layer_idx=0)

    def run(self, hf_module: Any, hidden: Tensor, **megatron: Any) -> Tensor:
        """Causal attention (b, s, h) -> (b, s, h). ValueError: Megatron passed a mask, which is not used."""
        length = hidden.size(1)
        positions = torch.arange(length, device=hidden.device)[None]
        mask = None  # sdpa then masks what is ahead, by the module's is_causal
        if self.implementation == "eager":
            ahead = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)
            mask = hidden.new_zeros(length, length).masked_fill(ahead, torch.finfo(hidden.dtype).min)
        rotary = self._rotary[0].to(hidden.device)
        output, _ = hf_module(hidden, position_embeddings=rotary(hidden, positions), attention_mask=mask)
        return output

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
