"""Gemma 4 is described and refused, by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from isthmus import cli


@pytest.mark.parametrize("model_type", ["gemma4", "gemma4_text"])
def test_inspect_describes_the_files_and_says_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model_type: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    save_file({"model.embed_tokens.weight": torch.zeros(8, 4)}, tmp_path / "model.safetensors")
    assert cli.main(["inspect", str(tmp_path), "--json", "-"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["tensors"] == 1
    assert "Gemma 4 cannot be converted" in captured.err
    assert cli.main(["plan", str(tmp_path)]) == 2
    assert "global_head_dim" in capsys.readouterr().err
