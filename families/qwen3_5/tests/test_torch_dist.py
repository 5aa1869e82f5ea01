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
from isthmus_qwen3_5.family import FAMILY

launch.preload("transformers.modeling_utils")


@pytest.mark.parametrize(
    ("variant", "layouts", "fields"),
    [
        # With a prediction block on the last stage, Megatron itself can neither save nor load tied weights.
        ("tied", (Layout(tp=2), Layout(pp=2)), {}),
        ("tied", (Layout(pp=2), Layout(tp=2)), {}),
        ("moe", (Layout(tp=2), Layout(pp=2)), {"delta_net": "megatron"}),
    ],
    ids=["tied-loaded", "tied-saved", "moe"],
)
def test_another_layout_exports_what_one_imported(
    tmp_path: Path, variant: str, layouts: tuple[Layout, Layout], fields: dict[str, Any]
) -> None:
    write_tiny(FAMILY, tmp_path / "hf", variant)
    first, second = layouts
    ranks.run(2, import_, tmp_path / "hf", first, tmp_path / "megatron", fields)
    ranks.run(2, export, tmp_path / "megatron", second, tmp_path / "out")
    with CheckpointReader(tmp_path / "hf") as before, CheckpointReader(tmp_path / "out") as after:
        outcome = compare(before, after)
        assert outcome.equal == len(before.tensors)
        assert not outcome.added
