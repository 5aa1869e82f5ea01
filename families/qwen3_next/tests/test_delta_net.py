"""Both delta nets of the spec against transformers' own: outputs, every gradient, copies, packing, dtypes.

HF's module with HF's weights is the reference throughout; Megatron's gets them re-laid by loops over heads.
"""

import pytest
import torch
from torch import Tensor

from isthmus import launch

launch.preload("transformers.modeling_utils")

TOKENS, BATCH, HIDDEN = 16, 2, 32
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 4, 8, 8, 4
EXACT = 2e-5  # relative RMS in float32: sums over tokens and ranks in another order
TINY = 1e-3  # for one parameter: the few numbers of A_log and dt_bias are sums that nearly cancel
BFLOAT16 = 3e-2  # relative RMS: values of 3 digits through five roundings
STEPS = 3


def relative_rms(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).square().mean().sqrt() / expected.square().mean().sqrt()).item()


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def model_config(delta_net: str, tp: int = 1, pp: int = 1, sp: bool = False, **fields):
    """A four-layer Qwen3NextModelConfig with an MTP block, in a worker."""
    import torch.nn.functional as F
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    from isthmus_qwen3_next.model_config import Qwen3NextModelConfig

    cp = fields.get("context_parallel_size", 1)
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(tp, pp, context_parallel_size=cp)
        torch.manual_seed(1)
        model_parallel_cuda_manual_seed(1)
    transformer = TransformerConfig(
        num_layers=4,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=16,
        ffn_hidden_size=64,
        moe_ffn_hidden_size=16,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_layer_freq=[0, 1, 1, 1],
        moe_grouped_gemm=fields.get("transformer_impl") != "local",
        moe_shared_expert_intermediate_size=16,
        moe_shared_expert_gate=True,
        linear_attention_freq=fields.pop("linear_attention_freq", [1, 1, 1, 0]),
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=VALUE_HEADS,
        linear_key_head_dim=KEY_DIM,
        linear_value_head_dim=VALUE_DIM,
        normalization="RMSNorm",
        layernorm_zero_centered_gamma=True,
        layernorm_epsilon=1e-6,
        qk_layernorm=True,
        attention_output_gate=True,
        add_bias_linear=False,
        activation_func=F.silu,
        gated_linear_unit=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        sequence_parallel=sp,
        mtp_num_layers=1,
        **({"transformer_impl": "transformer_engine", "pipeline_dtype": torch.float32} | fields),
    )
    return Qwen3NextModelConfig(
        transformer=transformer,
        vocab_size=64,
        seq_length=TOKENS,
        position_embedding_type="rope",
        rotary_percent=0.5,
        delta_net=delta_net,
    )


def delta_net_layer(delta_net: str, tp: int = 1, sp: bool = False, **fields):
    """The delta net of the spec's first layer, in a Megatron module; `forward` gives its output alone."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import build_module

    from isthmus_qwen3_next.spec import layer_spec

    config = model_config(delta_net, tp, sp=sp, **fields)

    class Layer(MegatronModule):
        def __init__(self):
            super().__init__(config.transformer)
            self.pg_collection = ProcessGroupCollection.use_mpu_process_groups()
            self.self_attention = build_module(
                layer_spec(config).layer_specs[0].submodules.self_attention,
                config=config.transformer,
                layer_number=1,
                pg_collection=self.pg_collection,
                name="decoder.layers.0.self_attention",
            )

        def forward(self, hidden, **kwargs):
            output, bias = self.self_attention(hidden, attention_mask=None, **kwargs)
            assert bias is None
            return output

    return Layer()


class Reference(torch.nn.Module):
    """HF's delta net, (s, b, h) in and out; with HF's norm before it, for Megatron's has that fused."""

    def __init__(self, with_norm: bool):
        super().__init__()
        from transformers import Qwen3NextConfig

        from isthmus.hosting.torch_functions import import_modeling

        modeling = import_modeling("transformers.models.qwen3_next.modeling_qwen3_next")
        hf = Qwen3NextConfig(
            hidden_size=HIDDEN,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
            linear_num_key_heads=KEY_HEADS,
            linear_num_value_heads=VALUE_HEADS,
            linear_key_head_dim=KEY_DIM,
            linear_value_head_dim=VALUE_DIM,
        )
        self.linear_attn = modeling.Qwen3NextGatedDeltaNet(hf, 0)
        self.norm = (
            modeling.Qwen3NextRMSNorm(HIDDEN, eps=hf.rms_norm_eps) if with_norm else torch.nn.Identity()
        )
        with torch.no_grad():
            for seed, parameter in enumerate(self.parameters()):
                parameter.copy_(numbers(*parameter.shape, seed=seed) * 0.3)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear_attn(self.norm(hidden).transpose(0, 1)).transpose(0, 1)


def relaid(hf: dict[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    """Megatron's delta net parameters of one tensor-parallel rank, from HF's, head by head."""
    ratio = VALUE_HEADS // KEY_HEADS
    own = range(rank * KEY_HEADS // size, (rank + 1) * KEY_HEADS // size)
    parts: dict[str, list[Tensor]] = {name: [] for name in "qkvzba"}
    rows = {"q": KEY_DIM, "k": KEY_DIM, "v": ratio * VALUE_DIM, "z": ratio * VALUE_DIM}
    for head in own:
        start = head * sum(rows.values())
        for name, count in rows.items():
            parts[name].append(hf["linear_attn.in_proj_qkvz.weight"][start : start + count])
            start += count
        start = head * 2 * ratio
        parts["b"].append(hf["linear_attn.in_proj_ba.weight"][start : start + ratio])
        parts["a"].append(hf["linear_attn.in_proj_ba.weight"][start + ratio : start + 2 * ratio])
    key = slice(own.start * KEY_DIM, own.stop * KEY_DIM)
    value = slice(own.start * ratio * VALUE_DIM, own.stop * ratio * VALUE_DIM)
    heads = slice(own.start * ratio, own.stop * ratio)
    q, k, v = hf["linear_attn.conv1d.weight"].split([KEY_HEADS * KEY_DIM] * 2 + [VALUE_HEADS * VALUE_DIM])
    return {
        "in_proj.layer_norm_weight": hf["norm.weight"],
        "in_proj.weight": torch.cat([row for name in "qkvzba" for row in parts[name]]),
        "conv1d.weight": torch.cat([q[key], k[key], v[value]]),
        "A_log": hf["linear_attn.A_log"][heads],
        "dt_bias": hf["linear_attn.dt_bias"][heads],
        "out_norm.weight": hf["linear_attn.norm.weight"],
        "out_proj.weight": hf["linear_attn.out_proj.weight"][:, value],
    }


def as_megatron(delta_net: str, hf: dict[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    return hf if delta_net == "hosted" else relaid(hf, rank, size)


def fill(layer, delta_net: str, reference: Reference) -> None:
    group = layer.pg_collection.tp
    state = as_megatron(delta_net, dict(reference.named_parameters()), group.rank(), group.size())
    parameters = dict(layer.self_attention.named_parameters())
    assert parameters.keys() == state.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])


def train(delta_net: str, tp: int, sp: bool) -> dict:
    """Three steps with Megatron's DDP, gradient finalisation and Adam; the first against HF's module."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    layer, reference = delta_net_layer(delta_net, tp, sp), Reference(with_norm=delta_net == "megatron")
    fill(layer, delta_net, reference)
    group = layer.pg_collection.tp
    rank = group.rank()
    local = slice(rank * TOKENS // tp, (rank + 1) * TOKENS // tp) if sp else slice(None)
    model = DistributedDataParallel(layer.config, DistributedDataParallelConfig(), layer)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=1e9), [model])
    errors = {}
    for step in range(STEPS):
        x, upstream = (numbers(TOKENS, BATCH, HIDDEN, seed=1000 + 2 * step + s) for s in (0, 1))
        model.zero_grad_buffer()
        optimizer.zero_grad()
        x_local = x[local].clone().requires_grad_()
        y = model(x_local)
        (y * upstream[local]).sum().backward()
        model.finish_grad_sync()
        _allreduce_non_tensor_model_parallel_grads([model], layer.config)
        if step == 0:
            x_whole = x.clone().requires_grad_()
            y_whole = reference(x_whole)
            (y_whole * upstream).sum().backward()
            grads = {name: parameter.grad for name, parameter in reference.named_parameters()}
            expected = as_megatron(delta_net, grads, rank, tp)
            errors = {
                "output": relative_rms(y, y_whole[local]),
                "input": relative_rms(x_local.grad, x_whole.grad[local]),
            }
            for name, parameter in layer.self_attention.named_parameters():
                errors[name] = relative_rms(parameter.main_grad, expected[name])
        _, norm, _ = optimizer.step()
        if step == 0:
            whole = torch.cat([grad.flatten() for grad in grads.values()]).norm().item()
            errors["grad norm"] = abs(norm - whole) / whole
    drift = 0.0
    for parameter in layer.parameters():
        if not getattr(parameter, "tensor_model_parallel", False):
            copies = [torch.empty_like(parameter) for _ in range(tp)]
            torch.distributed.all_gather(copies, parameter.data, group=group)
            drift = max([drift, *((copy - copies[0]).abs().max().item() for copy in copies)])
    return {"errors": errors, "drift": drift}


@pytest.mark.parametrize(
    ("delta_net", "tp", "sp"),
    [
        ("hosted", 1, False),  # more ranks: test_hosted.py
        ("megatron", 1, False),
        ("megatron", 2, True),
    ],
)
def test_training_equals_the_hf_module(delta_net, tp, sp):
    for result in launch.run(tp, train, delta_net, tp, sp):
        tiny = {
            name: error for name, error in result["errors"].items() if name.endswith(("A_log", "dt_bias"))
        }
        others = {name: error for name, error in result["errors"].items() if name not in tiny}
        assert len(others) > 5
        assert max(others.values()) < EXACT, others
        assert max(tiny.values()) < TINY, tiny
        assert result["drift"] == 0.0, "copies of one parameter differ after training"


def packed(delta_net: str, tp: int, sp: bool) -> tuple[float, float, bool]:
    """Packed against separate sequences, run by HF's module; and whether none sees its neighbour."""
    from megatron.core.packed_seq_params import PackedSeqParams

    layer, reference = delta_net_layer(delta_net, tp, sp), Reference(with_norm=delta_net == "megatron")
    fill(layer, delta_net, reference)
    rank = layer.pg_collection.tp.rank()
    local = slice(rank * TOKENS // tp, (rank + 1) * TOKENS // tp) if sp else slice(None)
    bounds = torch.tensor([0, 6, 16], dtype=torch.int32)
    psp = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    x, upstream = (numbers(TOKENS, 1, HIDDEN, seed=s) for s in (100, 101))
    x_apart = x.clone().requires_grad_()
    apart = torch.cat([reference(x_apart[:6]), reference(x_apart[6:])])
    (apart * upstream).sum().backward()
    x_packed = x[local].clone().requires_grad_()
    y = layer(x_packed, packed_seq_params=psp)
    (y * upstream[local]).sum().backward()
    changed = x.clone()
    changed[:6] += 1
    other = layer(changed[local], packed_seq_params=psp)
    later = slice(max(0, 6 - local.start) if sp else 6, None)
    return (
        relative_rms(y, apart[local]),
        relative_rms(x_packed.grad, x_apart.grad[local]),
        torch.equal(other[later], y[later]),
    )


@pytest.mark.parametrize(("delta_net", "tp", "sp"), [("hosted", 1, False), ("megatron", 2, True)])
def test_packed_sequences_equal_separate_ones(delta_net, tp, sp):
    for output, gradient, same in launch.run(tp, packed, delta_net, tp, sp):
        assert output < EXACT
        assert gradient < EXACT
        assert same, "altering the first sequence moved the second"


def in_bf16(delta_net: str) -> tuple[list[str], bool, str, float, bool]:
    """Marked names, exact bits after the wrapper, output dtype, distance to fp32; A_log's bits after lr 0."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from isthmus.precision import enforce_marked_param_dtypes, exact_float16_module

    layer = delta_net_layer(delta_net, bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16)
    reference = Reference(with_norm=delta_net == "megatron")
    fill(layer, delta_net, reference)
    exact = reference.linear_attn.A_log.detach().clone()
    assert not torch.equal(exact, exact.bfloat16().float()), "the test needs values that bfloat16 rounds"
    wrapped = exact_float16_module(layer.config, layer)
    names = enforce_marked_param_dtypes(wrapped)
    (a_log,) = (p for name, p in wrapped.named_parameters() if name.endswith("A_log"))
    kept = torch.equal(a_log, exact) and {p.dtype for p in layer.parameters() if p is not a_log} == {
        torch.bfloat16
    }
    x = numbers(TOKENS, BATCH, HIDDEN, seed=7)
    dtype = str(layer(x.bfloat16()).dtype)
    model = DistributedDataParallel(layer.config, DistributedDataParallelConfig(), wrapped)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.0, bf16=True), [model])
    y = model(x)
    y.square().mean().backward()
    model.finish_grad_sync()
    optimizer.step()
    return names, kept, dtype, relative_rms(y, reference(x)), torch.equal(a_log, exact)


@pytest.mark.parametrize("delta_net", ["hosted", "megatron"])
def test_decay_rates_stay_exact_in_a_bf16_model(delta_net):
    ((names, kept, dtype, distance, still),) = launch.run(1, in_bf16, delta_net)
    assert [name.rpartition(".")[2] for name in names] == ["A_log"]
    assert kept
    assert dtype == "torch.bfloat16"
    assert distance < BFLOAT16
    assert still, "an optimizer step with lr 0 changed A_log"
