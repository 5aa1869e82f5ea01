"""Qwen3-Next's multi-token prediction block in Hugging Face's own parts, for `isthmus verify`.

transformers ignores the `mtp.*` tensors, so this puts them together: the decoder layer, the norms and the
linear are HF's. Nothing here knows the weight map, or it would prove nothing about it.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.checkpoint.reader import CheckpointReader
from isthmus.testing.tiny import stacked_experts
from isthmus_qwen3_next.classes import CLASSES, Classes


def multi_token_prediction(hf: Any, reader: CheckpointReader, classes: Classes = CLASSES) -> nn.Module:
    """The checkpoint's block, in the dtype of the model `hf`. ValueError: tensors are missing or unknown."""
    dense = not any(".mlp.experts." in name for name in reader.tensors if name.startswith("mtp."))
    block = MultiTokenPrediction(hf.config.get_text_config(), dense, classes)
    tensors = stacked_experts(
        {name: reader.slice(name) for name in reader.tensors if name.startswith("mtp.")}
    )
    expected = block.state_dict()
    if tensors.keys() != expected.keys():
        raise ValueError(
            f"the prediction block of {reader.folder} lacks {sorted(expected.keys() - tensors.keys())} and"
            f" has {sorted(tensors.keys() - expected.keys())} that Hugging Face's layer does not"
        )
    block.load_state_dict(tensors)
    return block.to(hf.dtype)


class MultiTokenPrediction(nn.Module):
    """The `mtp.*` tensors of a checkpoint under their own names, and what they compute.

    Assumed, as vLLM and SGLang run the released model and as Megatron trains it: the input is the model's
    output *after* its final norm; `fc` takes the embedding first, the hidden state second; the layer is full
    attention; and a token keeps its position, though it is joined with the next token's embedding.
    """

    def __init__(self, config: Any, dense: bool, classes: Classes) -> None:
        super().__init__()
        config = copy.deepcopy(config)
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        config.mlp_only_layers, config.decoder_sparse_step = [0] if dense else [], 1
        size, eps = config.hidden_size, config.rms_norm_eps
        self.mtp = nn.Module()
        self.mtp.fc = nn.Linear(2 * size, size, bias=False)
        self.mtp.pre_fc_norm_embedding = classes.norm(size, eps=eps)
        self.mtp.pre_fc_norm_hidden = classes.norm(size, eps=eps)
        self.mtp.layers = nn.ModuleList([classes.layer(config, layer_idx=0)])
        self.mtp.norm = classes.norm(size, eps=eps)

    def forward(self, hf: Any, next_ids: Tensor, hidden: Tensor, positions: Tensor | None = None) -> Tensor:
        """(b, s, h) for the head, from the next tokens (b, s) and its final hidden states (b, s, h).

        `positions` are what the model's rotary embedding takes, where these do not count tokens.
        """
        mtp: Any = self.mtp
        decoder = hf.get_decoder()
        embedding = mtp.pre_fc_norm_embedding(decoder.embed_tokens(next_ids))
        joined = mtp.fc(torch.cat([embedding, mtp.pre_fc_norm_hidden(hidden)], dim=-1))
        length = joined.size(1)
        counted = torch.arange(length, device=joined.device)[None]
        ahead = torch.ones(length, length, dtype=torch.bool, device=joined.device).triu(1)
        mask = joined.new_zeros(length, length).masked_fill(ahead, torch.finfo(joined.dtype).min)
        output = mtp.layers[0](
            joined,
            position_embeddings=decoder.rotary_emb(joined, counted if positions is None else positions),
            attention_mask=mask[None, None],
            position_ids=counted,
        )
        return mtp.norm(output)
