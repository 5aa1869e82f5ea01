"""A model is a checkpoint's only where every config field that decides the arithmetic agrees."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.nn import functional

from isthmus import AutoBridge, cli
from isthmus.arithmetic import FREE, check
from isthmus.layout import Layout
from isthmus.registry import family
from isthmus.testing import ranks
from isthmus.testing.tiny import write_tiny


def test_all_fields_that_differ_are_in_one_error_with_both_values() -> None:
    expected = {"rotary_base": 10000, "layernorm_epsilon": 1e-6, "num_layers": 4, "bf16": True}
    with pytest.raises(ValueError, match="the model does not compute") as caught:
        check(
            expected,
            {"rotary_base": 500, "layernorm_epsilon": 1e-5, "num_layers": 4, "bf16": False},
            "the model",
        )
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:3]] == ["rotary_base", "layernorm_epsilon"]
    assert "10000 by the checkpoint's config.json, 500 of the model" in lines[1]
    assert "num_layers" not in str(caught.value)


def test_a_field_that_a_run_may_choose_is_free_and_one_that_was_not_found_is_not_compared() -> None:
    check(dict.fromkeys(FREE, 1) | {"rotary_base": 1}, dict.fromkeys(FREE, 2), "the model")


def test_activations_are_compared_by_what_they_compute() -> None:
    tanh = partial(functional.gelu, approximate="tanh")
    check({"activation_func": tanh}, {"activation_func": partial(functional.gelu, approximate="tanh")}, "it")
    with pytest.raises(ValueError, match=r"gelu\(approximate='tanh'\) by .*, gelu of it"):
        check({"activation_func": tanh}, {"activation_func": functional.gelu}, "it")


def test_experts_may_be_balanced_in_every_way_that_routes_alike() -> None:
    name = "moe_router_load_balancing_type"
    check({name: "none"}, {name: "seq_aux_loss"}, "it")
    with pytest.raises(ValueError, match=r"'none' by .*, 'sinkhorn' of it"):
        check({name: "none"}, {name: "sinkhorn"}, "it")


# Checkpoints whose tensors have the same names and shapes


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "source"
    write_tiny(family("qwen3_next"), folder, "no_mtp")
    return folder


def altered(folder: Path, target: Path, **fields: Any) -> Path:
    """A copy with other fields in its config.json."""
    shutil.copytree(folder, target)
    raw = json.loads((folder / "config.json").read_text()) | fields
    (target / "config.json").write_text(json.dumps(raw))
    return target


OTHER = {"rope_theta": 500.0, "rms_norm_eps": 1e-4, "num_experts_per_tok": 2}
WORDS = {
    "rotary_base: 500 by the checkpoint's config.json, 10000000 of the model",
    "layernorm_epsilon: 0.0001 by the checkpoint's config.json, 1e-06 of the model",
    "moe_router_topk: 2 by the checkpoint's config.json, 3 of the model",
}


def refusals(own: Path, other: Path, out: Path) -> dict[str, str]:
    """In a worker: what each way to use a model of `own` with the checkpoint `other` says."""
    Layout().initialize()
    model = AutoBridge.from_hf_pretrained(own).build_model()
    before = {name: tensor.clone() for name, tensor in model[0].state_dict().items() if tensor is not None}
    bridge = AutoBridge.from_hf_pretrained(other)
    ways: dict[str, Callable[[], Any]] = {
        "load": lambda: bridge.load_hf_weights(model),
        "stream": lambda: next(bridge.export_hf_weights(model)),
        "save": lambda: bridge.save_hf_pretrained(model, out),
        "import": lambda: bridge.import_ckpt(out, model),
    }
    said = {}
    for name, way in ways.items():
        with pytest.raises(ValueError, match="does not compute what the checkpoint does") as caught:
            way()
        said[name] = str(caught.value)
    after = model[0].state_dict()
    assert all(tensor.equal(after[name]) for name, tensor in before.items())
    return said


def test_a_model_of_another_function_is_refused_everywhere_before_anything_is_written(
    source: Path, tmp_path: Path
) -> None:
    other = altered(source, tmp_path / "other", **OTHER)
    (said,) = ranks.run(1, refusals, source, other, tmp_path / "out")
    for message in said.values():
        assert {line.strip() for line in message.splitlines()[1:-1]} == WORDS
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_tied_model_is_not_an_untied_checkpoints(source: Path, tmp_path: Path) -> None:
    other = altered(source, tmp_path / "other", tie_word_embeddings=True)
    (said,) = ranks.run(1, refusals, source, other, tmp_path / "out")
    line = "share_embeddings_and_output_weights: True by the checkpoint's config.json, False of the model"
    assert all(line in message for message in said.values())


def chosen(folder: Path, out: Path, **fields: Any) -> None:
    """In a worker: through a model with fields of the user's choice."""
    Layout().initialize()
    bridge = AutoBridge.from_hf_pretrained(folder)
    model = bridge.build_model(bridge.get_model_config(**fields))
    bridge.load_hf_weights(model)
    bridge.save_hf_pretrained(model, out)


def test_what_a_run_chooses_is_not_compared(source: Path, tmp_path: Path) -> None:
    fields = {
        "attention_dropout": 0.1,
        "moe_aux_loss_coeff": 0.01,
        "moe_router_load_balancing_type": "aux_loss",
        "recompute_granularity": "selective",
        "delta_net": "megatron",
        "seq_length": 128,
    }
    ranks.run(1, chosen, source, tmp_path / "out", **fields)
    assert (tmp_path / "out" / "config.json").read_text() == (source / "config.json").read_text()


def test_an_override_of_what_the_checkpoint_fixes_is_refused_with_the_next_step(
    source: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        ValueError, match=r"rotary_base: 10000000 by .*, 500 of the model\n.*change config.json"
    ):
        ranks.run(1, chosen, source, tmp_path / "out", rotary_base=500)
    assert list(tmp_path.iterdir()) == []


@ranks.cpu_only
def test_a_run_is_not_exported_by_another_checkpoint(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, megatron = altered(source, tmp_path / "other", **OTHER), tmp_path / "megatron"
    assert cli.main(["import", str(source), str(megatron)]) == 0
    assert cli.main(["export", str(megatron), str(tmp_path / "out"), "--hf", str(other)]) == 2
    message = capsys.readouterr().err
    for line in WORDS:
        assert line.removesuffix("the model") + f"the run saved in {megatron}" in message
    assert not (tmp_path / "out").exists()
    assert cli.main(["export", str(megatron), str(tmp_path / "out"), "--hf", str(source)]) == 0
