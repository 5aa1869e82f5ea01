"""What a layout must divide in DeepSeek, beyond what every Megatron model has."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from isthmus.layout import Layout
from isthmus.weights import Heads
from isthmus_deepseek.heads import latent_attention


def hosted(config: Any) -> Heads | None:
    """How the attention divides where it is Hugging Face's; `config` is anything with the config's fields."""
    chosen = getattr(config, "attention", "megatron") == "hosted"
    indexed = getattr(config, "dsa_indexer_topk", None) is not None
    return latent_attention(config) if chosen or indexed else None


def problems(layout: Layout, fields: Mapping[str, Any]) -> list[str]:
    """Why the layout is refused: Megatron would lose gradients."""
    if hosted(SimpleNamespace(**fields)) is not None or layout.tp == 1 or layout.sequence_parallel:
        return []
    return [
        f"tp={layout.tp} without sequence parallelism: Megatron's latent attention then does not reduce"
        " the gradients of the rotated keys over its ranks; set sequence_parallel=True (--sp)"
    ]
