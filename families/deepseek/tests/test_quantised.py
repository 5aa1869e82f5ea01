"""DeepSeek in FP8 as published layouts have it, and in other formats: the model of what the codes mean."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from isthmus.bridge import AutoBridge
from isthmus.checkpoint.compare import compare
from isthmus.checkpoint.dtypes import same_bits
from isthmus.checkpoint.reader import CheckpointReader
from isthmus.layout import Layout
from isthmus.testing import ranks
from isthmus.testing.dequantise import plain_folder
from isthmus.testing.proof import proof
from isthmus.testing.tiny import write_tiny
from isthmus.testing.verify import Request
from isthmus.tiny import QUANTISED
from isthmus_deepseek.family import FAMILY


def e4m3(code: int) -> float:
    """What a byte of FP8 e4m3 means: a sign, four bits of exponent with a bias of 7, three of mantissa."""
    exponent, mantissa = code >> 3 & 15, code & 7
    size = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2 ** (exponent - 7)
    return -size if code & 128 else size


def numbers(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Each code times the scale of its block, in float32, rounded to bfloat16 once."""
    meaning = torch.tensor([e4m3(code) for code in range(256)])
    rows, cols = (torch.arange(size) // side for size, side in zip(codes.shape, block, strict=True))
    return (meaning[codes.view(torch.uint8).long()] * scales[rows][:, cols]).bfloat16()


def plain_copy(folder: Path, target: Path) -> None:
    """The checkpoint in bfloat16, as DeepSeek's releases define it: `weight` and `weight_scale_inv`."""
    config = json.loads((folder / "config.json").read_text())
    block = tuple(config.pop("quantization_config")["weight_block_size"])
    stored = load_file(folder / "model.safetensors")
    plain = {
        name: numbers(tensor, stored[f"{name}_scale_inv"], block)
        if tensor.dtype == torch.float8_e4m3fn
        else tensor
        for name, tensor in stored.items()
        if not name.endswith("_scale_inv")
    }
    target.mkdir()
    save_file(plain, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config))


def loaded(folder: Path, layout: Layout, out: Path | None = None) -> dict[str, Tensor]:
    """What this rank's model holds of the checkpoint; written to `out` in the source's format."""
    bridge = AutoBridge.from_hf_pretrained(folder)
    model = bridge.build_model(bridge.get_model_config(**layout.config_overrides()))
    bridge.load_hf_weights(model)
    if out is not None:
        bridge.save_hf_pretrained(model, out, dtype="source")
    state = model[0].state_dict()
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def different(folder: Path, plain: Path, out: Path, layout: Layout) -> tuple[int, list[str]]:
    """How many tensors this rank holds, and those that are others in a model of the plain checkpoint."""
    layout.initialize()
    found, expected = loaded(folder, layout, out), loaded(plain, layout)
    assert found.keys() == expected.keys()
    return len(found), [name for name in found if not same_bits(found[name], expected[name])]


def test_fp8_blocks_make_the_model_of_their_numbers_and_come_back_code_by_code(tmp_path: Path) -> None:
    source, layout = tmp_path / "fp8", Layout(tp=2, ep=2).resolved()
    write_tiny(FAMILY, source, "default+fp8_block", seed=1)
    plain_copy(source, tmp_path / "plain")
    for count, wrong in ranks.run(
        layout.world_size, different, source, tmp_path / "plain", tmp_path / "again", layout
    ):
        assert count
        assert wrong == []
    with CheckpointReader(source) as before, CheckpointReader(tmp_path / "again") as after:
        scales = [name for name in before.tensors if name.endswith("_scale_inv")]
        outcome = compare(before, after)
    assert scales
    assert outcome.equal == len(before.tensors)
    assert not outcome.added
    assert (source / "config.json").read_text() == (tmp_path / "again" / "config.json").read_text()


def without_mtp(folder: Path, out: Path) -> None:
    Layout().initialize()
    bridge = AutoBridge.from_hf_pretrained(folder)
    model = bridge.build_model(bridge.get_model_config(mtp_num_layers=None))
    bridge.load_hf_weights(model)
    bridge.save_hf_pretrained(model, out / "plain", max_shard_size="100KB")
    bridge.save_hf_pretrained(model, out / "source", max_shard_size="100KB", dtype="source")


def test_an_added_layer_brings_no_scales_into_a_plain_checkpoint_and_the_total_is_exact(
    tmp_path: Path,
) -> None:
    """KF 115: what the model lacks comes from the source, as numbers where numbers are written."""
    source = tmp_path / "fp8"
    write_tiny(FAMILY, source, "default+fp8_block", seed=1)
    plain_copy(source, tmp_path / "expected")
    ranks.run(1, without_mtp, source, tmp_path)
    for out, expected in (("plain", tmp_path / "expected"), ("source", source)):
        index = json.loads((tmp_path / out / "model.safetensors.index.json").read_text())
        files = sorted((tmp_path / out).glob("*.safetensors"))
        found = [load_file(path) for path in files]
        assert len(files) > 3
        assert sum(map(len, found)) == len(index["weight_map"]), "no tensor is in two files"
        assert index["metadata"]["total_size"] == sum(t.nbytes for each in found for t in each.values())
        tensors = {name: tensor for each in found for name, tensor in each.items()}
        stated = load_file(expected / "model.safetensors")
        assert tensors.keys() == stated.keys() == index["weight_map"].keys()
        assert [name for name in stated if not same_bits(tensors[name], stated[name])] == []


@pytest.mark.parametrize("storage", QUANTISED)
def test_partial_blocks_and_groups_mean_the_same_to_the_reader_and_to_the_plain_copy(
    tmp_path: Path, storage: str
) -> None:
    """The latent of queries has 48 columns: one group of 32 and a half."""
    write_tiny(FAMILY, tmp_path / "hf", f"v2+{storage}")
    with plain_folder(tmp_path / "hf") as plain:
        expected = load_file(plain / "model.safetensors")
    reader = AutoBridge.from_hf_pretrained(tmp_path / "hf").reader
    assert reader.tensors.keys() == expected.keys()
    assert [name for name in expected if not same_bits(reader.slice(name), expected[name])] == []


@pytest.mark.parametrize(
    ("variant", "layout", "grads"),
    [
        ("default+fp8_block", Layout(tp=2, ep=2), True),
        ("lite+mxfp4", Layout(tp=2), False),
        ("no_mtp+nvfp4", Layout(tp=2), False),
        ("v2+int4", Layout(tp=2), False),
    ],
    ids=str,
)
def test_outputs_are_hugging_faces_of_the_dequantised_checkpoint(
    tmp_path: Path, variant: str, layout: Layout, grads: bool
) -> None:
    write_tiny(FAMILY, tmp_path / "hf", variant, seed=1)
    document = proof(tmp_path / "hf", layout, Request(grads=grads))
    assert document["failures"] == []
    assert document["forward"]["argmax_agreement"] == 1.0
    assert (document["gradients"] is not None) == grads


@pytest.mark.parametrize("mistake", ["codes taken for numbers", "scales the wrong way round"])
def test_numbers_that_no_model_has_fail_though_hugging_face_agrees(tmp_path: Path, mistake: str) -> None:
    """The reference is given the same wrong scales, so that only their size tells."""
    folder = tmp_path / "hf"
    write_tiny(FAMILY, folder, "no_mtp+fp8_block", seed=1)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_scale_inv") and ".experts." in name]:
        scale = tensors[name]
        tensors[name] = torch.ones_like(scale) if mistake.startswith("codes") else 1 / scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (document,) = ranks.run(1, proof, folder, Layout().resolved(), Request())
    (line,) = [line for line in document["failures"] if "implausible" in line]
    assert "model.layers.{1..3}.mlp.experts.{0..15}" in line
    assert not [name for name in document["quantisation"]["implausible"] if ".experts." not in name]
