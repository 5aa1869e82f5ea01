"""Core attention of a model with images: Megatron's own on text, torch's under the mask that images need.

Transformer Engine has arbitrary masks in its unfused attention only, and Megatron's own puts a layer's
window, in which no token sees ahead, in a mask's place. torch's attention is exact under any mask, with
memory-efficient kernels on a GPU, alike for each of Megatron's implementations.
"""

from functools import lru_cache
from typing import Any

from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from isthmus_gemma_vl.masks import windowed


@lru_cache
def with_masks(core: Any) -> Any:
    """A subclass of Megatron's core attention `core` that takes explicit masks."""
    return type(f"Masked{core.__name__}", (_Masked, core), {})


class _Masked:
    """To be mixed into a core attention, before it."""

    def __init__(self, *, config: Any, layer_number: int, softmax_scale: float, **kwargs: Any) -> None:
        super().__init__(config=config, layer_number=layer_number, softmax_scale=softmax_scale, **kwargs)  # pyright: ignore[reportCallIssue]
        slides = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.before = config.window_size[0] if slides else None
        self.scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> Tensor:
        """(s, b, heads, d), or packed (t, heads, d) -> (s, b, heads * d), or (t, heads * d).

        `attention_mask` is (b, 1, s, s), True where a query may not see a key, before this layer's window.
        None: causal, by Megatron's own attention.
        """
        if attention_mask is None:
            parent: Any = super()
            return parent.forward(query, key, value, attention_mask, **kwargs)
        packed = query.dim() == 3
        if packed:
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        # torch's memory-efficient kernels know no grouped queries.
        k, v = (tensor.repeat_interleave(q.size(1) // tensor.size(1), 1) for tensor in (k, v))
        mask = attention_mask if self.before is None else windowed(attention_mask, self.before)
        output = scaled_dot_product_attention(q, k, v, attn_mask=~mask, scale=self.scale)
        output = output.permute(2, 0, 1, 3).flatten(2)
        return output.squeeze(1) if packed else output
