"""Which layouts the attention among an image's tokens of Gemma 3 goes with."""

from collections.abc import Mapping
from typing import Any

from isthmus.layout import Layout


def problems(layout: Layout, fields: Mapping[str, Any]) -> list[str]:
    """Why the model cannot be built at this layout."""
    found = []
    if fields.get("part") == "all" and layout.cp > 1:
        found.append(
            "bidirectional image attention under context parallelism: an image's tokens may lie on several"
            " ranks, and Megatron divides causal attention only. Use cp=1, or part='text'"
        )
    if fields.get("part") == "all" and fields.get("attention_dropout"):
        found.append(
            f"attention_dropout={fields['attention_dropout']} with part='all': attention among image tokens"
            " drops nothing. Use 0, or part='text'"
        )
    return found
