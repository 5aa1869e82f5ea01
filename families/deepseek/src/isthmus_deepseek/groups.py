"""How many of a group's scores are added up for the score of the group, here and in Megatron."""

from typing import Any

BEST = {"softmax": 1, "sigmoid": 2}
"""In Hugging Face's models, by score function: DeepSeek V2's one, V3's two."""


def differs(config: Any) -> bool:
    """Whether Megatron's router adds up another number: its own is topk // group_topk.

    `config` is anything with Megatron's fields.
    """
    chosen = getattr(config, "moe_router_group_topk", None)
    return bool(chosen) and config.moe_router_topk // chosen != BEST[config.moe_router_score_function]
