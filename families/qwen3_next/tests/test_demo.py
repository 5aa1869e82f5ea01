"""`isthmus demo`: the whole way of a checkpoint, and that its checks can fail."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from isthmus import cli
from isthmus.testing.demo import Journey, Stops, checks


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """The folders and the document of one run of 3 steps."""
    folder = tmp_path_factory.mktemp("demo")
    document = folder / "demo.json"
    words = ["demo", "--family", "qwen3_next", "--steps", "3", "--out", str(folder / "out")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        code = cli.main([*words, "--json", str(document)])
    assert code == 0
    return folder / "out", json.loads(document.read_text())


def test_every_check_passes_and_the_loss_falls(demo: tuple[Path, dict]) -> None:
    _, document = demo
    assert document["passed"]
    assert [check["passed"] for check in document["checks"]] == [True] * 5
    assert document["losses"] == sorted(document["losses"], reverse=True)
    assert document["layout"] == {
        **dict.fromkeys(("vp", "ep", "etp", "cp", "dp"), 1),
        **{"tp": 2, "pp": 2, "sp": True, "pipeline_layout": None},
    }


def test_a_wrong_tensor_wrong_logits_and_an_idle_optimizer_are_found(
    demo: tuple[Path, dict], tmp_path: Path
) -> None:
    stops = Stops(tmp_path / "out")
    shutil.copytree(demo[0], stops.folder)
    logits = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    tensors = 195
    good = Journey(tensors, logits, [5.0, 1.0], logits)
    assert all(check.passed for check in checks(stops, good, (logits, logits)))

    file = next(stops.returned.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    shutil.rmtree(stops.trained)
    shutil.copytree(stops.source, stops.trained)
    bad = Journey(tensors, logits, [5.0, 4.9], logits * 1.001)
    assert [check.passed for check in checks(stops, bad, (logits.flip(0), logits))] == [False] * 5


def test_a_folder_with_files_in_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "note.txt").write_text("mine")
    assert cli.main(["demo", "--out", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
