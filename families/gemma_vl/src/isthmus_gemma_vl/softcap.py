"""Logits capped as Hugging Face's Gemma 3 does: cap * tanh(logits / cap), in the dtype of the logits."""

from typing import Any

import torch
from torch import Tensor, nn


class SoftCap:
    """A pre-wrap hook of Megatron's model configs: the head's logits stay between `-cap` and `cap`."""

    def __init__(self, cap: float) -> None:
        self.cap = cap

    def __call__(self, chunks: list[nn.Module]) -> list[nn.Module]:
        for chunk in chunks:
            head = getattr(chunk, "output_layer", None)
            if head is not None:
                # Before any other: those of vocabulary padding, which others mask, are capped to no effect.
                head.register_forward_hook(self._capped, prepend=True)
        return chunks

    def _capped(self, module: nn.Module, args: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        logits, bias = output
        return torch.tanh(logits / self.cap) * self.cap, bias
