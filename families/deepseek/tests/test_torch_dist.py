"""HF -> Megatron's torch_dist checkpoint -> HF, over a change of layout."""

from pathlib import Path
from typing import Any

import pytest

from isthmus import launch
from isthmus.checkpoint.compare import compare
from isthmus.checkpoint.reader import CheckpointReader
from isthmus.layout import Layout
from isthmus.testing import ranks
from isthmus.testing.tiny import write_tiny
from isthmus.testing.trip import export, import_
from isthmus_deepseek.family import FAMILY

launch.preload("transformers.modeling_utils")


@pytest.mark.parametrize(
    ("variant", "fields"),
    [
        ("lite", {}),
        ("default", {}),
        ("moonlight", {}),
        ("default", {"attention": "hosted"}),
    ],
    ids=["v2-lite", "v3", "v3-moonlight", "v3-hosted"],
)
def test_another_layout_exports_what_one_imported(
    tmp_path: Path, variant: str, fields: dict[str, Any]
) -> None:
    write_tiny(FAMILY, tmp_path / "hf", variant)
    wide, deep = Layout(tp=2, ep=2), Layout(pp=2)
    ranks.run(2, import_, tmp_path / "hf", wide, tmp_path / "megatron", fields)
    ranks.run(2, export, tmp_path / "megatron", deep, tmp_path / "out")
    with CheckpointReader(tmp_path / "hf") as before, CheckpointReader(tmp_path / "out") as after:
        outcome = compare(before, after)
        assert outcome.equal == len(before.tensors)
        assert not outcome.added
