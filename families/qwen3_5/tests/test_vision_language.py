"""Vision-language checkpoints that transformers wrote, under every prefix there is: whole, or their text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from isthmus.bridge import AutoBridge
from isthmus.cli import main
from isthmus.config import HFConfig
from isthmus.hosting.torch_functions import import_modeling
from isthmus.layout import Layout
from isthmus.testing import ranks, reference
from isthmus.testing.files import renamed, tensors
from isthmus.testing.tiny import write_tiny
from isthmus.testing.verify import Request, verify
from isthmus_qwen3_5.family import FAMILY
from isthmus_qwen3_5.tiny import SHRUNK_TOKENS, tiny_config, tiny_moe_config, vision_language

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
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, **SHRUNK_TOKENS)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).bfloat16()
    model.save_pretrained(folder)
    # transformers saves no MTP block, and a config that says that there is one; an export keeps both so.
    raw = json.loads((folder / "config.json").read_text())
    assert raw["text_config"]["mtp_num_hidden_layers"] == 1
    content = tensors(folder)
    for written, wanted in zip(PREFIXES["published"], PREFIXES[prefix], strict=True):
        content = renamed(content, written, wanted)
    save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def export(folder: Path, target: Path, layout: Layout, part: str | None) -> None:
    layout.initialize()
    bridge = AutoBridge.from_hf_pretrained(folder, part=part)
    model = bridge.build_model(bridge.get_model_config(**layout.config_overrides()))
    bridge.load_hf_weights(model)
    streamed = {name: tensor.clone() for name, tensor in bridge.export_hf_weights(model)}
    bridge.save_hf_pretrained(model, target)
    saved = tensors(target)
    assert streamed.keys() == saved.keys() if part is None else streamed.keys() <= saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in streamed.items())


def through_megatron(folder: Path, layout: Layout, megatron: Path, out: Path, part: str) -> None:
    layout.initialize()
    AutoBridge.from_hf_pretrained(folder, part=part).import_ckpt(megatron)
    AutoBridge.from_megatron(megatron, hf=folder).export_ckpt(megatron, out)


def prove(folder: Path, layout: Layout) -> dict[str, Any]:
    layout.initialize()
    bridge = AutoBridge.from_hf_pretrained(folder, part="text")
    return verify(bridge, layout, Request(grads=True))


@pytest.mark.parametrize("part", ["text", "all"])
def test_an_import_remembers_the_part_and_its_export_has_the_rest(tmp_path: Path, part: str) -> None:
    source, megatron, out = write(tmp_path / "hf", "qwen3_5"), tmp_path / "megatron", tmp_path / "out"
    layout = Layout().resolved()
    ranks.run(1, through_megatron, source, layout, megatron, out, part)
    before, after = tensors(source), tensors(out)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "Megatron's own builds no vision tower"),
        (["--set", "part=text"], "start Megatron's training script with"),
    ],
)
def test_an_import_says_what_can_train_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], expected: str
) -> None:
    source = write(tmp_path / "hf", "qwen3_5")
    assert main(["import", str(source), str(tmp_path / "megatron"), *options]) == 0
    assert expected in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("variant", "parts"), [("vision", r"it has 'all' and 'text'"), ("default", r"it has 'text'")]
)
def test_a_part_that_there_is_not_is_refused_at_once(tmp_path: Path, variant: str, parts: str) -> None:
    write_tiny(FAMILY, tmp_path / "hf", variant)
    with pytest.raises(LookupError, match=rf"no part 'vision' of a checkpoint of 'qwen3_5.*': {parts}$"):
        AutoBridge.from_hf_pretrained(tmp_path / "hf", part="vision")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("freeze=['visoin']", "cannot freeze 'visoin'; the parts are vision, projector, language"),
        ("part=vision", "part must be 'text' or 'all', got 'vision'"),
    ],
)
def test_a_misspelt_part_is_not_called_a_matter_of_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str, message: str
) -> None:
    write_tiny(FAMILY, tmp_path / "hf", "vision")
    assert main(["plan", str(tmp_path / "hf"), "--set", field]) == 1
    found = " ".join(capsys.readouterr().out.split())
    assert f"the model config asks for what there is not: {message}" in found
    assert "layout" not in found


@pytest.mark.parametrize(
    ("prefix", "part"), [*((prefix, "all") for prefix in PREFIXES), ("published", "text")]
)
def test_the_export_is_the_source_bit_for_bit_under_its_own_names(
    tmp_path: Path, prefix: str, part: str
) -> None:
    source = write(tmp_path / "hf", "qwen3_5_moe", prefix)
    layout = Layout(tp=2).resolved()
    ranks.run(2, export, source, tmp_path / "out", layout, part)
    before, after = tensors(source), tensors(tmp_path / "out")
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


@pytest.mark.parametrize(
    ("top", "nested", "head", "expected"),
    [
        (True, True, False, True),
        (True, True, True, True),  # repeated
        (True, None, False, True),
        (None, True, False, True),
        (None, None, True, False),
        (None, False, True, False),
        (False, None, True, False),
        (False, False, True, False),
        (False, False, False, "says tie_word_embeddings=False, and the checkpoint has no lm_head.weight"),
        (None, False, False, "says tie_word_embeddings=False, and the checkpoint has no lm_head.weight"),
        (None, True, True, "tie_word_embeddings=False by default, and text_config.tie_word_embeddings=True"),
        (True, False, True, "tie_word_embeddings=True, and text_config.tie_word_embeddings=False"),
        (False, True, False, "tie_word_embeddings=False, and text_config.tie_word_embeddings=True"),
    ],
)
def test_the_head_is_tied_as_both_levels_and_the_files_say(
    top: bool | None, nested: bool | None, head: bool, expected: bool | str
) -> None:
    raw = vision_language(tiny_config())
    for section, value in ((raw, top), (raw["text_config"], nested)):
        section.pop("tie_word_embeddings")
        section |= {} if value is None else {"tie_word_embeddings": value}
    names = frozenset(FAMILY.tiny.tensors(HFConfig(raw)) if FAMILY.tiny else ())
    keys = names if head else names - {"lm_head.weight"}
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            FAMILY.model_config(HFConfig(raw), keys)
    else:
        found = FAMILY.model_config(HFConfig(raw), keys)
        assert found["share_embeddings_and_output_weights"] is expected


def test_a_prediction_block_of_another_name_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "hf"
    write_tiny(FAMILY, folder, "vision")
    content = renamed(tensors(folder), "mtp.", "language_model.mtp.")
    save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
    assert main(["plan", str(folder), "--json", "-"]) == 1
    problems = " ".join(json.loads(capsys.readouterr().out)["problems"])
    assert all(name in problems for name in content if ".mtp.fc" in name or ".mtp.norm" in name)
    assert "model.layers" not in problems


@pytest.mark.parametrize(("level", "head"), [("tie_word_embeddings", False), ("text_config", True)])
def test_an_export_states_the_tie_at_both_levels(tmp_path: Path, level: str, head: bool) -> None:
    write_tiny(FAMILY, tmp_path / "hf", "vision_tied")
    if head:
        content = tensors(tmp_path / "hf")
        content["lm_head.weight"] = content["model.language_model.embed_tokens.weight"].clone()
        save_file(content, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((tmp_path / "hf" / "config.json").read_text())
    silent = raw if level == "tie_word_embeddings" else raw["text_config"]
    del silent["tie_word_embeddings"]
    (tmp_path / "hf" / "config.json").write_text(json.dumps(raw, indent=2))
    ranks.run(1, export, tmp_path / "hf", tmp_path / "out", Layout().resolved(), None)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["tie_word_embeddings"] is written["text_config"]["tie_word_embeddings"] is True
    assert ("lm_head.weight" in tensors(tmp_path / "out")) == head
    model = reference.load(tmp_path / "out", torch.float32, vision=True).hf
    assert model.lm_head.weight is model.get_decoder().embed_tokens.weight
