"""What a layout must divide in Qwen3-Next, beyond what every Megatron model has."""

from collections.abc import Mapping
from typing import Any

from isthmus.layout import Layout


def problems(layout: Layout, fields: Mapping[str, Any]) -> list[str]:
    """Why Megatron's delta net cannot be divided so; a hosted one is whole on every rank."""
    if fields.get("delta_net") != "megatron":
        return []
    found = []
    for side in ("key", "value"):
        heads = fields[f"linear_num_{side}_heads"]
        if heads % layout.tp:
            found.append(
                f"cannot divide {heads} delta-net {side} heads over tensor_model_parallel_size={layout.tp}"
            )
    return found
