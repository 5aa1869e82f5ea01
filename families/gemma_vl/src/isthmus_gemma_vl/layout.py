"""What a layout must divide in Gemma 3, and which part of a checkpoint can be built."""

from collections.abc import Mapping
from typing import Any

from isthmus.layout import Layout


def problems(layout: Layout, fields: Mapping[str, Any]) -> list[str]:
    """Why the model cannot be built at this layout."""
    part = fields.get("part", "text")
    if part == "all":
        return [
            "the checkpoint has a vision tower, which is not hosted yet. Choose its language model with"
            " part='text' (--set part=text): an export then has the vision tensors as the source has them"
        ]
    return [] if part == "text" else [f"part must be 'text' or 'all', got {part!r}"]
