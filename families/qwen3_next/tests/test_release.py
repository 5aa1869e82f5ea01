"""What an earlier release imported, this one exports.

`data/import-VERSION/` holds a checkpoint of two layers (`hf/`: one delta net, one attention, MTP, `A_log` in
fp32) and what `isthmus import hf megatron` of that version made of it. A release adds its own, and leaves
those of earlier ones as they are.
"""

import json
from pathlib import Path

import pytest
import torch

import isthmus
from isthmus import cli
from isthmus.testing import ranks
from isthmus.testing.files import tensors

pytestmark = ranks.cpu_only

IMPORTS = sorted((Path(__file__).parent / "data").glob("import-*"))


def recorded(megatron: Path) -> dict[str, str]:
    return json.loads((megatron / "isthmus.json").read_text())


def other_files(folder: Path) -> dict[str, bytes]:
    """All files but weights and their index."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if ".safetensors" not in path.name}


def test_there_is_an_import_to_read() -> None:
    assert IMPORTS


@pytest.mark.parametrize("folder", IMPORTS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("layout", [(), ("--tp", "2")], ids=["tp1", "tp2"])
def test_the_export_is_the_source_bit_for_bit(folder: Path, layout: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert cli.main(["export", str(folder / "megatron"), str(out), *layout]) == 0
    assert other_files(out) == other_files(folder / "hf")
    found, expected = tensors(out), tensors(folder / "hf")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("folder", IMPORTS, ids=lambda folder: folder.name)
def test_an_import_names_the_release_that_made_it(folder: Path, tmp_path: Path) -> None:
    assert f"import-{recorded(folder / 'megatron')['isthmus']}" == folder.name
    assert cli.main(["import", str(folder / "hf"), str(tmp_path / "megatron")]) == 0
    assert recorded(tmp_path / "megatron")["isthmus"] == isthmus.__version__
