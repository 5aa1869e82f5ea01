"""Which layouts Gemma 3 goes with: its few key/value heads, and the attention among an image's tokens."""

from collections.abc import Mapping
from typing import Any

from isthmus.layout import Layout


def problems(layout: Layout, fields: Mapping[str, Any]) -> list[str]:
    """Why the model cannot be built at this layout."""
    found, heads, groups = [], fields["num_attention_heads"], fields["num_query_groups"]
    rows = (heads + 2 * groups) * fields["kv_channels"]
    if layout.tp > groups and rows % layout.tp:
        found.append(
            f"cannot divide {rows} rows of linear_qkv, {heads} attention heads and twice {groups} key/value"
            f" heads, over tensor_model_parallel_size={layout.tp}"
        )
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
