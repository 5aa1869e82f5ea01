"""A vocabulary of other rows than config.json says: the embedding's are used, reported and exported."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isthmus import cli
from isthmus.bridge import AutoBridge
from isthmus.layout import Layout
from isthmus.testing import ranks, reference
from isthmus.testing.verify import Request, verify

ROWS = 160  # of the tiny checkpoints


def restated(source: Path, folder: Path, rows: int) -> Path:
    """A copy of the checkpoint whose config.json says `rows`."""
    shutil.copytree(source, folder)
    text = (folder / "config.json").read_text()
    assert text.count(f'"vocab_size": {ROWS}') == 1
    (folder / "config.json").write_text(text.replace(f'"vocab_size": {ROWS}', f'"vocab_size": {rows}'))
    return folder


def proof(folder: Path, out: Path, layout: Layout) -> dict[str, Any]:
    layout.initialize()
    bridge = AutoBridge.from_hf_pretrained(folder)
    document = verify(bridge, layout, Request(grads=True))
    model = bridge.build_model(bridge.get_model_config(**layout.config_overrides()))
    bridge.load_hf_weights(model)
    bridge.save_hf_pretrained(model, out)
    return document


@pytest.mark.parametrize(
    ("variant", "stated", "field"),
    [("untied", 224, "vocab_size"), ("vision", 128, "text_config.vocab_size")],
    ids=["more", "fewer"],
)
def test_the_embeddings_rows_are_the_vocabulary(
    checkpoints: Callable[[str], Path], tmp_path: Path, variant: str, stated: int, field: str
) -> None:
    source = checkpoints(variant)
    folder = restated(source, tmp_path / "stated", stated)
    with pytest.raises((RuntimeError, ValueError), match=r"size mismatch|mismatched"):
        reference.load(folder, Request().dtype)  # transformers does not load it
    document = ranks.run(2, proof, folder, tmp_path / "out", Layout(tp=2))[0]
    assert document["failures"] == []
    assert document["passed"]
    assert document["overruled"] == {field: ROWS}
    assert (tmp_path / "out" / "config.json").read_text() == (source / "config.json").read_text()
    reference.load(tmp_path / "out", Request().dtype)


def test_inspect_reports_the_rows(
    checkpoints: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = restated(checkpoints("default"), tmp_path / "stated", 224)
    assert cli.main(["inspect", str(folder), "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["overruled"] == {"vocab_size": ROWS}
    assert f"vocab_size={ROWS} by the checkpoint's tensors" in printed.err
    assert cli.main(["inspect", str(checkpoints("default")), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["overruled"] == {}
