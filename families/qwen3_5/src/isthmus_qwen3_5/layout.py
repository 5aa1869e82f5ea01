"""What a layout must divide in Qwen3.5, and which attention a vision tower goes with."""

from collections.abc import Mapping
from typing import Any

from isthmus.layout import Layout
from isthmus_qwen3_next import layout as qwen3_next


def problems(layout: Layout, fields: Mapping[str, Any]) -> list[str]:
    """Why the model cannot be built at this layout."""
    found = qwen3_next.problems(layout, fields)
    if fields.get("part") == "all" and fields.get("attention") == "hosted":
        found.append(
            "attention='hosted' counts positions as on text, and images have others: use 'megatron', or"
            " part='text'"
        )
    return found
