"""How Qwen3-Next's mixers divide by heads: read by the weight map, and by the hosted modules that run them.

`config` is anything with Megatron's fields of these names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isthmus.weights import COLUMNS, ROWS, SHARED, Division, Heads, Parts, per, rows_by_parts, rows_over


@dataclass(frozen=True, slots=True)
class InProjections:
    """How a release stores the delta net's input projections: which parts each tensor holds.

    Parts are q, k, v and the output gate z, and one number a value head for the write strength (b) and the
    decay (a).
    """

    parts: Mapping[str, str]
    by_key_head: bool
    """A tensor holds its parts once per key head, instead of one after the other."""

    def grouped(self, key_heads: int) -> dict[str, Parts | str]:
        """The parts of each tensor as weight rules name them."""
        return {
            name: per(key_heads, parts) if self.by_key_head else parts for name, parts in self.parts.items()
        }

    def divisions(self, rows: Mapping[str, int]) -> dict[str, Division]:
        """How each tensor divides by heads; `rows` of every part in the whole module."""
        if self.by_key_head:
            return dict.fromkeys(self.parts, ROWS)
        return {
            name: rows_by_parts(**{part: rows[part] for part in parts.split()})
            for name, parts in self.parts.items()
        }


IN_PROJECTIONS = InProjections(
    {"in_proj_qkvz.weight": "q k v z", "in_proj_ba.weight": "b a"}, by_key_head=True
)


def in_projection_rows(config: Any) -> dict[str, int]:
    """Rows of each part of the delta net's input projections."""
    key = config.linear_num_key_heads * config.linear_key_head_dim
    value = config.linear_num_value_heads * config.linear_value_head_dim
    heads = config.linear_num_value_heads
    return {"q": key, "k": key, "v": value, "z": value, "b": heads, "a": heads}


def delta_net(config: Any, in_projections: InProjections = IN_PROJECTIONS) -> Heads:
    """HF's gated delta net: value heads go with their key head."""
    rows = in_projection_rows(config)
    return Heads(
        counts={
            "linear_num_key_heads": config.linear_num_key_heads,
            "linear_num_value_heads": config.linear_num_value_heads,
        },
        parameters={
            **in_projections.divisions(rows),
            # The names are keys of torch_dist checkpoints: other ones would not load what was saved.
            "conv1d.weight": rows_by_parts(query=rows["q"], key=rows["k"], value=rows["v"]),
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
