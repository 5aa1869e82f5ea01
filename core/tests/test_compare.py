"""Comparing two checkpoint folders: every kind of difference is found, equal means equal bits."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from isthmus.checkpoint.compare import Comparison, compare
from isthmus.checkpoint.reader import CheckpointReader

SOURCE = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.tensor([1.0, float("nan"), -0.0], dtype=torch.bfloat16),
    "c": torch.ones(5, dtype=torch.float8_e4m3fn),
    "d": torch.zeros(2, dtype=torch.int64),
}


@pytest.fixture(autouse=True)
def source(tmp_path: Path) -> None:
    folder(tmp_path / "source", SOURCE)


def folder(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    return path


def compared(tmp_path: Path, tensors: dict[str, torch.Tensor], **options: int) -> Comparison:
    path = tmp_path / "other"
    if not path.exists():
        folder(path, tensors)
    with CheckpointReader(tmp_path / "source") as first, CheckpointReader(path) as second:
        return compare(first, second, **options)


def test_equal_bits_are_equal_nan_and_sign_of_zero_included(tmp_path: Path) -> None:
    assert compared(tmp_path, SOURCE) == Comparison(equal=4)


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (torch.tensor([1.0, float("nan"), 0.0], dtype=torch.bfloat16), "bits"),
        (torch.tensor([1.0, float("nan"), -0.0], dtype=torch.float16), "dtype bfloat16, float16"),
        (torch.tensor([[1.0], [float("nan")], [-0.0]], dtype=torch.bfloat16), "shape (3,), (3, 1)"),
    ],
    ids=["bits", "dtype", "shape"],
)
def test_what_differs_is_said(tmp_path: Path, tensor: torch.Tensor, what: str) -> None:
    assert compared(tmp_path, SOURCE | {"b": tensor}) == Comparison(equal=3, differing={"b": what})


def test_missing_and_added_names_are_told_apart(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in SOURCE.items() if name != "c"} | {"e": torch.ones(1)}
    assert compared(tmp_path, tensors) == Comparison(equal=3, missing=["c"], added=["e"])


def test_ranks_share_the_work_and_cover_it(tmp_path: Path) -> None:
    tensors = {**SOURCE, "a": SOURCE["a"] + 1, "e": torch.ones(1)}
    parts = [compared(tmp_path, tensors, rank=rank, size=3) for rank in range(3)]
    assert sum(part.equal for part in parts) == 3
    assert [name for part in parts for name in part.differing] == ["a"]
    assert [part.added for part in parts] == [["e"], [], []]
