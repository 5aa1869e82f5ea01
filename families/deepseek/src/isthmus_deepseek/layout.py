"""What a layout must divide in DeepSeek, beyond what every Megatron model has."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from isthmus.layout import Layout
from isthmus_deepseek.heads import latent_attention


def problems(layout: Layout, fields: Mapping[str, Any]) -> list[str]:
    """Why the layout is refused: hosted heads that do not divide, or gradients that Megatron would lose."""
    found = []
    hosted = fields.get("attention") == "hosted" or fields.get("dsa_indexer_topk") is not None
    if hosted and fields.get("hosted_mode") != "replicated":
        found += latent_attention(SimpleNamespace(**fields)).problems(layout.tp, layout.cp)
    if not hosted and layout.tp > 1 and not layout.sequence_parallel:
        found.append(
            f"tp={layout.tp} without sequence parallelism: Megatron's latent attention then does not reduce"
            " the gradients of the rotated keys over its ranks; set sequence_parallel=True (--sp)"
        )
    return found
