"""HF's softmax attention as a layer's self_attention: rotary embedding and causal mask are made here."""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from isthmus.hosting.module import HostedModule

IMPLEMENTATIONS = ("sdpa", "eager")


class HostedAttention(HostedModule):
    """Base class for HF's attentions: causal, from position 0 of each sequence on.

    A subclass gives `build_hf_module`, `build_rotary` and, to divide the work, `heads`. The HF module is
    called as ``module(hidden, position_embeddings=(cos, sin), attention_mask=...)``.

    Attributes:
        rope: HF's `rope_parameters`, of the model config.
        implementation: for `_attn_implementation` of the HF config.
    """

    hosted_name = "self_attn"

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        rotary_base: float,
        rotary_percent: float = 1.0,
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
            self._rotary = (self.build_rotary(config),)

    def build_rotary(self, config: TransformerConfig) -> nn.Module:
        """HF's rotary embedding, called as ``rotary(hidden, positions) -> (cos, sin)``."""
        raise NotImplementedError(f"{type(self).__name__} must define build_rotary(config)")

    def run(self, hf_module: Any, hidden: Tensor, **megatron: Any) -> Tensor:
        """Causal attention (b, s, h) -> (b, s, h); what Megatron passes is not used, its mask neither."""
        positions = torch.arange(hidden.size(1), device=hidden.device)[None]
        rotary = self._rotary[0].to(hidden.device)
        output, _ = hf_module(
            hidden, position_embeddings=rotary(hidden, positions), attention_mask=self.mask(hidden)
        )
        return output

    def mask(self, hidden: Tensor) -> Tensor | None:
        """The HF module's `attention_mask`: of what is ahead, where its implementation does not know."""
        if self.implementation == "sdpa":
            return None  # it masks by the module's is_causal
        return additive_mask(hidden)


def additive_mask(hidden: Tensor) -> Tensor:
    """(s, s) of hidden states (b, s, h): 0 where a token may look, the dtype's lowest number ahead of it."""
    length = hidden.size(1)
    ahead = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)
    return hidden.new_zeros(length, length).masked_fill(ahead, torch.finfo(hidden.dtype).min)
