"""Where a Qwen3.5 checkpoint keeps its language model: config section, and prefix of the tensors."""

from typing import Any

from isthmus.config import HFConfig
from isthmus.decoder import embedding_prefix

# Of a vision-language checkpoint and of a text one, as published.
WITH_VISION, TEXT_ONLY = "model.language_model.", "model."
# What checkpoints call the vision tower; the first as published.
VISION = ("model.visual", "visual")


def text_config(hf: HFConfig) -> HFConfig:
    """The language model's fields: a section where there is a vision tower, the file itself elsewhere."""
    return hf.section("text_config") if has_vision(hf) else hf


def has_vision(hf: HFConfig) -> bool:
    """Whether the config describes a vision tower beside the language model."""
    return "text_config" in hf


def has_experts(hf: Any) -> bool:
    """Whether the layers have experts, by the `model_type` of a config of either side."""
    return "moe" in hf.model_type


def prefix(hf: HFConfig, keys: frozenset[str]) -> str:
    """What stands before `embed_tokens.weight`: tools write several. ValueError: none, or two of them."""
    if keys:
        return embedding_prefix(keys)
    return WITH_VISION if has_vision(hf) else TEXT_ONLY
