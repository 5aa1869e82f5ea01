"""`A_log` and the delta net's norm of Qwen3.5, float32 in a bf16 model: at every stage the source's bits."""

from pathlib import Path

import pytest

from isthmus import launch
from isthmus.layout import Layout
from isthmus.testing import ranks
from isthmus.testing.pins import pinned_source, stages
from isthmus_qwen3_5.family import FAMILY

launch.preload("transformers.modeling_utils")
pytestmark = ranks.cpu_only


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pinned_source(FAMILY, tmp_path_factory.mktemp("hf") / "source", "default")


def test_pinned_parameters_keep_the_sources_bits_through_training(source: Path, tmp_path: Path) -> None:
    for found in launch.run(2, stages, source, tmp_path, Layout(tp=2), True, None):
        assert len(found) == 8
        assert not any(found.values()), found


@pytest.mark.parametrize(
    ("broken", "seen"),
    [
        ("load", "loaded"),
        ("wrapper", "cast"),
        ("main copy", "main copy"),
        ("save", "resumed"),
        ("export", "exported"),
    ],
)
def test_rounding_at_any_cast_is_seen(source: Path, tmp_path: Path, broken: str, seen: str) -> None:
    (found,) = launch.run(1, stages, source, tmp_path, Layout(), True, broken)
    assert len(found[seen]) == 2 * 3, found  # of three delta nets
