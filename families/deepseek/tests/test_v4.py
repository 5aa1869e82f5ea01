"""DeepSeek-V4 is described and refused, by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from isthmus import cli, registry
from isthmus.bridge import AutoBridge
from isthmus_deepseek.family import FAMILY

CONFIG = {"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"], "hc_mult": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({"embed.weight": torch.zeros(8, 4)}, tmp_path / "model.safetensors")
    return tmp_path


def test_inspect_describes_the_files_and_says_why_not(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", str(folder), "--json", "-"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["tensors"] == 1
    assert "hyper-connections" in captured.err


def test_plan_says_why_not(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(folder / "config.json")]) == 2
    assert "hyper-connections" in capsys.readouterr().err


def test_no_bridge_is_made(folder: Path) -> None:
    with pytest.raises(LookupError, match="DeepSeek-V4 cannot be converted"):
        AutoBridge.from_hf_pretrained(folder)


def test_every_model_type_is_an_entry_point() -> None:
    named = {name for name, entry in registry.families().items() if entry.dist == "isthmus-deepseek"}
    assert named == {*FAMILY.model_types, *FAMILY.refused}


def test_it_is_no_supported_model_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["families", "--json", "-"]) == 0
    listed = [row for row in json.loads(capsys.readouterr().out)["families"] if row["name"] == "deepseek"]
    assert [row["model_types"] for row in listed] == [["deepseek_v2", "deepseek_v3", "deepseek_v32"]]
