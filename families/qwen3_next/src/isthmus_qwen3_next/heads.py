"""How Qwen3-Next's mixers divide by heads: read by the weight map, and by the hosted modules that run them.

`config` is anything with Megatron's fields of these names.
"""

from typing import Any

from isthmus.weights import COLUMNS, ROWS, SHARED, Heads, rows_by_parts, rows_over


def delta_net(config: Any) -> Heads:
    """HF's gated delta net: value heads go with their key head, in whose group its projections hold them."""
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    key, value = key_heads * config.linear_key_head_dim, value_heads * config.linear_value_head_dim
    return Heads(
        counts={"linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads},
        parameters={
            "in_proj_qkvz.weight": ROWS,
            "in_proj_ba.weight": ROWS,
            "conv1d.weight": rows_by_parts(query=key, key=key, value=value),
            "A_log": ROWS,
            "dt_bias": ROWS,
            "norm.weight": SHARED,
            "out_proj.weight": COLUMNS,
        },
    )


def attention(config: Any) -> Heads:
    """HF's gated attention: a query head's rows are its query and its gate."""
    return Heads(
        counts={
            "num_attention_heads": config.num_attention_heads,
            "num_query_groups": config.num_query_groups,
        },
        parameters={
            "q_proj.weight": ROWS,
            "k_proj.weight": rows_over("num_query_groups"),
            "v_proj.weight": rows_over("num_query_groups"),
            "q_norm.weight": SHARED,
            "k_norm.weight": SHARED,
            "o_proj.weight": COLUMNS,
        },
    )
