"""A quantised checkpoint through Megatron: the model of its dequantised copy; back to bf16, and to codes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from isthmus import registry
from isthmus.checkpoint.compare import compare
from isthmus.checkpoint.dtypes import same_bits
from isthmus.checkpoint.reader import CheckpointReader
from isthmus.layout import Layout
from isthmus.testing import ranks, reference
from isthmus.testing.dequantise import plain_folder
from isthmus.testing.tiny import write_tiny
from isthmus.tiny import QUANTISED

# These two divide every kind of tensor, by rows and by columns, at places that are in the middle of blocks.
LAYOUTS = {
    "fp8_block": Layout(tp=2, ep=2),
    "fp8_block_stacked": Layout(tp=2, ep=2),
    "mxfp4": Layout(ep=2, dp=2),
    "mxfp4_packed": Layout(tp=2, etp=2),
    "nvfp4": Layout(tp=2, etp=2),
    "int4_asymmetric": Layout(tp=2, etp=2),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The folder of a quantised variant, written once."""
    root = tmp_path_factory.mktemp("quantised")

    def folder(variant: str) -> Path:
        if not (root / variant).exists():
            write_tiny(registry.family("qwen3_next"), root / variant, variant)
        return root / variant

    return folder


def both(layout: Layout, folder: Path, out: Path) -> dict[str, list]:
    """Load the checkpoint and its plain copy into models, and write the first in both forms."""
    from isthmus.bridge import AutoBridge
    from isthmus.names import live_tensors

    layout.initialize()
    bridge = AutoBridge.from_hf_pretrained(folder)
    model = bridge.build_model(bridge.get_model_config(**layout.config_overrides()))
    bridge.load_hf_weights(model)
    bridge.save_hf_pretrained(model, out / "source", dtype="source")
    bridge.save_hf_pretrained(model, out / "plain")
    streamed = dict(bridge.export_hf_weights(model, dtype="source"))
    with CheckpointReader(folder) as stored:
        synced = [
            n for n in stored.tensors if n not in streamed or not same_bits(streamed[n], stored.slice(n))
        ]
    with plain_folder(folder) as plain:
        other = AutoBridge.from_hf_pretrained(plain)
        expected = other.build_model(other.get_model_config(**layout.config_overrides()))
        other.load_hf_weights(expected)
    pairs = list(zip(live_tensors(model), live_tensors(expected), strict=True))
    different = [a.canonical for a, b in pairs if not same_bits(a.tensor.detach(), b.tensor.detach())]
    return {"different": different, "synced": synced, "parameters": [a.canonical for a, _ in pairs]}


@pytest.mark.parametrize("variant", LAYOUTS)
def test_the_model_is_that_of_the_dequantised_checkpoint(variant, source, tmp_path):
    layout = LAYOUTS[variant].resolved()
    folder = source(variant)
    for found in ranks.run(layout.world_size, both, layout, folder, tmp_path):
        assert found["parameters"]
        assert found["different"] == []
        assert found["synced"] == []
    with CheckpointReader(folder) as before, CheckpointReader(tmp_path / "source") as after:
        outcome = compare(before, after)
    assert not [*outcome.missing, *outcome.added, *outcome.differing]
    assert (folder / "config.json").read_text() == (tmp_path / "source" / "config.json").read_text()

    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    stated = json.loads((folder / "config.json").read_text())
    del stated["quantization_config"]
    assert config == stated
    with plain_folder(folder) as plain:
        expected = load_file(plain / "model.safetensors")
        found = {}
        for path in (tmp_path / "plain").glob("*.safetensors"):  # a rank writes its own
            found |= load_file(path)
        assert found.keys() == expected.keys()
        assert [name for name in found if not same_bits(found[name], expected[name])] == []
        loaded = reference.load(tmp_path / "plain", torch.float32).hf
        tokens = torch.arange(2, 42)[None].to(loaded.device)
        with torch.no_grad():
            logits = reference.load(plain, torch.float32).hf(tokens).logits
            assert torch.equal(loaded(tokens).logits, logits)


def through_torch_dist(layout: Layout, folder: Path, out: Path) -> None:
    from isthmus.bridge import AutoBridge

    layout.initialize()
    AutoBridge.from_hf_pretrained(folder).import_ckpt(out / "megatron")
    AutoBridge.from_megatron(out / "megatron").export_ckpt(out / "megatron", out / "again", dtype="source")


@pytest.mark.parametrize("variant", ["fp8_block", "fp8_tensor", "mxfp4", "nvfp4_packed", "int4_asymmetric"])
def test_a_megatron_checkpoint_gives_the_codes_again_without_the_source(variant, source, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(source(variant), folder)
    ranks.run(1, through_torch_dist, Layout().resolved(), folder, tmp_path)
    with CheckpointReader(folder) as before, CheckpointReader(tmp_path / "again") as after:
        outcome = compare(before, after)
    assert not [*outcome.missing, *outcome.added, *outcome.differing]


@pytest.mark.parametrize("variant", QUANTISED)
def test_the_plain_copy_of_each_tiny_variant_is_what_is_read(variant, source):
    from isthmus.bridge import AutoBridge

    reader = AutoBridge.from_hf_pretrained(source(variant)).reader
    with plain_folder(source(variant)) as plain:
        expected = load_file(plain / "model.safetensors")
    assert set(reader.tensors) == set(expected)
    assert [name for name in expected if not same_bits(reader.slice(name), expected[name])] == []
    assert {item.name.removesuffix(".weight") for item in reader.quantised.values()}


def without_mtp(folder: Path, out: Path) -> None:
    from isthmus.bridge import AutoBridge

    layout = Layout().resolved()
    layout.initialize()
    bridge = AutoBridge.from_hf_pretrained(folder)
    config = bridge.get_model_config(**layout.config_overrides(), mtp_num_layers=None)
    model = bridge.build_model(config)
    bridge.load_hf_weights(model)
    bridge.save_hf_pretrained(model, out / "source", dtype="source")
    bridge.save_hf_pretrained(model, out / "plain")


def test_what_the_model_does_not_hold_is_passed_through_as_codes_or_as_numbers(source, tmp_path):
    folder = source("fp8_block")
    ranks.run(1, without_mtp, folder, tmp_path)
    with CheckpointReader(folder) as before, CheckpointReader(tmp_path / "source") as after:
        outcome = compare(before, after)
    assert not [*outcome.missing, *outcome.added, *outcome.differing]
    with plain_folder(folder) as plain:
        expected = load_file(plain / "model.safetensors")
    found = load_file(tmp_path / "plain" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert [name for name in found if not same_bits(found[name], expected[name])] == []
