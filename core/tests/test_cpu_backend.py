"""Megatron-core on CPU: what install refuses, every patch is needed, layouts agree with one process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for the workers too: they inherit sys.path

import cpu_ablation  # noqa: E402
import cpu_cases  # noqa: E402

from isthmus import launch  # noqa: E402
from isthmus.cpu import kernels, patches  # noqa: E402
from isthmus.cpu.positions import one_sequence, packed, zigzag  # noqa: E402

# fp32 sums in another order: measured 1e-7 (loss), 3e-7 (norm) and 5e-5 (weights after two steps of Adam at
# lr 3e-3, whose first is lr * sign(gradient) and so magnifies gradients near zero).
LOSS_TOLERANCE, NORM_TOLERANCE, WEIGHT_TOLERANCE = 1e-6, 2e-6, 3e-4
# Of values about 1 in fp32, absolute: the same few products summed in another order.
ORDER_TOLERANCE = 1e-6
# The same against float64, after up to 150 steps of the recurrence: of outputs, and of gradients, which are
# sums over all later steps.
RECURRENCE_TOLERANCE, RECURRENCE_GRADIENT_TOLERANCE = 2e-6, 2e-5

LAYOUTS = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "dp2": {},
    "ep2": {"ep": 2},
    "tp2-ep2-etp1": {"tp": 2, "ep": 2, "etp": 1},
}
PARITY = [
    *(("dense", layout) for layout in ("tp2", "pp2", "cp2", "dp2")),
    *(("moe", layout) for layout in ("tp2", "ep2", "tp2-ep2-etp1")),
    *(("delta_net", layout) for layout in ("tp2", "pp2", "cp2")),
    *(("latent", layout) for layout in ("tp2", "cp2")),
    *(("layer_norm", layout) for layout in ("tp2", "cp2")),
    *(("local", layout) for layout in ("tp2", "cp2")),
]


def python(code: str) -> subprocess.CompletedProcess:
    """Run code in a fresh interpreter."""
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)


def test_importing_the_package_imports_no_torch_and_no_megatron():
    code = "import sys, isthmus; isthmus.cpu.install\n"
    code += "print(sorted(m for m in ('torch', 'megatron') if m in sys.modules))"
    assert python(code).stdout.strip() == "[]"


REFUSALS = """
import importlib.metadata, importlib.util, sys, types
from unittest.mock import patch
import isthmus.cpu, torch

pretences = (
    patch.object(importlib.metadata, "version", lambda name: "0.20.1"),
    patch.object(torch.cuda, "is_available", lambda: True),
    patch.object(importlib.util, "find_spec", lambda name: True),
    patch.dict(sys.modules, {"megatron.core": types.ModuleType("megatron.core")}),
)
before = torch.zeros
for pretence in pretences:
    with pretence:
        try:
            isthmus.cpu.install()
        except ValueError as error:
            print(error)
print(torch.zeros is before, isthmus.cpu.is_installed())
"""


def test_install_refuses_an_environment_it_does_not_know_before_it_patches_anything():
    run = python(REFUSALS)
    messages = run.stdout.splitlines()
    expected = (
        "knows megatron-core 0.19, but 0.20.1 is installed",
        "on a machine with CUDA",
        "transformer_engine is installed",
        "came after megatron.core was imported",
    )
    assert len(messages) == 5, run.stderr
    for message, part in zip(messages, expected, strict=False):
        assert part in message
    assert messages[-1] == "True False"


def twice() -> tuple[bool, str, str]:
    """Install again, and with other skips, where it is installed."""
    import isthmus.cpu

    before = torch.zeros, torch.cuda.current_device, torch.Tensor.type
    isthmus.cpu.install()
    same = before == (torch.zeros, torch.cuda.current_device, torch.Tensor.type)
    messages = []
    for skip in (["jit"], ["gravity"]):
        try:
            isthmus.cpu.install(skip)
        except ValueError as error:
            messages.append(str(error))
    return same, *messages


def test_a_second_install_changes_nothing_and_refuses_other_skips():
    [(same, one, other)] = launch.run(1, twice)
    assert same
    assert "skipping []" in one
    assert "'jit'" in one
    assert "'gravity'" in other


def test_a_skip_that_names_no_patch_is_refused_with_the_names():
    with pytest.raises(
        LookupError, match=r"no patch of isthmus\.cpu is named gravity \(known: current_device, "
    ):
        patches.check_names(["jit", "gravity"])


def test_a_patch_without_a_reason_is_refused():
    def silent():
        pass

    with pytest.raises(ValueError, match="patch 'silent' gives no reason"):
        patches.patch("torch")(silent)


# --- every patch is needed ---

ABLATED = [p.name for p in patches.patches()]


@pytest.fixture(scope="module")
def broken() -> dict[str, str | None]:
    """Patch -> what breaks without it."""
    script = [sys.executable, "-W", "ignore", str(HERE / "cpu_ablation.py")]
    run = subprocess.run(script, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_every_patch_has_a_case_that_needs_it():
    assert set(cpu_ablation.CASES) == {"nothing", *ABLATED}


def test_leaving_out_nothing_breaks_nothing(broken):
    assert broken["nothing"] is None


@pytest.mark.parametrize("patch", ABLATED)
def test_leaving_out_a_patch_breaks_something(broken, patch):
    assert broken[patch] is not None, "obsolete: remove the patch"


@pytest.mark.parametrize(
    ("case", "world_size"),
    sorted(set(cpu_ablation.CASES.values()), key=str),
    ids=lambda v: getattr(v, "__name__", v),
)
def test_what_breaks_without_a_patch_works_with_it(case, world_size):
    launch.run(world_size, case)


# --- layouts ---


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """model -> (first weights, trained weights, losses and norms) of one process, made when asked for."""
    made = {}

    def reference(model):
        if model not in made:
            start, end = tmp_path_factory.mktemp("start"), tmp_path_factory.mktemp("end")
            made[model] = start, end, launch.run(1, cpu_cases.train, model, str(start), str(end), {})[0]
        return made[model]

    return reference


@pytest.mark.parametrize(("model", "layout"), PARITY)
def test_training_in_parallel_equals_training_in_one_process(references, tmp_path, model, layout):
    start, end, expected = references(model)
    results = launch.run(2, cpu_cases.train, model, str(start), str(tmp_path), LAYOUTS[layout])
    got = next(r for r in results if r["reports"])
    assert got["losses"] == pytest.approx(expected["losses"], rel=LOSS_TOLERANCE)
    for result in results:
        assert result["norms"] == pytest.approx(expected["norms"], rel=NORM_TOLERANCE)
    [(difference, tensors)] = launch.run(1, cpu_cases.largest_difference, str(end), str(tmp_path))
    assert tensors > 10
    assert difference < WEIGHT_TOLERANCE
    [(moved, _)] = launch.run(1, cpu_cases.largest_difference, str(start), str(end))
    assert moved > 10 * WEIGHT_TOLERANCE, "training moved nothing, so agreeing says nothing"


@pytest.mark.parametrize("model", ["dense", "delta_net", "latent"])
def test_packed_sequences_do_not_see_each_other(model):
    [(together, alone)] = launch.run(1, cpu_cases.packed_logits, model)
    torch.testing.assert_close(together, alone, rtol=0, atol=ORDER_TOLERANCE)


def test_parameters_carry_the_names_of_transformer_engine():
    [names] = launch.run(1, cpu_cases.parameters, "moe")
    layer = {n.removeprefix("decoder.layers.0.") for n in names if n.startswith("decoder.layers.0.")}
    assert layer == {
        *("self_attention.linear_qkv.layer_norm_weight", "self_attention.linear_qkv.weight"),
        *("self_attention.linear_qkv.bias", "self_attention.linear_proj.weight"),
        *("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"),
        *("pre_mlp_layernorm.weight", "mlp.router.weight"),
        *(f"mlp.experts.linear_fc{fc}.weight{expert}" for fc in (1, 2) for expert in range(4)),
    }


@pytest.mark.parametrize("model", cpu_cases.MODELS)
def test_a_model_can_be_built_on_the_meta_device(model):
    [real] = launch.run(1, cpu_cases.parameters, model, perform_initialization=False)
    [meta] = launch.run(1, cpu_cases.parameters, model, meta=True)
    assert {name: shape for name, (shape, _) in meta.items()} == {
        name: shape for name, (shape, _) in real.items()
    }
    assert {device for _, device in meta.values()} == {"meta"}


# --- kernels and positions ---


def recurrence(q, k, v, g, beta):
    """The delta rule one token at a time, in float64."""
    q, k, v, g, beta = (t.double() for t in (q, k, v, g, beta))
    state = torch.zeros(*q.shape[:1], *q.shape[2:], v.size(-1), dtype=torch.float64)
    out = []
    for t in range(q.size(1)):
        state = state * g[:, t, :, None, None].exp()
        seen = torch.einsum("bnk,bnkv->bnv", k[:, t], state)
        state = state + torch.einsum("bnk,bnv->bnkv", k[:, t], beta[:, t, :, None] * (v[:, t] - seen))
        out.append(torch.einsum("bnk,bnkv->bnv", q[:, t], state) * q.size(-1) ** -0.5)
    return torch.stack(out, 1)


@pytest.mark.parametrize("length", [1, 63, 64, 150])
def test_the_chunked_delta_rule_and_its_gradients_equal_the_recurrence(length):
    torch.manual_seed(0)
    q, k = (kernels.l2norm(torch.randn(2, length, 3, 8)) for _ in range(2))
    v, g, beta = torch.randn(2, length, 3, 5), -torch.rand(2, length, 3), torch.rand(2, length, 3)
    inputs = [t.requires_grad_() for t in (q.detach(), k.detach(), v, g, beta)]
    weight = torch.randn(2, length, 3, 5)
    out, _ = kernels.chunk_gated_delta_rule(*inputs)
    expected = recurrence(*inputs)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=RECURRENCE_TOLERANCE)
    gradients = torch.autograd.grad((out * weight).sum(), inputs)
    references = torch.autograd.grad((expected * weight).sum(), inputs)
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=0, atol=RECURRENCE_GRADIENT_TOLERANCE)


def test_strong_decay_overflows_nowhere():
    q = k = v = torch.ones(1, 64, 1, 4)
    g = torch.full((1, 64, 1), -50.0, requires_grad=True)
    out, _ = kernels.chunk_gated_delta_rule(q, k, v, g, torch.ones(1, 64, 1))
    out.sum().backward()
    assert out.isfinite().all()
    assert g.grad.isfinite().all()


def test_packed_kernels_equal_each_sequence_alone():
    torch.manual_seed(0)
    bounds = torch.tensor([0, 3, 3, 10])
    x, weight = torch.randn(1, 10, 6), torch.randn(6, 4)
    together, _ = kernels.causal_conv1d(x, weight, activation="silu", cu_seqlens=bounds)
    for a, b in ((0, 3), (3, 10)):
        alone = torch.zeros(b - a, 6)
        for t in range(b - a):
            for back in range(min(4, t + 1)):
                alone[t] += weight[:, 3 - back] * x[0, a + t - back]
        torch.testing.assert_close(
            together[0, a:b], torch.nn.functional.silu(alone), rtol=0, atol=ORDER_TOLERANCE
        )
    with pytest.raises(ValueError, match="cu_seqlens goes from 0 to 10, but there are 9 tokens"):
        kernels.causal_conv1d(x[:, :9], weight, cu_seqlens=bounds)


def test_the_hadamard_rotation_is_its_own_inverse():
    x = torch.randn(3, 16)
    torch.testing.assert_close(kernels.rotate_activation(kernels.rotate_activation(x)), x)
    with pytest.raises(ValueError, match="power of two, not 12"):
        kernels.rotate_activation(x[:, :12])


def test_context_parallel_ranks_share_out_every_token_once():
    assert [zigzag(8, rank, 2).tolist() for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    tokens = packed([0, 4, 12], [0, 3, 10], 16, cp_size=2)
    assert torch.cat(tokens.order).sort().values.tolist() == list(range(16))
    assert tokens.sequence.tolist() == [0] * 4 + [1] * 8 + [2] * 4
    assert tokens.position.tolist() == [*range(4), *range(8), *range(4)]
    assert [i for i, valid in enumerate(tokens.valid.tolist()) if not valid] == [3, 11, 12, 13, 14, 15]
    with pytest.raises(ValueError, match="cannot divide a sequence of 6 tokens into the 4 chunks"):
        one_sequence(6, cp_size=2)
