"""Where a Gemma 3 checkpoint keeps its parts: sections of the config, and prefixes of the tensors."""

from isthmus.config import HFConfig
from isthmus.decoder import embedding_prefix

# Of a vision-language checkpoint and of a text one, as published.
WITH_VISION, TEXT_ONLY = "language_model.model.", "model."
# Names of the head, where the files have it.
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
# Of the vision tower and of what projects its features.
VISION = ("vision_tower", "multi_modal_projector")


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


def image_token(hf: HFConfig) -> int:
    """The placeholder of an image's features."""
    token = hf.either("image_token_index", "image_token_id")
    return hf["image_token_index"] if token is None else token


def vision_prefixes(keys: frozenset[str]) -> tuple[str, str]:
    """What stands before `embeddings.*` and `encoder.*`, and before the projector's tensors: as published
    where there are none."""
    tower = _before("embeddings.patch_embedding.weight", keys) or "vision_tower.vision_model."
    return tower, _before("mm_input_projection_weight", keys) or "multi_modal_projector."


def _before(ending: str, keys: frozenset[str]) -> str | None:
    return next((key.removesuffix(ending) for key in sorted(keys) if key.endswith(f".{ending}")), None)
