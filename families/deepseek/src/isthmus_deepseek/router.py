"""Group-limited routing by Hugging Face's score of a group, where Megatron's is another."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from isthmus_deepseek.groups import BEST


class GroupLimitedRouter(TopKRouter):
    """Megatron's router, its groups chosen as HF chooses them."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        if config.moe_router_fusion or config.moe_enable_routing_replay:
            raise ValueError(
                "this model's groups of experts are chosen by a score that moe_router_fusion and"
                " moe_enable_routing_replay do not have: turn both off"
            )
        super().__init__(config, *args, **kwargs)
        # Megatron asks this object, meant for replaying a choice, in place of its own top k.
        self.router_replay: Any = _GroupTopK(BEST[config.moe_router_score_function])


class _GroupTopK:
    """The choice of experts, called in place of Megatron's."""

    layer_number: int | None = None  # set by Megatron

    def __init__(self, best: int):
        self.best = best

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int, group_topk: int, default: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """(chosen scores, chosen experts), both (T, topk), of scores (T, experts)."""
        grouped = scores.unflatten(-1, (num_groups, -1))
        group_scores = grouped.topk(self.best, dim=-1).values.sum(-1)
        chosen = group_scores.topk(group_topk, dim=-1).indices
        mask = torch.ones_like(group_scores, dtype=torch.bool).scatter(-1, chosen, False)
        return grouped.masked_fill(mask.unsqueeze(-1), -torch.inf).flatten(-2).topk(topk, dim=-1)
