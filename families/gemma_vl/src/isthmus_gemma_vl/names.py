"""Where a Gemma 3 checkpoint keeps its language model: config section, and prefix of the tensors."""

from isthmus.config import HFConfig
from isthmus.decoder import embedding_prefix

# Of a vision-language checkpoint and of a text one, as published.
WITH_VISION, TEXT_ONLY = "language_model.model.", "model."
# Names of the head, where the files have it.
HEADS = ("lm_head.weight", "language_model.lm_head.weight")


def text_config(hf: HFConfig) -> HFConfig:
    """The language model's fields: a section where there is a vision tower, the file itself elsewhere."""
    return hf.section("text_config") if has_vision(hf) else hf


def has_vision(hf: HFConfig) -> bool:
    """Whether the config describes a vision tower beside the language model."""
    return hf.model_type == "gemma3"


def prefix(hf: HFConfig, keys: frozenset[str]) -> str:
    """What stands before `embed_tokens.weight`: releases of transformers write several.

    ValueError: none, or two of them.
    """
    if keys:
        return embedding_prefix(keys)
    return WITH_VISION if has_vision(hf) else TEXT_ONLY
