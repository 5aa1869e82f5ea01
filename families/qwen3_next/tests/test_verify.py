"""`isthmus verify` passes on every supported layout, and fails on each mistake that a family could make.

A mistake is made in fresh workers, in the map, the model or the arithmetic, before the engine runs. Most of
them are symmetric: loading and exporting share them, so that the round trip comes out right.
"""

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from isthmus import cli
from isthmus.bridge import AutoBridge
from isthmus.layout import Layout
from isthmus.names import live_tensors, unwrapped
from isthmus.testing import ranks
from isthmus.testing.proof import prove
from isthmus.testing.verify import Request
from isthmus.weights import WeightMap, per

GRADIENTS = Request(grads=True)
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def proof(folder: Path, layout: Layout, request: Request, mistake: str = "none") -> dict[str, Any]:
    """The engine's document from workers in which `mistake` is made."""
    layout = layout.resolved()
    ranks.skip_unbuildable(request.overrides)
    documents = ranks.run(layout.world_size, on_rank, folder, layout, request, mistake)
    return documents[0]


def on_rank(folder: Path, layout: Layout, request: Request, mistake: str) -> dict[str, Any]:
    return prove(folder, layout, request, MISTAKES[mistake])


def overall(document: dict[str, Any]) -> dict[str, float]:
    """The numbers to look at when a test fails."""
    forward, gradients = document["forward"] or {}, document["gradients"] or {}
    return {
        "logits": forward.get("rel_rms"),
        "mtp": (forward.get("mtp") or {}).get("rel_rms"),
        "gradients": gradients.get("rel_rms"),
        "worst": gradients.get("rel_rms_max"),
        "norm": gradients.get("grad_norm_rel_err"),
    }


@pytest.mark.parametrize(
    ("layout", "variant", "overrides"),
    [
        (Layout(), "default", {}),
        (Layout(), "default", {"delta_net": "megatron"}),
        (Layout(), "fused_experts", {"transformer_impl": "local"}),
        (Layout(tp=2), "odd_vocab", {}),
        (Layout(tp=2), "tied_with_head", {"delta_net": "megatron"}),
        (Layout(tp=2, etp=2), "default", {}),
        (Layout(tp=2, ep=2), "fused_experts", {}),
        (Layout(ep=2), "default", {"moe_grouped_gemm": False}),
        (Layout(dp=2), "fp32_a_log", {}),
        (Layout(tp=2, pp=2), "tied", {}),
        (Layout(pp=3, pipeline_layout="Et|tt|tmL"), "tied", {}),
        (Layout(tp=2), "fp32_norm", {}),
        (Layout(pp=2), "fp32_norm", {"delta_net": "megatron"}),
        (Layout(tp=2, pp=2), "fp32_a_log", {"delta_net": "megatron"}),
        (Layout(pp=2, vp=2), "eight_layers", {}),
        (Layout(pp=2, ep=2), "dense_layers", {}),
        (Layout(pp=2, pipeline_layout="Et|tttmL"), "v5_config", {}),
        (Layout(pp=4, pipeline_layout="Et|t|tt|tmL"), "five_layers", {}),
        (Layout(pp=2), "no_mtp", {}),
        (Layout(pp=2, dp=2), "sharded", {"mtp_num_layers": None}),
    ],
    ids=str,
)
def test_outputs_and_gradients_are_hugging_faces_on_every_layout(
    checkpoints: Callable[[str], Path], layout: Layout, variant: str, overrides: dict[str, Any]
) -> None:
    document = proof(checkpoints(variant), layout, replace(GRADIENTS, overrides=overrides))
    print(overall(document))
    assert document["failures"] == []
    assert document["passed"]
    assert document["forward"]["argmax_agreement"] == 1.0
    assert (document["forward"]["mtp"] is None) == (variant == "no_mtp" or "mtp_num_layers" in overrides)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
@pytest.mark.parametrize("delta_net", ["hosted", "megatron"])
def test_packed_sequences_are_those_run_one_by_one(
    checkpoints: Callable[[str], Path], layout: Layout, delta_net: str
) -> None:
    request = replace(GRADIENTS, packed=True, overrides={"delta_net": delta_net})
    document = proof(checkpoints("default"), layout, request)
    print(overall(document))
    assert document["failures"] == []


@pytest.mark.parametrize(
    ("layout", "packed", "overrides"),
    [
        (Layout(cp=2, dp=2), False, {}),
        (Layout(cp=2), True, {}),
        (Layout(tp=2, cp=2), False, {}),
        (Layout(tp=2, cp=2), True, {"attention": "hosted", "cp_comm_type": "a2a"}),
        (Layout(pp=2, cp=2), False, {}),
        (Layout(cp=2), False, {"attention": "hosted", "hosted_mode": "replicated"}),
        (Layout(cp=2), True, {"attention": "hosted", "cp_layout": "contiguous", "mtp_num_layers": None}),
        (Layout(cp=2), False, {"delta_net": "megatron"}),
        (Layout(tp=2, cp=2), True, {"delta_net": "megatron"}),
        (Layout(tp=2, cp=2), True, {"attention": "hosted", **RECOMPUTED}),
    ],
    ids=str,
)
def test_sequences_divided_over_ranks_are_those_of_one(
    checkpoints: Callable[[str], Path], layout: Layout, packed: bool, overrides: dict[str, Any]
) -> None:
    request = replace(GRADIENTS, packed=packed, overrides=overrides)
    document = proof(checkpoints("default"), layout, request)
    print(overall(document))
    assert document["failures"] == []
    assert (document["forward"]["mtp"] is None) == ("mtp_num_layers" in overrides)


def test_sequences_longer_than_a_chunk_of_the_delta_rule(checkpoints: Callable[[str], Path]) -> None:
    request = replace(GRADIENTS, tokens=96, overrides={"delta_net": "megatron"})
    assert proof(checkpoints("default"), Layout(), request)["failures"] == []


def test_bfloat16_moves_no_further_than_it_moves_hugging_face(checkpoints: Callable[[str], Path]) -> None:
    document = proof(checkpoints("fp32_a_log"), Layout(tp=2), replace(GRADIENTS, dtype=torch.bfloat16))
    print(overall(document), document["bounds"])
    assert document["failures"] == []
    assert 1e-3 < document["bounds"]["forward"] < 0.1
    assert document["dtypes"]["fp32_params"] == [
        f"decoder.layers.{i}.self_attention.linear_attn.A_log" for i in range(3)
    ]


# Mistakes in the map: both directions share them.


def reordered(parts: str) -> Callable[[AutoBridge], None]:
    """Megatron's fused weights of these parts hold them in another order: the last two of `parts` swapped."""
    names = tuple(parts.split())

    def make(bridge: AutoBridge) -> None:
        def edit(weights: WeightMap) -> None:
            swapped: dict[int, Any] = {}
            for name, bound in weights.megatron.items():
                rule = bound.rule
                if rule.parts.names[: len(names)] == names:
                    order = [*names[:-2], names[-1], names[-2], *rule.parts.names[len(names) :]]
                    parts = per(rule.parts.groups, " ".join(order))
                    rule = swapped.setdefault(id(rule), replace(rule, parts=parts))
                    weights.megatron[name] = bound._replace(rule=rule)
            assert swapped

        edit_map(bridge, edit)

    return make


def edit_map(bridge: AutoBridge, edit: Callable[[WeightMap], None]) -> None:
    original = bridge.weight_map

    def weight_map(*args: Any) -> WeightMap:
        weights = copy.copy(original(*args))  # which the bridge keeps
        weights.megatron, weights.hf = dict(weights.megatron), dict(weights.hf)
        edit(weights)
        return weights

    bridge.weight_map = weight_map  # type: ignore[method-assign]


def shift_an_expert(bridge: AutoBridge) -> None:
    """Two experts of layer 1 change places."""

    def edit(weights: WeightMap) -> None:
        for linear in ("linear_fc1", "linear_fc2"):
            names = [f"decoder.layers.1.mlp.experts.{expert}.{linear}.weight" for expert in (2, 3)]
            first, second = (weights.megatron[name] for name in names)
            weights.megatron[names[0]] = first._replace(hf=second.hf)
            weights.megatron[names[1]] = second._replace(hf=first.hf)

    edit_map(bridge, edit)


def remove_a_rule(bridge: AutoBridge) -> None:
    """The output projections of full attention have no rule."""

    def edit(weights: WeightMap) -> None:
        for name in [name for name in weights.megatron if name.endswith("self_attention.linear_proj.weight")]:
            del weights.hf[weights.megatron.pop(name).hf[0].name]

    edit_map(bridge, edit)


# Mistakes in the model and its arithmetic.


def take_norms_as_centred_at_one(bridge: AutoBridge) -> None:
    """The family says that norms multiply by their weight, where HF adds one to it."""
    bridge.megatron_fields = {**bridge.megatron_fields, "layernorm_zero_centered_gamma": False}


def edit_model(bridge: AutoBridge, edit: Callable[[list[Any]], None], method: str = "build_model") -> None:
    """`edit` the chunks after the bridge's `method`."""
    original = getattr(bridge, method)

    def edited(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        edit(result if method == "build_model" else args[0])
        return result

    setattr(bridge, method, edited)


def swap_the_halves_of_the_prediction_input(bridge: AutoBridge) -> None:
    """eh_proj is given the hidden state first, the embedding second."""

    def edit(chunks: list[Any]) -> None:
        for block in (getattr(unwrapped(chunk), "mtp", None) for chunk in chunks):
            if block is not None:
                block.layers[0].eh_proj.register_forward_pre_hook(
                    lambda module, args: (torch.cat(args[0].chunk(2, -1)[::-1], -1), *args[1:])
                )

    edit_model(bridge, edit)


@torch.no_grad()
def round_a_log(bridge: AutoBridge) -> None:
    """A_log has been through bfloat16, though it is float32 again."""

    def edit(chunks: list[Any]) -> None:
        for live in live_tensors(chunks):
            if live.canonical.endswith("A_log"):
                live.tensor.data = live.tensor.data.bfloat16().float()

    edit_model(bridge, edit, "load_hf_weights")


def a_value_that_rounds_to_the_source(bridge: AutoBridge) -> None:
    """A float32 A_log that a bfloat16 source does not have, and that rounds to it."""

    def edit(chunks: list[Any]) -> None:
        for live in live_tensors(chunks):
            if live.canonical.endswith("A_log"):
                live.tensor.data *= 1 + 1e-5

    edit_model(bridge, edit, "load_hf_weights")


def sum_where_a_slice_is_due(bridge: AutoBridge) -> None:
    """The hosted delta net's input gradient is summed over ranks that each hold the whole of it."""
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    import isthmus.hosting.regions as regions

    regions.gather_over_repeated_work = lambda local, group: gather_from_sequence_parallel_region(
        local, group=group
    )


def take_a_slice_where_a_sum_is_due(bridge: AutoBridge) -> None:
    """The hosted delta net's input gradient is its own context-parallel rank's alone."""
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    import isthmus.hosting.regions as regions

    regions.gather_over_context = lambda local, group, row: gather_from_sequence_parallel_region(
        local, tensor_parallel_output_grad=False, group=group
    ).index_select(0, row.natural)


def count_the_tokens_of_a_rank(bridge: AutoBridge) -> None:
    """The prediction loss is Megatron's, whose mean is over one context-parallel rank's tokens."""
    import isthmus.mtp

    isthmus.mtp.install = lambda: None


def count_copies_twice(bridge: AutoBridge) -> None:
    """Replicated parameters are marked as divided, so that the norm takes each copy for another part."""

    def edit(chunks: list[Any]) -> None:
        for live in live_tensors(chunks):
            if ".linear_attn." in live.canonical:
                live.tensor.tensor_model_parallel = True

    edit_model(bridge, edit)


MISTAKES: dict[str, Callable[[AutoBridge], None]] = {
    "none": lambda bridge: None,
    "gate and up swapped": reordered("gate up"),
    "q and gate swapped": reordered("q gate"),
    "k and v swapped": reordered("q gate k v"),
    "an expert shifted": shift_an_expert,
    "a rule removed": remove_a_rule,
    "MTP halves swapped": swap_the_halves_of_the_prediction_input,
    "norms centred at one": take_norms_as_centred_at_one,
    "A_log rounded": round_a_log,
    "A_log off the source": a_value_that_rounds_to_the_source,
    "input gradient summed": sum_where_a_slice_is_due,
    "input gradient cut": take_a_slice_where_a_sum_is_due,
    "copies counted twice": count_copies_twice,
    "prediction loss of a rank": count_the_tokens_of_a_rank,
}


@pytest.mark.parametrize(
    ("mistake", "layer"),
    [
        ("gate and up swapped", 0),
        ("q and gate swapped", 3),
        ("k and v swapped", 3),
        ("an expert shifted", 1),
    ],
)
def test_the_forward_pass_shows_what_the_round_trip_cancels(
    checkpoints: Callable[[str], Path], mistake: str, layer: int
) -> None:
    document = proof(checkpoints("default"), Layout(tp=2), Request(), mistake)
    assert document["roundtrip"]["bitwise_equal"]
    assert not document["passed"]
    assert document["forward"]["first_diverging_layer"] == layer
    assert document["forward"]["rel_rms"] > 1e-3


def test_a_norm_off_by_one_is_seen_in_the_first_layer(checkpoints: Callable[[str], Path]) -> None:
    document = proof(checkpoints("default"), Layout(), Request(), "norms centred at one")
    assert document["roundtrip"]["bitwise_equal"]
    assert not document["passed"]
    assert document["forward"]["first_diverging_layer"] == 0


def test_dropout_is_off_on_both_sides_and_said(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(checkpoints("default"), tmp_path / "hf")
    raw = json.loads((tmp_path / "hf" / "config.json").read_text()) | {"attention_dropout": 0.5}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(raw))
    request = replace(GRADIENTS, overrides={"attention": "hosted"})
    document = proof(tmp_path / "hf", Layout(), request)
    assert document["failures"] == []
    assert document["request"]["dropout_off"] == {"attention_dropout": 0.5}


def test_swapped_halves_of_the_prediction_input_are_seen_in_its_logits_alone(
    checkpoints: Callable[[str], Path],
) -> None:
    document = proof(checkpoints("default"), Layout(pp=2), Request(), "MTP halves swapped")
    assert document["roundtrip"]["bitwise_equal"]
    assert document["forward"]["first_diverging_layer"] is None
    assert document["forward"]["rel_rms"] < 1e-5
    assert document["forward"]["mtp"]["rel_rms"] > 0.1
    assert len(document["failures"]) == 1
    assert not document["passed"]


@pytest.mark.parametrize("delta_net", ["hosted", "megatron"])
def test_a_rounded_float32_parameter_is_named(checkpoints: Callable[[str], Path], delta_net: str) -> None:
    request = Request(overrides={"delta_net": delta_net})
    document = proof(checkpoints("fp32_a_log"), Layout(tp=2), request, "A_log rounded")
    assert not document["passed"]
    assert len(document["dtypes"]["rounded"]) == 3
    assert all(name.endswith("A_log") for name in document["dtypes"]["rounded"])
    assert document["roundtrip"]["mismatched"] == [f"model.layers.{i}.linear_attn.A_log" for i in range(3)]


def test_float32_values_must_be_the_sources_even_where_they_round_to_it(
    checkpoints: Callable[[str], Path],
) -> None:
    document = proof(checkpoints("default"), Layout(), Request(), "A_log off the source")
    assert document["roundtrip"]["bitwise_equal"]
    assert len(document["dtypes"]["rounded"]) == 3
    assert not document["passed"]


def test_a_removed_rule_fails_before_anything_is_loaded(checkpoints: Callable[[str], Path]) -> None:
    document = proof(checkpoints("default"), Layout(), GRADIENTS, "a rule removed")
    assert not document["passed"]
    assert document["coverage"]["unmapped_megatron"] == [
        "decoder.layers.3.self_attention.linear_proj.weight",
        "mtp.layers.0.layer.self_attention.linear_proj.weight",
    ]
    assert document["coverage"]["unmapped_hf"] == [
        "model.layers.3.self_attn.o_proj.weight",
        "mtp.layers.0.self_attn.o_proj.weight",
    ]
    assert document["roundtrip"] is document["forward"] is document["gradients"] is None


@pytest.mark.parametrize(
    ("layout", "mistake"),
    [
        (Layout(tp=2), "input gradient summed"),
        (Layout(cp=2), "input gradient cut"),
    ],
    ids=str,
)
def test_a_wrong_backward_behind_a_right_forward(
    checkpoints: Callable[[str], Path], layout: Layout, mistake: str
) -> None:
    request = replace(GRADIENTS, overrides={"hosted_mode": "replicated"})
    document = proof(checkpoints("default"), layout, request, mistake)
    assert document["forward"]["rel_rms"] < 1e-5
    assert document["gradients"]["rel_rms"] > 1e-2
    assert not document["passed"]


def test_a_norm_that_counts_copies_twice(checkpoints: Callable[[str], Path]) -> None:
    request = replace(GRADIENTS, overrides={"hosted_mode": "replicated"})
    document = proof(checkpoints("default"), Layout(tp=2), request, "copies counted twice")
    assert document["gradients"]["rel_rms"] < 1e-5
    assert document["gradients"]["grad_norm_rel_err"] > 1e-3
    assert not document["passed"]


def test_a_prediction_loss_that_counts_one_ranks_tokens(checkpoints: Callable[[str], Path]) -> None:
    document = proof(checkpoints("default"), Layout(cp=2), GRADIENTS, "prediction loss of a rank")
    assert document["forward"]["mtp"]["rel_rms"] < 1e-5
    assert document["gradients"]["rel_rms"] > 1e-4
    assert not document["passed"]


# The command.


@ranks.cpu_only
def test_the_command_writes_the_contracts_document_and_a_page(
    checkpoints: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["verify", str(checkpoints("default")), "--tp", "2", "--pp", "2", "--grads"]
    words += ["--report", str(tmp_path / "page.html"), "--json", str(tmp_path / "verify.json")]
    assert cli.main(words) == 0
    document = json.loads((tmp_path / "verify.json").read_text())
    assert document["model_type"] == "qwen3_next"
    assert document["passed"] is True
    assert document["layout"]["tp"] == document["layout"]["pp"] == 2
    assert document["coverage"]["loaded"] == document["coverage"]["hf_tensors"] == 195
    assert document["coverage"]["unmapped_hf"] == document["coverage"]["unmapped_megatron"] == []
    assert document["roundtrip"] == {"tensors": 195, "bitwise_equal": True, "mismatched": []}
    assert [row["layer"] for row in document["forward"]["layers"]] == [0, 1, 2, 3]
    assert document["gradients"]["params"] == 85
    assert len(document["peak_rss_mb_per_rank"]) == 4
    assert document["seconds"].keys() >= {"build", "load", "forward", "export"}
    page = (tmp_path / "page.html").read_text()
    assert "http" not in page
    assert "PASSED" in page
    assert "PASSED: qwen3_next, float32, 4 ranks" in capsys.readouterr().out


@ranks.cpu_only
def test_sections_that_were_not_asked_for_are_null(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    file = tmp_path / "verify.json"
    assert cli.main(["verify", str(checkpoints("no_mtp")), "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    assert document["gradients"] is None
    assert document["forward"]["mtp"] is None


@ranks.cpu_only
def test_a_failed_check_is_exit_code_1_and_says_which(
    checkpoints: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(checkpoints("no_mtp"), tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    assert cli.main(["verify", str(tmp_path / "hf")]) == 1
    printed = capsys.readouterr().out
    assert "FAILED" in printed
    assert "missing from the checkpoint (1): model.norm.weight" in printed


@ranks.cpu_only
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tp", "2", "--tokens", "33"], "cannot divide rows of 33 tokens over tp=2"),
        (
            ["--tokens", "100000000000000"],
            "100000000000000 tokens: config.json has max_position_embeddings=1024",
        ),
        (["--seed", "-1"], "'-1' is not a whole number from 0 to 2**63-1"),
        (["--seed", str(2**63)], "is not a whole number from 0 to 2**63-1"),
        (["--packed", "--tokens", "4"], "cannot pack sequences of 4 tokens"),
        (["--set", "no_such_field=1"], "no_such_field"),
        (["--set", "layernorm_zero_centered_gamma=false"], "layernorm_zero_centered_gamma: True by the"),
        (["--set", "delta_net"], "expected FIELD=VALUE"),
        (["--cp", "2", "--tokens", "30"], "cannot divide rows of 30 tokens over tp=1 and cp=2"),
        (["--cp", "8", "--tokens", "32"], "cannot divide 4 delta-net key heads over tp x cp = 1 x 8"),
        (["--report", "/no/such/folder/page.html"], "there is no folder /no/such/folder"),
    ],
)
def test_wrong_requests_are_exit_code_2(
    checkpoints: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    assert cli.main(["verify", str(checkpoints("no_mtp")), *words]) == 2
    assert message in capsys.readouterr().err
