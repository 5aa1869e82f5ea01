"""HF's delta net and gated attention, hosted, over tensor and context parallelism against HF's own modules.

In float32: HF computes the delta rule and its norms in it, whatever the parameters are.
"""

import itertools
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from isthmus import launch
from isthmus.testing.hosted import KINDS, batch, errors, random_values

launch.preload("transformers.modeling_utils")

HIDDEN, HEADS, GROUPS, HEAD = 32, 8, 2, 16
KEY_HEADS, VALUE_HEADS, KEY, VALUE = 4, 8, 8, 4
RATIO = VALUE_HEADS // KEY_HEADS
THETA, PARTIAL = 10000.0, 0.5
EXACT = 1e-5  # relative RMS: sums over tokens and ranks in another order
TINY = 1e-3  # for one parameter: A_log and dt_bias are few numbers, sums that nearly cancel
LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2)]  # (tp, cp)
MIXERS = ("delta_net", "attention")


def bare_module(mixer: str) -> nn.Module:
    from transformers import Qwen3NextConfig

    from isthmus.hosting.torch_functions import import_modeling

    modeling = import_modeling("transformers.models.qwen3_next.modeling_qwen3_next")
    config = Qwen3NextConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD,
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=VALUE_HEADS,
        linear_key_head_dim=KEY,
        linear_value_head_dim=VALUE,
        rope_parameters={"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": PARTIAL},
    )
    config._attn_implementation = "eager"
    if mixer == "delta_net":
        module = modeling.Qwen3NextGatedDeltaNet(config, 0)
    else:
        module = modeling.Qwen3NextAttention(config, 0)
        module.rotary = modeling.Qwen3NextRotaryEmbedding(config)
    return random_values(module)


def call(module: nn.Module, hidden: Tensor) -> Tensor:
    if not hasattr(module, "rotary"):
        return module(hidden)
    length = hidden.size(1)
    mask = torch.full((length, length), torch.finfo(hidden.dtype).min).triu(1)
    return module(hidden, module.rotary(hidden, torch.arange(length)[None]), mask)[0]


def whole(values: Mapping[str, Tensor], rank: int, size: int) -> Mapping[str, Tensor]:
    return values


def delta_net_shard(hf: Mapping[str, Tensor], rank: int, size: int) -> Mapping[str, Tensor]:
    """Key head by key head, with the value heads of each."""
    heads = range(rank * KEY_HEADS // size, (rank + 1) * KEY_HEADS // size)

    def rows(tensor: Tensor, each: int, dim: int = 0) -> Tensor:
        return torch.cat([tensor.narrow(dim, head * each, each) for head in heads], dim)

    q, k, v = hf["conv1d.weight"].split([KEY_HEADS * KEY, KEY_HEADS * KEY, VALUE_HEADS * VALUE])
    return {
        "dt_bias": rows(hf["dt_bias"], RATIO),
        "A_log": rows(hf["A_log"], RATIO),
        "conv1d.weight": torch.cat([rows(q, KEY), rows(k, KEY), rows(v, RATIO * VALUE)]),
        "in_proj_qkvz.weight": rows(hf["in_proj_qkvz.weight"], 2 * KEY + 2 * RATIO * VALUE),
        "in_proj_ba.weight": rows(hf["in_proj_ba.weight"], 2 * RATIO),
        "norm.weight": hf["norm.weight"],
        "out_proj.weight": rows(hf["out_proj.weight"], RATIO * VALUE, 1),
    }


def attention_shard(hf: Mapping[str, Tensor], rank: int, size: int) -> Mapping[str, Tensor]:
    """Query head by query head; of the two key/value heads its own, or both where ranks are more."""
    heads = range(rank * HEADS // size, (rank + 1) * HEADS // size)
    groups = range(rank * GROUPS // size, (rank + 1) * GROUPS // size) if size <= GROUPS else range(GROUPS)
    return {
        "q_proj.weight": torch.cat([hf["q_proj.weight"][h * 2 * HEAD : (h + 1) * 2 * HEAD] for h in heads]),
        "k_proj.weight": torch.cat([hf["k_proj.weight"][g * HEAD : (g + 1) * HEAD] for g in groups]),
        "v_proj.weight": torch.cat([hf["v_proj.weight"][g * HEAD : (g + 1) * HEAD] for g in groups]),
        "q_norm.weight": hf["q_norm.weight"],
        "k_norm.weight": hf["k_norm.weight"],
        "o_proj.weight": torch.cat([hf["o_proj.weight"][:, h * HEAD : (h + 1) * HEAD] for h in heads], 1),
    }


def hosted_module(mixer: str, tp: int, cp: int, sp: bool, mode: str = "heads", cp_layout: str = "zigzag"):
    import torch.nn.functional as F
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    from isthmus_qwen3_next.attention import HostedAttention
    from isthmus_qwen3_next.delta_net import HostedDeltaNet

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(tp, context_parallel_size=cp)
        model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=HEAD,
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=VALUE_HEADS,
        linear_key_head_dim=KEY,
        linear_value_head_dim=VALUE,
        linear_conv_kernel_dim=4,
        layernorm_epsilon=1e-6,
        attention_dropout=0.0,
        activation_func=F.silu,
        gated_linear_unit=True,
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        sequence_parallel=sp,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        perform_initialization=False,
    )
    params = {"mode": mode, "cp_layout": cp_layout}
    if mixer == "delta_net":
        return HostedDeltaNet(config, **params)
    return HostedAttention(config, rotary_base=THETA, rotary_percent=PARTIAL, **params)


def all_errors(tp: int, cp: int) -> dict[tuple, dict[str, float]]:
    shards = {"delta_net": delta_net_shard, "attention": attention_shard}
    found = {}
    for mixer, sp, mode, cp_layout, kind in itertools.product(
        MIXERS,
        (False, True) if tp > 1 else (False,),
        ("heads", "replicated"),
        ("zigzag", "contiguous") if cp > 1 else ("zigzag",),
        KINDS,
    ):
        hosted, bare = hosted_module(mixer, tp, cp, sp, mode, cp_layout), bare_module(mixer)
        local = shards[mixer] if mode == "heads" else whole
        found[mixer, sp, mode, cp_layout, kind] = errors(hosted, bare, call, local, kind)
    return found


@pytest.mark.parametrize(("tp", "cp"), LAYOUTS)
def test_output_and_every_gradient_equal_the_hf_module(tp, cp):
    for rank in launch.run(tp * cp, all_errors, tp, cp):
        for case, found in rank.items():
            assert len(found) == (10 if case[0] == "delta_net" else 9)
            for name, error in found.items():
                assert error < (TINY if name in ("A_log", "dt_bias") else EXACT), (case, name, error)


def leaking_convolution() -> dict[str, float]:
    """Errors where each call of the hosted module's convolution sees the tokens of the last one."""
    from isthmus.hosting.torch_functions import import_modeling
    from isthmus_qwen3_next.delta_net import HostedDeltaNet

    modeling = import_modeling("transformers.models.qwen3_next.modeling_qwen3_next")
    hosted, bare = hosted_module("delta_net", 1, 1, False), bare_module("delta_net")
    convolve, run, last = modeling.causal_conv1d_fn, HostedDeltaNet.run, []

    def over_boundaries(x: Tensor, weight: Tensor, *args, **kwargs) -> Tensor:
        seen = torch.cat([*last, x], dim=-1)
        last[:] = [x[..., 1 - weight.shape[-1] :]]
        return convolve(seen, weight, *args, **kwargs)[..., seen.shape[-1] - x.shape[-1] :]

    def leak(self, *args, **kwargs) -> Tensor:
        modeling.causal_conv1d_fn = over_boundaries
        output = run(self, *args, **kwargs)
        modeling.causal_conv1d_fn = convolve
        return output

    HostedDeltaNet.run = leak
    return errors(hosted, bare, call, delta_net_shard, "packed")


def test_a_convolution_that_sees_the_sequence_before_is_noticed():
    (found,) = launch.run(1, leaking_convolution)
    assert found["output"] > 1e-2


def flops(mixer: str, tp: int, cp: int, mode: str) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    hosted = hosted_module(mixer, tp, cp, tp > 1, mode)
    given = batch(hosted, "batch")
    with FlopCounterMode(display=False) as counter:
        y, _ = hosted(given.x[given.own].requires_grad_())
        y.sum().backward()
    counts = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    counts.pop("aten.convolution_backward", None)  # counted as if every channel saw all others
    return sum(counts.values())


def test_four_ranks_do_a_quarter_of_the_delta_nets_work_each():
    (single,) = launch.run(1, flops, "delta_net", 1, 1, "heads")
    assert launch.run(4, flops, "delta_net", 2, 2, "heads") == [single // 4] * 4
    assert launch.run(4, flops, "delta_net", 2, 2, "replicated") == [single] * 4
