"""Vision-language checkpoints that transformers wrote, under every prefix there is: whole, or their text."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from isthmus.bridge import AutoBridge
from isthmus.config import HFConfig
from isthmus.layout import Layout
from isthmus.testing import ranks
from isthmus.testing.files import renamed, tensors
from isthmus.testing.verify import Request, verify
from isthmus_gemma_vl.family import FAMILY
from isthmus_gemma_vl.tiny import TINY, tiny_gqa_config, vision_language

VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 4,
    "vision_use_head": False,
}
# What transformers 5 writes, what is published, and what transformers 4.52 to 4.57 wrote.
PREFIXES = {
    "transformers_5": {},
    "published": {"vision_tower.": "vision_tower.vision_model."},
    "model_first": {
        "language_model.model.": "model.language_model.",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    },
}
HEADS = ("lm_head.weight", "language_model.lm_head.weight")


def write(folder: Path, prefix: str = "transformers_5", head: str | None = None, **fields: Any) -> Path:
    """A tiny `gemma3` checkpoint of random bf16 weights, as transformers saves it, with names replaced.

    Args:
        head: name of a copy of the tied embedding.
        fields: of the vision tower's config.
    """
    import transformers

    text = {key: value for key, value in tiny_gqa_config(vocab_size=162).items() if key != "architectures"}
    config = transformers.Gemma3Config(
        text_config=text,  # pyright: ignore[reportArgumentType]
        vision_config=VISION | fields,  # pyright: ignore[reportArgumentType]
        mm_tokens_per_image=9,
        image_token_index=161,
        boi_token_index=158,
        eoi_token_index=159,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).bfloat16()
    model.save_pretrained(folder)
    content = tensors(folder)
    for written, wanted in PREFIXES[prefix].items():
        content = renamed(content, written, wanted)
    if head is not None:
        (embedding,) = (tensor for name, tensor in content.items() if name.endswith("embed_tokens.weight"))
        content[head] = embedding.clone()
    save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def export(folders: dict[Path, Path], layout: Layout, part: str = "text") -> None:
    layout.initialize()
    for folder, target in folders.items():
        bridge = AutoBridge.from_hf_pretrained(folder, part=part)
        model = bridge.build_model(bridge.get_model_config(**layout.config_overrides()))
        bridge.load_hf_weights(model)
        bridge.save_hf_pretrained(model, target)


def prove(folder: Path, layout: Layout) -> dict[str, Any]:
    layout.initialize()
    return verify(AutoBridge.from_hf_pretrained(folder, part="text"), layout, Request(grads=True))


@pytest.mark.parametrize("part", ["text", "all"])
def test_exports_are_the_source_bit_for_bit_under_its_own_names(tmp_path: Path, part: str) -> None:
    folders = {write(tmp_path / prefix, prefix): tmp_path / f"{prefix}-out" for prefix in PREFIXES}
    for head in HEADS:
        folders[write(tmp_path / head, "published", head)] = tmp_path / f"{head}-out"
    folders[write(tmp_path / "head", vision_use_head=True)] = tmp_path / "head-out"
    ranks.run(2, export, folders, Layout(tp=2).resolved(), part)
    for source, target in folders.items():
        before, after = tensors(source), tensors(target)
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name
        assert (source / "config.json").read_bytes() == (target / "config.json").read_bytes()


def test_transformers_loads_every_export_strictly(tmp_path: Path) -> None:
    import transformers

    folders = {write(tmp_path / prefix, prefix): tmp_path / f"{prefix}-out" for prefix in PREFIXES}
    ranks.run(1, export, folders, Layout().resolved(), "all")
    for target in folders.values():
        loaded: Any = transformers.Gemma3ForConditionalGeneration.from_pretrained(
            target, output_loading_info=True
        )
        assert not any(loaded[1].values()), loaded[1]


def test_outputs_and_gradients_are_those_of_hugging_faces_language_model(tmp_path: Path) -> None:
    document = ranks.run(2, prove, write(tmp_path / "hf", "published"), Layout(tp=2).resolved())[0]
    assert document["failures"] == []
    passed = document["coverage"]["passed_through"]
    assert {name.split(".")[0] for name in passed} == {"vision_tower", "multi_modal_projector"}


@pytest.mark.parametrize(
    ("top", "nested", "head", "expected"),
    [
        (None, None, None, True),
        (None, True, None, True),
        (True, True, HEADS[0], True),  # repeated
        (True, True, HEADS[1], True),
        (False, False, HEADS[0], False),
        (False, False, HEADS[1], False),
        (False, None, HEADS[0], False),
        (False, False, None, "says tie_word_embeddings=False, and the checkpoint has no lm_head.weight"),
        (None, False, HEADS[0], "tie_word_embeddings=True by default, and .*=False"),
        (None, False, None, "tie_word_embeddings=True by default, and .*=False"),
        (True, False, HEADS[0], "tie_word_embeddings=True, and text_config.tie_word_embeddings=False"),
        (False, True, None, "tie_word_embeddings=False, and text_config.tie_word_embeddings=True"),
    ],
)
def test_the_head_is_tied_as_both_levels_and_the_files_say(
    top: bool | None, nested: bool | None, head: str | None, expected: bool | str
) -> None:
    raw = vision_language(tiny_gqa_config())
    for section, value in ((raw, top), (raw["text_config"], nested)):
        section.pop("tie_word_embeddings")
        section |= {} if value is None else {"tie_word_embeddings": value}
    hf = HFConfig(raw)
    keys = frozenset(TINY.tensors(hf)) - {"lm_head.weight"} | {head} - {None}
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            FAMILY.model_config(hf, keys)
        return
    found = FAMILY.model_config(hf, keys)
    assert found["share_embeddings_and_output_weights"] is expected
    rules = FAMILY.weights(hf, keys, SimpleNamespace(**found)).megatron
    words = "embedding.word_embeddings.weight"
    if expected:
        assert [tensor.name for tensor in rules[words].also] == ([head] if head else [])
    else:
        assert [tensor.name for tensor in rules["output_layer.weight"].hf] == [head]
