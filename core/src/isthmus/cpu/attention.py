"""Core attention in Transformer Engine's slot: one mask made from token positions serves every combination.

Causal or not, packed or not, grouped queries, MLA's head sizes, sliding windows, biases, softmax sinks and
context parallelism (keys and values are gathered and put in natural order; the backward scatters the sum).
fp32 inside.
"""

import contextlib
import math
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import divide

from isthmus.cpu.positions import Tokens, one_sequence, packed

CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)
MASK_IGNORED = (AttnMaskType.causal, AttnMaskType.causal_bottom_right, AttnMaskType.no_mask)  # as TE does


class DotProductAttention(MegatronModule):
    """In TEDotProductAttention's slot; `softmax_offset` is a parameter if softmax_type is learnable."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config=config)
        if config.qk_clip or config.log_max_attention_logit:
            raise ValueError(
                "qk_clip and log_max_attention_logit need Transformer Engine: turn them off on the CPU"
            )
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.attn_mask_type, self.cp_group, self._tp_group = attn_mask_type, groups.cp, groups.tp
        channels: Any = k_channels or config.kv_channels  # the config fills it in
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(channels)
        every: Any = (
            config.window_attn_skip_freq
        )  # None, which Megatron's function takes, is not in its types
        windowed = is_layer_window_attention(config.window_size, every, layer_number)
        self.window: Any = config.window_size if windowed else None
        self.dropout = torch.nn.Dropout(
            config.attention_dropout if attention_dropout is None else attention_dropout
        )
        self.softmax_offset = self._sinks(divide(config.num_attention_heads, self._tp_group.size()))

    def _sinks(self, heads: int) -> torch.Tensor | None:
        """The logit (heads,) of a key that takes probability and gives nothing, or None."""
        device: Any = torch.cuda.current_device()
        if self.config.softmax_type == "vanilla":
            return None
        if self.config.softmax_type == "off-by-one":
            return torch.zeros(heads, device=device)
        offset: Any = torch.nn.Parameter(torch.zeros(heads, dtype=self.config.params_dtype, device=device))
        offset.tensor_model_parallel, offset.partition_dim = True, 0
        return offset

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        num_splits: int | None = None,
    ) -> torch.Tensor:
        """(S, B, heads, D), or packed (T, heads, D) -> (S, B, heads * D), or (T, heads * D).

        Raises:
            ValueError: an explicit mask comes with context parallelism.
        """
        kind = attn_mask_type or self.attn_mask_type
        is_packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        if is_packed:
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        group, cp_size = self._context_parallel(packed_seq_params)
        tokens = _tokens(key.size(0), cp_size, packed_seq_params if is_packed else None)
        if cp_size > 1:
            natural = torch.argsort(torch.cat(tokens.order))
            key, value = (
                gather_from_sequence_parallel_region(t.contiguous(), group=group)[natural]
                for t in (key, value)
            )
            rows = tokens.order[group.rank()]
        else:
            rows = (
                torch.arange(query.size(0)) + key.size(0) - query.size(0)
            )  # with a key cache, the last ones
        allowed = self._allowed(tokens, rows, kind)[None, None]
        if attention_mask is not None and not is_packed and kind not in MASK_IGNORED:
            if cp_size > 1:
                raise ValueError(
                    f"an attention mask does not work with context_parallel_size={cp_size} on the CPU: "
                    "use a causal mask or packed sequences"
                )
            allowed = allowed & ~attention_mask
        # A row that may see nothing (padding) sees itself: finite, and without influence on any other.
        blind = ~allowed.any(-1, keepdim=True)
        itself = rows[:, None] == torch.arange(key.size(0))[None]
        out = self._attend(query, key, value, allowed | (blind & itself), attention_bias)
        return out.squeeze(1) if is_packed else out

    def _context_parallel(self, packed_seq_params: PackedSeqParams | None) -> tuple[Any, int]:
        """The group that holds the sequence and its size; packed batches may bring their own or none."""
        if packed_seq_params is not None:
            if packed_seq_params.cp_group is not None:
                return packed_seq_params.cp_group, packed_seq_params.cp_group.size()
            if packed_seq_params.local_cp_size == 1:
                return None, 1
        return self.cp_group, self.cp_group.size()

    def _allowed(self, tokens: Tokens, rows: torch.Tensor, kind: AttnMaskType) -> torch.Tensor:
        """(rows, T) True where a query may see a key."""
        allowed = (tokens.sequence[rows][:, None] == tokens.sequence[None]) & tokens.valid[None]
        distance = tokens.position[rows][:, None] - tokens.position[None]
        if kind in CAUSAL:
            allowed &= distance >= 0
        before, after = self.window or (-1, -1)
        if before >= 0:
            allowed &= distance <= before
        if after >= 0:
            allowed &= -distance <= after
        return allowed

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        allowed: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Softmax attention in fp32, rounded once: (S, B, heads, D) -> (S, B, heads * D)."""
        q, k, v = (t.permute(1, 2, 0, 3).float() for t in (query, key, value))
        if k.size(1) != q.size(1):
            k, v = (t.repeat_interleave(q.size(1) // t.size(1), 1) for t in (k, v))
        scores = (q @ k.transpose(-1, -2)) * self.softmax_scale
        if bias is not None:
            scores = scores + bias
        scores = scores.masked_fill(~allowed, -torch.inf)
        if self.softmax_offset is not None:
            sink = self.softmax_offset.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            probabilities = torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]
        else:
            probabilities = torch.softmax(scores, -1)
        if self.dropout.p and self.training:
            # Heads differ between tensor-parallel ranks, and so must what is dropped.
            tracker: Any = get_cuda_rng_tracker()
            with contextlib.nullcontext() if self.config.sequence_parallel else tracker.fork():
                probabilities = self.dropout(probabilities)
        out = (probabilities @ v).permute(2, 0, 1, 3).flatten(2)
        return out.to(query.dtype)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> dict:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self._tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )


def _tokens(local: int, cp_size: int, params: PackedSeqParams | None) -> Tokens:
    """Where each token of a batch stands, from the number of keys on this rank."""
    if params is None:
        return one_sequence(local * cp_size, cp_size)
    real: Any = params.cu_seqlens_q
    padded: Any = real if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
    return packed(padded.tolist(), real.tolist(), local * cp_size, cp_size)
