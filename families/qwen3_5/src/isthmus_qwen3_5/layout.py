"""What a layout must divide in Qwen3.5, and which part of a checkpoint can be built."""

from collections.abc import Mapping
from typing import Any

from isthmus.layout import Layout
from isthmus_qwen3_next import layout as qwen3_next


def problems(layout: Layout, fields: Mapping[str, Any]) -> list[str]:
    """Why the model cannot be built at this layout."""
    found = qwen3_next.problems(layout, fields)
    part = fields.get("part", "text")
    if part == "all":
        found.append(
            "the checkpoint has a vision tower, which is not hosted yet. Choose its language model with"
            " part='text' (--set part=text): an export then has the vision tensors as the source has them"
        )
    elif part != "text":
        found.append(f"part must be 'text' or 'all', got {part!r}")
    return found
