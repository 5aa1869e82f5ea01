"""A hosted delta net that passes its state: what can be shown without a GPU.

In the place of fla's kernels stands a slow reference of the same arguments: it gathers the whole row, runs
HF's own torch functions on every sequence by itself, and gives each rank its slice.
"""

import itertools
from collections.abc import Mapping
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isthmus import launch
from isthmus.testing.hosted import KINDS, errors, random_values
from isthmus.zigzag import order

launch.preload("transformers.modeling_utils")

HIDDEN, KEY_HEADS, VALUE_HEADS, KEY, VALUE = 16, 2, 4, 8, 4
EXACT = 1e-5  # relative RMS: sums over tokens and ranks in another order
TINY = 1e-3  # for A_log and dt_bias: few numbers, sums that nearly cancel


def hosted_module(tp: int, cp: int, sp: bool, cp_layout: str, mode: str = "heads") -> Any:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    from isthmus_qwen3_next.delta_net import HostedDeltaNet

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(tp, context_parallel_size=cp)
        model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=VALUE_HEADS,
        linear_key_head_dim=KEY,
        linear_value_head_dim=VALUE,
        linear_conv_kernel_dim=4,
        layernorm_epsilon=1e-6,
        activation_func=F.silu,
        gated_linear_unit=True,
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        sequence_parallel=sp,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        perform_initialization=False,
    )
    return HostedDeltaNet(config, mode=mode, cp_layout=cp_layout, cp="state_passing")


def bare_module() -> nn.Module:
    from transformers import Qwen3NextConfig

    from isthmus.hosting.torch_functions import import_modeling

    modeling = import_modeling("transformers.models.qwen3_next.modeling_qwen3_next")
    config = Qwen3NextConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=VALUE_HEADS,
        linear_key_head_dim=KEY,
        linear_value_head_dim=VALUE,
    )
    return random_values(modeling.Qwen3NextGatedDeltaNet(config, 0))


def shards(hf: Mapping[str, Tensor], rank: int, size: int) -> Mapping[str, Tensor]:
    """By key head, of which there are two."""
    q, k, v = hf["conv1d.weight"].split([KEY_HEADS * KEY, KEY_HEADS * KEY, VALUE_HEADS * VALUE])
    rows = {name: hf[name] for name in ("dt_bias", "A_log", "in_proj_qkvz.weight", "in_proj_ba.weight")}
    return {
        **{name: tensor.chunk(size)[rank] for name, tensor in rows.items()},
        "conv1d.weight": torch.cat([part.chunk(size)[rank] for part in (q, k, v)]),
        "norm.weight": hf["norm.weight"],
        "out_proj.weight": hf["out_proj.weight"].chunk(size, 1)[rank],
    }


def whole(hf: Mapping[str, Tensor], rank: int, size: int) -> Mapping[str, Tensor]:
    return hf


def reference_kernels() -> Any:
    """Functions with fla's arguments, over the ranks of the context's group."""
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    from isthmus.hosting.state_passing import Kernels
    from isthmus.hosting.torch_functions import import_modeling

    modeling = import_modeling("transformers.models.qwen3_next.modeling_qwen3_next")
    convolve, recur = modeling.causal_conv1d_fn, modeling.torch_chunk_gated_delta_rule

    def by_sequence(context: Any, function: Any, *local: Tensor) -> Tensor:
        """`function` of whole sequences (1, s, ...), from and to this rank's tokens of a row."""
        gathered = [
            gather_from_sequence_parallel_region(x.transpose(0, 1).contiguous(), group=context.group)
            for x in local
        ]
        row = [x.transpose(0, 1) for x in gathered]
        starts = context.cu_seqlens.tolist()
        assert starts[-1] == row[0].size(1), "a row that is not the group's"
        parts = [function(*(x[:, a:b] for x in row)) for a, b in pairwise(starts)]
        return torch.cat(parts, dim=1).chunk(context.group.size(), dim=1)[context.group.rank()]

    def delta_rule(q, k, v, *, g, beta, use_qk_l2norm_in_kernel, cp_context):
        def rule(q, k, v, g, beta):
            return recur(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)[0]

        return by_sequence(cp_context, rule, q, k, v, g, beta), None

    def convolution(x, weight, bias, activation, cp_context):
        assert weight.shape[-1] == cp_context.conv1d_kernel_size

        def convolved(x):
            return convolve(x.transpose(1, 2), weight, bias, activation=activation).transpose(1, 2)

        return by_sequence(cp_context, convolved, x), None

    return Kernels(SimpleNamespace, delta_rule, convolution)


def all_errors(tp: int, cp: int) -> dict[tuple, dict[str, float]]:
    from isthmus.hosting import state_passing

    found_kernels = reference_kernels()
    state_passing.kernels = lambda: found_kernels
    found = {}
    for sp, mode, cp_layout, kind in itertools.product(
        (False, True) if tp > 1 else (False,), ("heads", "replicated"), ("zigzag", "contiguous"), KINDS
    ):
        hosted = hosted_module(tp, cp, sp, cp_layout, mode)
        local = shards if mode == "heads" else whole
        found[sp, mode, cp_layout, kind] = errors(hosted, bare_module(), lambda m, x: m(x), local, kind)
    return found


@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (1, 4), (2, 2)])
def test_output_and_every_gradient_equal_the_hf_module(tp, cp):
    for rank in launch.run(tp * cp, all_errors, tp, cp):
        for case, found in rank.items():
            assert len(found) == 10
            for name, error in found.items():
                assert error < (TINY if name in ("A_log", "dt_bias") else EXACT), (case, name, error)


def relayouts(cp: int, bounds: list[tuple[int, int]]) -> tuple[list[int], bool, list[float]]:
    """(tokens after the relayout, whether the way back restores them, gradient that comes through it)."""
    from megatron.core import parallel_state

    from isthmus.hosting.relayout import from_contiguous, to_contiguous
    from isthmus.hosting.sequence import Row

    parallel_state.initialize_model_parallel(1, context_parallel_size=cp)
    group = parallel_state.get_context_parallel_group()
    held = order(bounds, cp, "zigzag")
    row = Row(held.numel(), tuple(bounds), held, held.argsort())
    local = held.chunk(cp)[group.rank()].double()[:, None].requires_grad_()
    moved = to_contiguous(local, group, row)
    weights = torch.arange(row.tokens).chunk(cp)[group.rank()].double()[:, None] * 10
    (moved * weights).sum().backward()
    assert local.grad is not None
    back = torch.equal(from_contiguous(moved, group, row), local)
    return moved.flatten().int().tolist(), back, (local.grad / 10).flatten().int().tolist()


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("lengths", [[1], [3, 1, 2]], ids=str)
def test_a_relayout_gives_each_rank_its_run_of_tokens_and_gradients_their_way_back(cp, lengths):
    stops = list(itertools.accumulate(2 * cp * length for length in lengths))
    bounds = list(pairwise([0, *stops]))
    held = order(bounds, cp, "zigzag").chunk(cp)
    ranks = launch.run(cp, relayouts, cp, bounds)
    assert [token for moved, _, _ in ranks for token in moved] == list(range(stops[-1]))
    for (_, back, gradient), own in zip(ranks, held, strict=True):
        assert back
        assert gradient == own.tolist()


def refused(what: str) -> None:
    if what == "attention":
        from isthmus.hosting.module import HostedModule

        class Attention(HostedModule):
            def build_hf_module(self, config):
                return nn.Linear(1, 1)

        Attention(batchless_config(), cp="state_passing")
    hosted_module(1, 2, False, "zigzag")


def batchless_config() -> Any:
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(1, context_parallel_size=2)
    return TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, context_parallel_size=2)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("cpu", r"cp='state_passing' runs fla's Triton kernels and needs a GPU"),
        ("attention", "Attention has no state that ranks could pass; use cp='heads'"),
    ],
)
def test_state_passing_is_refused_where_it_cannot_be(what, message):
    with pytest.raises(ValueError, match=message):
        launch.run(2, refused, what)
