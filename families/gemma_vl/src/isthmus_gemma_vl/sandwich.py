"""Gemma 3's layers of Megatron's parts: a norm after attention and after the MLP, and a rope for each kind.

Megatron's TransformerLayer stays as it is: each of its two mixers gets the norm behind it, so that what the
layer adds to the residual is normed. On the way in, Megatron's own fused norms do it.
"""

from typing import Any

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, sharded_state_dict_default
from torch import Tensor


class Attention(SelfAttention):
    """Megatron's attention with a norm of its output, and in sliding layers with their own rope.

    Args:
        norm: class of the norm.
        rotary_base: of this layer's own embedding; None where it is the model's.
    """

    def __init__(self, *args: Any, norm: Any, rotary_base: float | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.post_layernorm = _norm(norm, self.config)
        self.rotary: Any = None
        if rotary_base is not None:
            channels: Any = self.config.kv_channels  # the config fills it in
            base: Any = rotary_base  # a float is one too
            self.rotary = RotaryEmbedding(
                channels,
                rotary_percent=1.0,
                rotary_base=base,
                cp_group=self.pg_collection.cp,
            )

    def forward(self, hidden_states: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
        """(s, b, h) -> the same, normed, and no bias; `rotary_pos_emb` is the model's."""
        if self.rotary is not None:
            kwargs["rotary_pos_emb"] = self._own(kwargs["rotary_pos_emb"], kwargs.get("packed_seq_params"))
        output, bias = super().forward(hidden_states, attention_mask, **kwargs)
        return self.post_layernorm(output), bias

    def _own(self, models: Any, packed: Any) -> Any:
        """This layer's angles for the positions that the model's are for."""
        is_packed = packed is not None and packed.qkv_format == "thd"
        group = packed.cp_group if packed is not None and packed.cp_group is not None else None
        length = (models[0] if isinstance(models, tuple) else models).size(0)
        if not is_packed:
            length *= (group or self.pg_collection.cp).size()  # the model's are this rank's part
        return self.rotary(length, packed_seq=is_packed, cp_group=group)


class FeedForward(MLP):
    """Megatron's MLP with a norm of its output. `norm` is the class of the norm."""

    def __init__(self, *args: Any, norm: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.post_layernorm = _norm(norm, self.config)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """(s, b, h) -> the same, normed, and no bias."""
        output, bias = super().forward(*args, **kwargs)
        return self.post_layernorm(output), bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Megatron's own, with tensor-parallel ranks told apart in the norm too, of which each has a copy."""
        states = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        tp_group: Any = self.tp_group
        return states | sharded_state_dict_default(
            self.post_layernorm, f"{prefix}post_layernorm.", sharded_offsets, metadata, tp_group
        )


def _norm(norm: Any, config: Any) -> Any:
    return norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
