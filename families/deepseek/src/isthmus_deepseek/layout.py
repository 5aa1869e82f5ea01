"""What a layout must divide in DeepSeek, beyond what every Megatron model has."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from isthmus.layout import Layout
from isthmus.weights import Heads
from isthmus_deepseek.heads import is_hosted, latent_attention

SPARSE_CP = (
    "Megatron's sparse attention is not supported under context parallelism; use attention='hosted'"
    " (--set attention=hosted)"
)


def hosted(config: Any) -> Heads | None:
    """How the attention divides where it is Hugging Face's; `config` is anything with the config's fields."""
    return latent_attention(config) if is_hosted(config) else None


def problems(layout: Layout, fields: Mapping[str, Any]) -> list[str]:
    """Why the layout is refused: Megatron would lose gradients, or its sparse attention cannot do it."""
    if is_hosted(SimpleNamespace(**fields)):
        return []
    found = []
    if layout.tp > 1 and not layout.sequence_parallel:
        found.append(
            f"tp={layout.tp} without sequence parallelism: Megatron's latent attention then does not reduce"
            " the gradients of the rotated keys over its ranks; set sequence_parallel=True (--sp)"
        )
    if layout.cp > 1 and fields.get("dsa_indexer_topk") is not None:
        found.append(f"cp={layout.cp}: {SPARSE_CP}")
    return found
