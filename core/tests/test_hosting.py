"""Hosted modules against the bare module: outputs, gradients, packed sequences, initial values, refusals.

The hosted module here mixes all earlier tokens into each, so that a gradient lost or doubled between ranks
shows.
"""

import importlib
import subprocess
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isthmus.hosting import state_passing
from isthmus.hosting.torch_functions import import_modeling, use_torch_functions
from isthmus.launch import run

TOKENS, BATCH, HIDDEN = 16, 2, 8
EXACT = 1e-6  # relative RMS; float32, the same operations in the same order but for the gather


class CausalMixer(nn.Module):
    """(b, s, h) -> (b, s, h): each token gets a gated sum over itself and all earlier tokens."""

    def __init__(self, hidden: int):
        super().__init__()
        self.inner = nn.Linear(hidden, hidden, bias=False)
        self.gate = nn.Linear(hidden, hidden)
        self.decay = nn.Parameter(torch.empty(hidden))  # uninitialised, as HF leaves such parameters

    def forward(self, hidden: Tensor) -> Tensor:
        return self.gate(hidden).sigmoid() * (self.inner(hidden) * self.decay).cumsum(1)


def relative_rms(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).square().mean().sqrt() / expected.square().mean().sqrt()).item()


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def hosted_mixer(tp: int = 1, sp: bool = False, cp: int = 1, filled: bool = True, **config):
    """A hosted CausalMixer in this worker, with numbers that only depend on names where `filled`."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    from isthmus.hosting.module import HostedModule

    class HostedMixer(HostedModule):
        hosted_name = "mixer"
        fp32_params = ("decay",)

        def build_hf_module(self, config):
            return CausalMixer(config.hidden_size)

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
    sizes = {"tensor_model_parallel_size": tp, "context_parallel_size": cp, "sequence_parallel": sp}
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        **sizes,
        **({"perform_initialization": not filled} | config),
    )
    hosted = HostedMixer(config, layer_number=1)
    if filled:
        fill(hosted.hosted)
    return hosted


def fill(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(numbers(*parameter.shape, seed=seed) * 0.3)
    return module


def gradient_errors(tp: int, sp: bool) -> dict[str, float]:
    """Relative RMS of the hosted module's output and gradients against the bare module's, on this rank."""
    hosted = hosted_mixer(tp, sp)
    rank = hosted.tp_group.rank()
    local = slice(rank * TOKENS // tp, (rank + 1) * TOKENS // tp) if sp else slice(None)
    x, upstream = (numbers(TOKENS, BATCH, HIDDEN, seed=s) for s in (100, 101))

    bare, x_bare = fill(CausalMixer(HIDDEN)), x.clone().requires_grad_()
    y_bare = bare(x_bare.transpose(0, 1)).transpose(0, 1)
    (y_bare * upstream).sum().backward()

    x_hosted = x[local].clone().requires_grad_()
    y_hosted, bias = hosted(x_hosted)
    assert bias is None
    (y_hosted * upstream[local]).sum().backward()
    errors = {
        "output": relative_rms(y_hosted, y_bare[local]),
        "input": relative_rms(x_hosted.grad, x_bare.grad[local]),
    }
    for (name, parameter), expected in zip(hosted.mixer.named_parameters(), bare.parameters(), strict=True):
        errors[name] = relative_rms(parameter.grad, expected.grad)
    return errors


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)])
def test_output_and_every_gradient_equal_the_bare_module(tp, sp):
    for errors in run(tp, gradient_errors, tp, sp):
        assert max(errors.values()) < EXACT, errors


def packed_errors(tp: int, sp: bool) -> tuple[float, float, bool]:
    """Packed against separate sequences: output, input gradient; and whether a neighbour can be seen."""
    from megatron.core.packed_seq_params import PackedSeqParams

    hosted = hosted_mixer(tp, sp)
    bounds = torch.tensor([0, 5, 5, 12], dtype=torch.int32)  # an empty sequence, and 4 tokens of tail
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    rank = hosted.tp_group.rank()
    local = slice(rank * TOKENS // tp, (rank + 1) * TOKENS // tp) if sp else slice(None)
    x, upstream = (numbers(TOKENS, 1, HIDDEN, seed=s) for s in (100, 101))

    x_apart = x.clone().requires_grad_()
    bare = fill(CausalMixer(HIDDEN))
    apart = [bare(x_apart[a:b].transpose(0, 1)).transpose(0, 1) for a, b in ((0, 5), (5, 12), (12, 16))]
    (torch.cat(apart) * upstream).sum().backward()
    x_packed = x[local].clone().requires_grad_()
    y, _ = hosted(x_packed, packed_seq_params=packed)
    (y * upstream[local]).sum().backward()

    changed = x.clone()
    changed[:5] += 1
    other, _ = hosted(changed[local], packed_seq_params=packed)
    later = slice(max(0, 5 - local.start) if sp else 5, None)
    same = torch.equal(other[later], y[later])
    return relative_rms(y, torch.cat(apart)[local]), relative_rms(x_packed.grad, x_apart.grad[local]), same


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, True)])
def test_packed_sequences_are_run_apart(tp, sp):
    for output, gradient, same in run(tp, packed_errors, tp, sp):
        assert output < EXACT
        assert gradient < EXACT
        assert same, "altering the first sequence moved another one"


def call_with(packed: dict) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    cu = {key: torch.tensor(value) if isinstance(value, list) else value for key, value in packed.items()}
    batch = cu.pop("batch", 1)
    hosted_mixer()(numbers(TOKENS, batch, HIDDEN, seed=1), packed_seq_params=PackedSeqParams(**cu))


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        ({"qkv_format": "sbhd"}, "qkv_format 'thd'"),
        ({"qkv_format": "thd"}, "need cu_seqlens_q"),
        ({"qkv_format": "thd", "cu_seqlens_q": [0, 16], "cu_seqlens_kv": [0, 8]}, "equal cu_seqlens_q"),
        ({"qkv_format": "thd", "cu_seqlens_q": [0, 17], "cu_seqlens_kv": [0, 17]}, "at most the 16"),
        ({"qkv_format": "thd", "cu_seqlens_q": [0, 9, 8], "cu_seqlens_kv": [0, 9, 8]}, "must rise"),
        ({"qkv_format": "thd", "cu_seqlens_q": [0, 16], "cu_seqlens_kv": [0, 16], "batch": 2}, "batch of 1"),
    ],
)
def test_packing_that_cannot_be_exact_is_refused(packed, message):
    with pytest.raises(ValueError, match=message):
        run(1, call_with, packed)


def test_a_batch_divided_over_other_ranks_than_the_module_is_refused():
    packed = {"qkv_format": "thd", "cu_seqlens_q": [0, 16], "cu_seqlens_kv": [0, 16], "local_cp_size": 2}
    with pytest.raises(ValueError, match="context_parallel_size=1, and the batch is divided over 2"):
        run(1, call_with, packed)


def call_with_odd_rows(packed: dict | None) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    hosted = hosted_mixer(cp=2)
    params = None
    if packed is not None:
        cu = torch.tensor(packed["cu_seqlens"])
        params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)
    hosted(numbers(5 if packed is None else 8, 1, HIDDEN, seed=1), packed_seq_params=params)


@pytest.mark.parametrize("packed", [None, {"cu_seqlens": [0, 6, 16]}, {"cu_seqlens": [0, 8, 14]}])
def test_sequences_that_zigzag_cannot_divide_are_refused(packed):
    with pytest.raises(ValueError, match="into the 4 chunks of context_parallel_size=2: pad it"):
        run(2, call_with_odd_rows, packed)


def build_uninitialised() -> None:
    hosted_mixer(filled=False)


def test_a_parameter_that_nobody_initialises_is_refused():
    with pytest.raises(ValueError, match="left \\['decay'\\] uninitialised"):
        run(1, build_uninitialised)


def build_attention(implementation: str | None) -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaConfig

    from isthmus.hosting.module import HostedModule

    class HostedAttention(HostedModule):
        def build_hf_module(self, config):
            hf = LlamaConfig(hidden_size=config.hidden_size, num_attention_heads=2)
            hf._attn_implementation = implementation
            return LlamaAttention(hf, layer_idx=0)

    hosted = HostedAttention(hosted_mixer().config)
    assert not any(parameter.isnan().any() for parameter in hosted.hosted.parameters())


def test_causal_attention_that_would_see_the_future_is_refused():
    run(1, build_attention, "sdpa")
    with pytest.raises(ValueError, match="no _attn_implementation"):
        run(1, build_attention, None)


def built_under_meta() -> dict[str, tuple]:
    with torch.device("meta"):
        hosted = hosted_mixer(filled=False, params_dtype=torch.bfloat16)
    on_meta = all(p.is_meta for p in hosted.parameters())
    hosted.to_empty(device="cpu")
    return {
        name: (on_meta, str(p.dtype), p.average_gradients_across_tp_domain, getattr(p, "keep_in_fp32", False))
        for name, p in hosted.named_parameters()
    }


def test_the_meta_device_allocates_nothing_and_marks_survive_leaving_it():
    (parameters,) = run(1, built_under_meta)
    assert parameters["mixer.decay"] == (True, "torch.float32", True, True)
    assert parameters["mixer.inner.weight"] == (True, "torch.bfloat16", True, False)


def sharded_replicas(tp: int) -> tuple[set[str], set[str], list]:
    from megatron.core import parallel_state

    hosted = hosted_mixer(tp)
    dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
    sharded = hosted.sharded_state_dict("layers.3.", (), {"dp_cp_group": dp_cp})
    replicas = [(t.key, t.replica_id, t.global_shape, t.global_offset) for t in sharded.values()]
    return {f"layers.3.{key}" for key in hosted.state_dict()}, set(sharded), replicas


def test_a_checkpoint_holds_every_parameter_once():
    ranks = run(4, sharded_replicas, 2)  # two data-parallel replicas of two copies
    for plain, sharded, _ in ranks:
        assert plain == sharded
    for key in ranks[0][0]:
        copies = [replica for _, _, replicas in ranks for replica in replicas if replica[0] == key]
        assert len(copies) == 4
        assert sum(replica_id in (0, (0, 0, 0)) for _, replica_id, _, _ in copies) == 1, copies
        assert {offset for *_, offset in copies} == {(0,) * len(copies[0][2])}


MODELING = """
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

@use_kernel_func_from_hub_with_fallback("mix", "gpu_kernels")
def torch_mix(x, scale=1, **kwargs):
    return x * scale

def helper(x):
    return x
"""


def test_torch_functions_replace_kernels_bound_at_import(tmp_path, monkeypatch):
    kernels = types.ModuleType("gpu_kernels")
    kernels.mix = lambda x, scale=1: 1 / 0
    monkeypatch.setitem(sys.modules, "gpu_kernels", kernels)
    (tmp_path / "modeling_with_kernels.py").write_text(MODELING)
    monkeypatch.syspath_prepend(tmp_path)
    modeling = importlib.import_module("modeling_with_kernels")
    with pytest.raises(ZeroDivisionError):
        modeling.torch_mix(2)
    assert use_torch_functions(modeling) == ["torch_mix"]
    assert use_torch_functions(modeling) == []
    assert modeling.torch_mix(2, scale=3, seq_idx=None, unknown=1) == 6
    with pytest.raises(ValueError, match=r"torch_mix got \['cu_seqlens'\].*leak into each other"):
        modeling.torch_mix(2, cu_seqlens=[0, 2])


def test_kernel_packages_can_be_imported_after_a_modeling_file_without_them(tmp_path, monkeypatch):
    (tmp_path / "modeling_looking_for_fla.py").write_text(
        "try:\n    import fla\nexcept ImportError:\n    fla = 0"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "fla", raising=False)
    assert import_modeling("modeling_looking_for_fla").fla == 0
    assert "fla" not in sys.modules


def test_importing_isthmus_and_precision_does_not_import_megatron():
    code = (
        "import sys, isthmus, isthmus.precision; print([m for m in sys.modules if m.startswith('megatron')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("called", "missed"),
    [
        ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"),
        ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"),
    ],
)
def test_a_module_that_does_not_call_what_passes_its_state_is_refused(called: str, missed: str) -> None:
    """A later transformers may call other functions: each rank would run its tokens alone."""
    modeling: Any = types.ModuleType("modeling_other")
    modeling.causal_conv1d_fn = modeling.torch_chunk_gated_delta_rule = None
    row = torch.zeros(1, 2, 3)
    kernels = state_passing.Kernels(
        context=lambda **given: None,
        delta_rule=lambda *args, **given: row,
        convolution=lambda **given: (given["x"], None),
    )
    arguments = {"causal_conv1d_fn": (row, row), "torch_chunk_gated_delta_rule": (row,) * 5}[called]
    group: Any = None

    def run() -> None:
        with state_passing.delta_net(modeling, kernels, ((0, 2),), 4, group):
            getattr(modeling, called)(*arguments)

    with pytest.raises(RuntimeError, match=f"did not call {missed} of modeling_other"):
        run()
    assert modeling.causal_conv1d_fn is None, "HF's own functions are back"
