"""The language model of a vision-language checkpoint that transformers wrote, under every prefix there is."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from isthmus import cli
from isthmus.bridge import AutoBridge
from isthmus.hosting.torch_functions import import_modeling
from isthmus.layout import Layout
from isthmus.testing import ranks
from isthmus.testing.verify import Request, verify
from isthmus_qwen3_5.tiny import tiny_config, tiny_moe_config

VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
# What transformers writes, and the other spellings in the wild: (language model, vision tower).
PREFIXES = {
    "published": ("model.language_model.", "model.visual."),
    "without_model": ("language_model.", "visual."),
    "text_names": ("model.", "visual."),
}


def write(folder: Path, kind: str, prefix: str = "published") -> Path:
    """A tiny `qwen3_5` or `qwen3_5_moe` checkpoint of random bf16 weights, as transformers saves it."""
    import transformers

    import_modeling(f"transformers.models.{kind}.modeling_{kind}")  # on a CPU without its GPU kernels
    text = tiny_config() if kind == "qwen3_5" else tiny_moe_config()
    text = {key: value for key, value in text.items() if key != "architectures"}
    name = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[kind]
    vision = VISION | {"model_type": f"{kind}_vision"}
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).bfloat16()
    model.save_pretrained(folder)
    # transformers knows no MTP block: what says that there is one would be untrue.
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"]["mtp_num_hidden_layers"] = 0
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    for written, wanted in zip(PREFIXES["published"], PREFIXES[prefix], strict=True):
        rename(folder, written, wanted)
    return folder


def rename(folder: Path, written: str, wanted: str) -> None:
    tensors = read(folder)
    assert any(name.startswith(written) for name in tensors), f"no tensor begins with {written}"
    renamed = {
        wanted + name.removeprefix(written) if name.startswith(written) else name: tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


def read(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    return tensors


def export(folder: Path, target: Path, layout: Layout) -> None:
    layout.initialize()
    bridge = AutoBridge.from_hf_pretrained(folder, part="text")
    model = bridge.build_model(bridge.get_model_config(**layout.config_overrides()))
    bridge.load_hf_weights(model)
    bridge.save_hf_pretrained(model, target)


def through_megatron(folder: Path, layout: Layout, megatron: Path, out: Path) -> None:
    layout.initialize()
    AutoBridge.from_hf_pretrained(folder, part="text").import_ckpt(megatron)
    AutoBridge.from_megatron(megatron, hf=folder).export_ckpt(megatron, out)


def prove(folder: Path, layout: Layout) -> dict[str, Any]:
    layout.initialize()
    bridge = AutoBridge.from_hf_pretrained(folder, part="text")
    return verify(bridge, layout, Request(grads=True))


def test_an_import_remembers_the_part_and_its_export_has_the_rest(tmp_path: Path) -> None:
    source, megatron, out = write(tmp_path / "hf", "qwen3_5"), tmp_path / "megatron", tmp_path / "out"
    layout = Layout().resolved()
    ranks.run(1, through_megatron, source, layout, megatron, out)
    before, after = read(source), read(out)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name


@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_export_is_the_source_bit_for_bit_under_its_own_names(tmp_path: Path, prefix: str) -> None:
    source = write(tmp_path / "hf", "qwen3_5_moe", prefix)
    layout = Layout(tp=2).resolved()
    ranks.run(2, export, source, tmp_path / "out", layout)
    before, after = read(source), read(tmp_path / "out")
    assert before.keys() == after.keys()
    assert any(".visual." in f".{name}" for name in before)
    for name, tensor in before.items():
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name
    assert (source / "config.json").read_bytes() == (tmp_path / "out" / "config.json").read_bytes()


def test_outputs_and_gradients_are_those_of_hugging_faces_language_model(tmp_path: Path) -> None:
    layout = Layout(tp=2).resolved()
    document = ranks.run(2, prove, write(tmp_path / "hf", "qwen3_5"), layout)[0]
    assert document["failures"] == []
    passed = document["coverage"]["passed_through"]
    assert passed
    assert all(name.startswith("model.visual.") for name in passed)


def test_a_vision_tower_is_left_out_by_choice_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "hf", "qwen3_5")
    assert cli.main(["import", str(source), str(tmp_path / "megatron")]) == 2
    assert "part='text'" in capsys.readouterr().err
    assert not (tmp_path / "megatron").exists()


@pytest.mark.parametrize(("top", "nested"), [(True, False), (False, True)])
def test_ties_that_contradict_each_other_are_refused(tmp_path: Path, top: bool, nested: bool) -> None:
    source = write(tmp_path / "hf", "qwen3_5")
    raw = json.loads((source / "config.json").read_text())
    raw["tie_word_embeddings"] = top
    raw["text_config"]["tie_word_embeddings"] = nested
    (source / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="contradicts itself: tie_word_embeddings="):
        AutoBridge.from_hf_pretrained(source, part="text").megatron_fields  # noqa: B018
