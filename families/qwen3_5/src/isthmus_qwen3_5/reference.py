"""Qwen3.5's multi-token prediction block in Hugging Face's own parts, for `isthmus verify`."""

from typing import Any

from torch import nn

from isthmus.checkpoint.reader import CheckpointReader
from isthmus_qwen3_5.blocks import DENSE, MOE
from isthmus_qwen3_5.names import has_experts
from isthmus_qwen3_next import reference


def multi_token_prediction(hf: Any, reader: CheckpointReader) -> nn.Module:
    """The checkpoint's block, in the dtype of the model `hf`. ValueError: tensors are missing or unknown."""
    return reference.multi_token_prediction(hf, reader, MOE if has_experts(hf.config) else DENSE)
