"""What a layout must divide in Qwen3-Next, beyond what every Megatron model has."""

from collections.abc import Mapping
from typing import Any

from isthmus.layout import Layout

LOST_GRADIENTS = (
    "Megatron's delta net does not reduce the gradient of its output norm over tensor-parallel ranks when"
    " sequence_parallel is off. Turn it on, or use delta_net='hosted'"
)


def loses_gradients(delta_net: str, tp: int, sequence_parallel: bool) -> bool:
    """Whether `LOST_GRADIENTS` is true of a layout."""
    return delta_net == "megatron" and tp > 1 and not sequence_parallel


def problems(layout: Layout, fields: Mapping[str, Any]) -> list[str]:
    """Why the heads cannot be divided over tp x cp; hosted modules may also run whole on every rank."""
    found, replicated = [], fields.get("hosted_mode") == "replicated"

    def divide(what: str, count: int, cp: int = layout.cp, *, up_to: bool = False) -> None:
        parts = layout.tp * cp
        if count % parts and not (up_to and parts % count == 0):
            found.append(f"cannot divide {count} {what} over tp x cp = {layout.tp} x {cp}")

    # Where states are passed, context parallelism divides tokens and no heads.
    passing = fields.get("hosted_cp") == "state_passing"
    if fields.get("delta_net") == "megatron" or not replicated:
        for side in ("key", "value"):
            divide(f"delta-net {side} heads", fields[f"linear_num_{side}_heads"], 1 if passing else layout.cp)
    if fields.get("attention") == "hosted" and not replicated:
        divide("hosted attention heads", fields["num_attention_heads"])
        divide("hosted key/value heads", fields["num_query_groups"], up_to=True)
    if loses_gradients(fields.get("delta_net", "hosted"), layout.tp, layout.sequence_parallel):
        found.append(LOST_GRADIENTS)
    return found
