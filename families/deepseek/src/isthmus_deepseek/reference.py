"""DeepSeek-V3's prediction layer in transformers' own MTP model, for `isthmus verify`.

transformers keeps it apart from the model. Nothing here knows the weight map, or it would prove nothing about
it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import MtpModel

from isthmus.checkpoint.reader import CheckpointReader
from isthmus.testing.tiny import stacked_experts

SHARED = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the model's embedding and head, which transformers takes from the model."""


def multi_token_prediction(hf: Any, reader: CheckpointReader) -> nn.Module:
    """The checkpoint's layer, in the dtype of the model `hf`. ValueError: tensors are missing or unknown."""
    block = MultiTokenPrediction(hf)
    stem = f"model.layers.{block.number}."
    names = [name for name in reader.tensors if name.startswith(stem) and not name.endswith(SHARED)]
    tensors = stacked_experts({name: reader.slice(name) for name in names})
    expected = block.state_dict()
    if tensors.keys() != expected.keys():
        raise ValueError(
            f"the prediction layer of {reader.folder} lacks {sorted(expected.keys() - tensors.keys())} and"
            f" has {sorted(tensors.keys() - expected.keys())} that Hugging Face's does not"
        )
    block.load_state_dict(tensors)
    return block.to(hf.dtype)


class MultiTokenPrediction(nn.Module):
    """transformers' MTP model, its tensors by their names in a checkpoint.

    As transformers runs it, and Megatron trains it: the input is the model's output *after* its final norm,
    the embedding comes first in what `eh_proj` takes, and the embedding and the head are the model's.
    """

    def __init__(self, hf: Any) -> None:
        super().__init__()
        self.number = hf.config.num_hidden_layers
        self._mtp = (MtpModel(hf, 1),)  # not a submodule: it holds the model's embedding and head
        inner: Any = self._mtp[0].layers[0]
        layer = nn.Module()
        layer.enorm, layer.hnorm, layer.eh_proj = inner.enorm, inner.hnorm, inner.eh_proj
        for name, part in inner.mtp_block.named_children():
            setattr(layer, name, part)
        layer.shared_head = nn.Module()
        layer.shared_head.norm = inner.post_norm
        self.model = nn.Module()
        self.model.layers = nn.ModuleDict({str(self.number): layer})

    def forward(self, hf: Any, next_ids: Tensor, hidden: Tensor) -> Tensor:
        """(b, s, h) for the head, from the next tokens (b, s) and the model's hidden states (b, s, h)."""
        positions = torch.arange(next_ids.size(1), device=next_ids.device)[None]
        return self._mtp[0].forward_layer(0, hidden, positions, None, input_ids=next_ids)
