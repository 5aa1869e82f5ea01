"""How many tokens a Gemma 3 has: the embedding says, and config.json may not agree."""

from collections.abc import Mapping
from typing import Any

from isthmus.config import HFConfig
from isthmus_gemma_vl.names import has_vision, prefix, text_config


def overruled(hf: HFConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """`vocab_size` by the embedding's rows, where config.json says another.

    Language models have 262144 rows, those of vision-language releases 64 more, and tools that make one of
    the other, or add tokens, leave the config as it was: a text config that is silent is read as 262208.
    """
    rows = shapes[f"{prefix(hf, frozenset(shapes))}embed_tokens.weight"][0]
    if rows == text_config(hf)["vocab_size"]:
        return {}
    return {"text_config.vocab_size" if has_vision(hf) else "vocab_size": rows}
