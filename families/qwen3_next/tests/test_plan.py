"""What `isthmus plan` says of Qwen3-Next, against counts by hand, checkpoint headers and a real build."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from isthmus import cli, launch, registry
from isthmus.checkpoint.reader import CheckpointReader
from isthmus.layout import Layout
from isthmus.testing.tiny import write_tiny
from isthmus_qwen3_next.tiny import PUBLISHED

launch.preload("transformers.modeling_utils")

LARGE = Layout(tp=4, pp=4, ep=8).resolved()
MTP = {"mtp_num_layers": 1}


def plan_config(config: dict, layout: Layout, overrides: dict) -> dict:
    from isthmus.bridge import AutoBridge
    from isthmus.plan import plan

    return plan(AutoBridge.from_hf_config(config), layout, overrides)


def by_hand(c: dict) -> dict[str, int]:
    """Parameters of one layer's parts, from the released model's description alone."""
    h, d = c["hidden_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    key = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    values = c["linear_num_value_heads"]
    value = values * c["linear_value_head_dim"]
    qkvz, ba, conv = (
        h * (2 * key + 2 * value),
        h * 2 * values,
        (2 * key + value) * c["linear_conv_kernel_dim"],
    )
    return {
        "attention": h * 2 * q + 2 * h * kv + q * h + 2 * d,  # queries are doubled by the output gate
        "delta net": qkvz + ba + conv + 2 * values + c["linear_value_head_dim"] + value * h,
        "experts": c["num_experts"] * 3 * h * c["moe_intermediate_size"],
        "shared experts": 3 * h * c["shared_expert_intermediate_size"] + h,
        "router": h * c["num_experts"],
        "norms": 2 * h,
    }


def test_the_80b_model_at_tp4_pp4_ep8_is_counted_as_by_hand() -> None:
    document = launch.run(1, plan_config, PUBLISHED, LARGE, MTP)[0]
    part, hidden = by_hand(PUBLISHED), PUBLISHED["hidden_size"]
    common = sum(part[kind] for kind in ("experts", "shared experts", "router", "norms"))
    vocabulary = PUBLISHED["vocab_size"] * hidden
    mtp = part["attention"] + common + 2 * hidden * hidden + 3 * hidden
    decoder = 36 * part["delta net"] + 12 * part["attention"] + 48 * common
    assert document["problems"] == []
    assert document["parameters"] == 2 * vocabulary + decoder + hidden + mtp
    assert document["world_size"] == 32

    # 12 layers a stage, 3 of them attention. Norms (in attentions too), router and shared gate are whole.
    small, gain = 2 * PUBLISHED["head_dim"], PUBLISHED["linear_value_head_dim"]
    own = {
        "experts": 12 * part["experts"] // 8,
        "shared experts": 12 * ((part["shared experts"] - hidden) // 4 + hidden),
        "router": 12 * part["router"],
        "delta net": 9 * ((part["delta net"] - gain) // 4 + gain),  # hosted, its heads divided
        "attention": 3 * ((part["attention"] - small) // 4 + small),
        "norms": 12 * part["norms"],
    }
    for stage in document["stages"]:
        assert stage["layers"] == list(range(12 * stage["stage"], 12 * stage["stage"] + 12))
        last = stage["stage"] == 3
        extra = hidden if last else 0  # the final norm
        assert {kind: stage["by_kind"][kind] for kind in own} == own | {"norms": own["norms"] + extra}
        assert stage["by_kind"].get("head", 0) == (vocabulary // 4 if last else 0)
        assert ("MTP" in stage["by_kind"]) == last
        assert stage["parameters"] == sum(stage["by_kind"].values())
        decays = 9 * PUBLISHED["linear_num_value_heads"] // 4  # A_log, in float32
        assert stage["bytes"] == 2 * stage["parameters"] + 2 * decays
        if not last:  # 12 bytes each, 8 where there is no copy; divided over dp = 2, experts over 1
            dense = stage["parameters"] - own["experts"]
            assert stage["optimizer_bytes"] == 12 * own["experts"] + (12 * dense - 4 * decays) // 2
        parts = stage["bytes"] + 4 * stage["parameters"] + stage["optimizer_bytes"]
        assert stage["total_bytes"] == parts


def plan_tiny(folder: Path, layout: Layout) -> dict:
    from isthmus.bridge import AutoBridge
    from isthmus.plan import plan

    return plan(AutoBridge.from_hf_pretrained(folder), layout, {})


@pytest.mark.parametrize("variant", ["default", "tied", "odd_vocab", "fused_experts", "fp32_a_log"])
def test_a_checkpoints_headers_say_the_same(tmp_path: Path, variant: str) -> None:
    write_tiny(registry.family("qwen3_next"), tmp_path / "hf", variant)
    document = launch.run(1, plan_tiny, tmp_path / "hf", Layout(tp=2, pp=2, ep=2))[0]
    assert document["problems"] == []
    with CheckpointReader(tmp_path / "hf") as reader:
        total = sum(torch.Size(info.shape).numel() for info in reader.tensors.values())
    assert document["parameters"] == document["checkpoint_parameters"] == total


def held(folder: Path, layout: Layout) -> tuple[int, int]:
    from isthmus.bridge import AutoBridge

    layout.initialize()
    bridge = AutoBridge.from_hf_pretrained(folder)
    chunks = bridge.build_model(bridge.get_model_config(**layout.config_overrides()))
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    return sum(p.numel() for p in parameters), sum(p.numel() * p.element_size() for p in parameters)


@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2), Layout(pp=2, vp=2, ep=2, dp=2)])
def test_a_real_build_holds_what_was_planned(tmp_path: Path, layout: Layout) -> None:
    write_tiny(registry.family("qwen3_next"), tmp_path / "hf", "odd_vocab")
    stages = launch.run(1, plan_tiny, tmp_path / "hf", layout)[0]["stages"]
    planned = [(stage["parameters"], stage["bytes"]) for stage in stages for _ in range(2)]
    assert launch.run(4, held, tmp_path / "hf", layout) == planned


def plan_without_a_rule(folder: Path) -> list[str]:
    from isthmus.bridge import AutoBridge
    from isthmus.plan import plan
    from isthmus.weights import WeightMap

    bridge = AutoBridge.from_hf_pretrained(folder)

    def weights(*args) -> WeightMap:
        full = registry.family("qwen3_next").weights(*args)
        del full.megatron["decoder.layers.1.mlp.router.weight"]
        full.megatron["decoder.layers.9.mlp.router.weight"] = full.megatron[
            "decoder.layers.0.mlp.router.weight"
        ]
        return full

    bridge.family = dataclasses.replace(bridge.family, weights=weights)
    return plan(bridge, Layout(), {})["problems"]


def test_tensors_without_a_rule_and_rules_without_a_tensor_are_named(tmp_path: Path) -> None:
    write_tiny(registry.family("qwen3_next"), tmp_path / "hf", "no_mtp")
    problems = launch.run(1, plan_without_a_rule, tmp_path / "hf")[0]
    assert "no rule for Megatron tensors (1): decoder.layers.1.mlp.router.weight" in problems
    assert "no rank holds (1): decoder.layers.9.mlp.router.weight" in problems


def test_a_config_that_is_not_the_checkpoints_is_told_by_its_shapes(tmp_path: Path) -> None:
    write_tiny(registry.family("qwen3_next"), tmp_path / "hf")
    config = tmp_path / "hf" / "config.json"
    stated = json.loads(config.read_text())
    config.write_text(json.dumps(stated | {"head_dim": 2 * stated["head_dim"]}))
    problems = "\n".join(launch.run(1, plan_tiny, tmp_path / "hf", Layout())[0]["problems"])
    assert "model.layers.3.self_attn.k_norm.weight" in problems
    assert "is (32,), the config makes it (64,)" in problems


class TestCommand:
    """`isthmus plan` itself."""

    @pytest.fixture
    def config(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        file = tmp_path / "config.json"
        file.write_text(json.dumps(PUBLISHED))
        return file

    def test_a_config_alone_is_enough_and_what_it_leaves_open_is_said(
        self, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        document = tmp_path / "plan.json"
        assert cli.main(["plan", str(config), "--pp", "4", "--ep", "8", "--json", str(document)]) == 0
        assert json.loads(document.read_text())["passed"]
        printed = capsys.readouterr().out
        assert "79,674,391,296 parameters on 32 ranks" in printed
        assert printed.index("does not say whether there is an MTP block") < printed.index("One rank of each")
        total = json.loads(document.read_text())["stages"][0]["total_bytes"]
        assert f"{total / 2**30:.2f} GiB\n" in re.sub(" +\n", "\n", printed)
        assert printed.endswith("PASSED: qwen3_next, 32 ranks: every tensor has its place\n")

    def test_every_problem_is_listed_and_the_exit_code_is_1(
        self, config: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = ["plan", str(config), "--tp", "3", "--pp", "2", "--pipeline-layout", "E|L", "--json", "-"]
        assert cli.main(words) == 1
        printed = capsys.readouterr()
        problems = json.loads(printed.out)["problems"]
        assert printed.err.startswith("note: ")
        assert "\nFAILED: qwen3_next, 6 ranks\n  cannot divide 16 attention heads over " in printed.err
        assert "cannot divide 16 attention heads over tensor_model_parallel_size=3" in problems
        assert "pipeline layout 'E|L': 0 of t (decoder layer), the model has 48" in problems
