"""The padding token's embedding, which Hugging Face's models do not train: nn.Embedding's `padding_idx`.

It counts as given where it is looked up; a head that is tied to it trains it all the same.
"""

from typing import Any

import torch
from torch import Tensor, nn

PAD = "isthmus_pad"  # what the arguments in a Megatron checkpoint call the token, which none of theirs tells


class FreezePadding:
    """A pre-wrap hook of Megatron's model configs: looking up token `pad` gives no gradient; -1 is none."""

    def __init__(self, pad: int) -> None:
        self.pad = pad

    def __call__(self, chunks: list[nn.Module]) -> list[nn.Module]:
        for chunk in chunks:
            embedding = getattr(chunk, "embedding", None)
            if embedding is not None and self.pad >= 0:
                embedding.word_embeddings.register_forward_hook(_Detach(self.pad))
        return chunks


class _Detach:
    """Forward hook of a VocabParallelEmbedding: ids (b, s) -> (b, s, h), under SP the rank's (s, b, h)."""

    def __init__(self, pad: int) -> None:
        self.pad = pad

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        words: Any = module
        padding = args[0] == self.pad
        if words.reduce_scatter_embeddings:
            # The result is laid out as the condition, and pipelines send contiguous tensors only.
            padding = padding.T.contiguous().chunk(words.tp_group.size())[words.tp_group.rank()]
        return torch.where(padding[..., None], output.detach(), output)
