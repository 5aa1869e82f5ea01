"""Vocabulary padding, kept out of the loss.

Megatron pads the embedding and the head so that their rows divide over tensor-parallel ranks, and its softmax
runs over the padding too: with zero rows, each adds exp(0) to the denominator. HF has no such rows. So that
both compute the same function, the logits of padding are set to the least number of their dtype: no weight,
no gradient.
"""

from typing import Any

import torch
from torch import nn


class MaskPadding:
    """A pre-wrap hook of Megatron's model configs: the head's logits are masked from row `rows` on."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __call__(self, chunks: list[nn.Module]) -> list[nn.Module]:
        for chunk in chunks:
            model: Any = chunk
            head = getattr(chunk, "output_layer", None)
            if head is not None and model.vocab_size > self.rows:
                head.register_forward_hook(_Mask(self.rows, model.vocab_size, model.pg_collection.tp))
        return chunks


class _Mask:
    """Forward hook of a ColumnParallelLinear over the vocabulary: (logits, bias) -> the same, masked."""

    def __init__(self, rows: int, padded: int, tp_group: Any) -> None:
        self.rows, self.padded, self.tp_group = rows, padded, tp_group

    def __call__(
        self, module: nn.Module, args: Any, output: tuple[torch.Tensor, Any]
    ) -> tuple[torch.Tensor, Any]:
        logits, bias = output
        width = logits.size(-1)
        start = 0 if width == self.padded else self.tp_group.rank() * width
        if start + width <= self.rows:
            return output
        token = torch.arange(start, start + width, device=logits.device)
        return logits.masked_fill(token >= self.rows, torch.finfo(logits.dtype).min), bias
