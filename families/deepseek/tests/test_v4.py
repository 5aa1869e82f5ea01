"""DeepSeek-V4 is described and refused, by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from isthmus import cli
from isthmus.bridge import AutoBridge

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


def test_no_model_config_is_made(folder: Path) -> None:
    with pytest.raises(ValueError, match="DeepSeek-V4 cannot be converted"):
        _ = AutoBridge.from_hf_pretrained(folder).megatron_fields
