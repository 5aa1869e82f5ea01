"""What forward of a vision-language model refuses, whatever the family: one error with all of it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.hosting.vision_arguments import check, check_ids, check_names

IDS = torch.ones(2, 8, dtype=torch.int64)
VOCABULARY = 99
COUNTED = torch.arange(8).expand(2, 8)
SEQUENCES = torch.tensor([0, 3, 16], dtype=torch.int32)
PACKED = torch.cat([torch.arange(3), torch.arange(13)])[None]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (IDS[0], r"input_ids is \(8,\) of torch.int64, expected token ids \(b, s\)"),
        (IDS[None], r"input_ids is \(1, 2, 8\)"),
        (IDS[:, :0], r"input_ids is \(2, 0\)"),
        (IDS.float(), r"input_ids is \(2, 8\) of torch.float32"),
        (IDS.bool(), r"input_ids is \(2, 8\) of torch.bool"),
        (IDS.tolist(), "input_ids is a list, expected a tensor"),
        (None, "input_ids is a NoneType"),
    ],
)
def test_token_ids_are_whole_rows(ids: Any, message: str) -> None:
    check_ids(IDS.int())
    with pytest.raises(ValueError, match=message):
        check_ids(ids)


def test_an_argument_that_there_is_not_is_named() -> None:
    known = ["input_ids", "pixel_values"]
    check_names(known, known)
    with pytest.raises(LookupError, match=r"no argument 'pixel_value', 'lables'; it has input_ids, pixel"):
        check_names(["pixel_values", "pixel_value", "lables"], known)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"per_token": {"labels": IDS[:, :4]}}, r"labels is \(2, 4\), expected \(2, 8\) as input_ids"),
        ({"per_token": {"loss_mask": IDS.flatten()}}, r"loss_mask is \(16,\), expected \(2, 8\)"),
        ({"per_token": {"labels": IDS.tolist()}}, "labels is a list, expected a tensor"),
        ({"vision": {"grid": [[1, 2, 2]]}}, "grid is a list, expected a tensor"),
        ({"position_ids": [0]}, "position_ids is a list"),
        ({"position_ids": COUNTED[:, :4]}, r"position_ids is \(2, 4\), expected \(2, 8\)$"),
        ({"position_ids": COUNTED.expand(3, 2, 8)}, r"position_ids is \(3, 2, 8\), expected \(2, 8\)$"),
        ({"position_ids": COUNTED.expand(4, 2, 8), "axes": 3}, r"expected \(2, 8\) or \(3, 2, 8\)$"),
        ({"position_ids": COUNTED * torch.tensor([[1], [2]])}, "position_ids of row 1 are not 0, 1, 2"),
        (
            {"input_ids": IDS.view(1, 16), "boundaries": SEQUENCES, "position_ids": torch.arange(16)[None]},
            "position_ids of row 0 are not 0, 1, 2, ... in each sequence",
        ),
        (
            {"input_ids": IDS.view(1, 16), "boundaries": SEQUENCES[:2]},
            "packed_seq_params has its last boundary at 3, the row 16 tokens: make padding a sequence",
        ),
        (
            {"input_ids": IDS - 2, "placeholders": (99,)},
            "input_ids has -1 in row 0, 1, expected",
        ),
        ({"input_ids": IDS.clone().index_fill_(1, torch.tensor([7]), 99)}, "input_ids has 99 in row 0, 1"),
        ({"tp": 3, "cp": 2}, "rows of 8 tokens, expected a multiple of 6: tensor_model_parallel_size=3 with"),
    ],
    ids=range(14),
)
def test_what_is_not_of_the_rows_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"position_ids": COUNTED, "per_token": {"labels": IDS, "loss_mask": IDS.float()}},
        {"position_ids": COUNTED.expand(3, 2, 8) * 7, "axes": 3},
        {"input_ids": IDS.view(1, 16), "boundaries": SEQUENCES, "position_ids": PACKED},
        {"tp": 2, "cp": 2},
        {"input_ids": IDS.clone().index_fill_(1, torch.tensor([7]), 99), "placeholders": (99,)},
    ],
    ids=range(6),
)
def test_what_is_of_the_rows_is_taken(arguments: dict[str, Any]) -> None:
    checked(**arguments)


def test_all_that_is_wrong_is_in_one_error() -> None:
    with pytest.raises(ValueError, match="cannot take these arguments") as error:
        checked(position_ids=IDS[0], per_token={"labels": IDS[0]}, vision={"pixels": 5})
    found = [line.split()[0] for line in str(error.value).splitlines()[1:]]
    assert found == ["pixels", "labels", "position_ids"]


def checked(
    input_ids: Tensor = IDS,
    boundaries: Tensor | None = None,
    position_ids: Any = None,
    per_token: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    axes: int = 1,
    placeholders: tuple[int, ...] = (),
    **ranks: int,
) -> None:
    check(
        input_ids,
        boundaries,
        position_ids,
        per_token or {},
        vision or {},
        VOCABULARY,
        placeholders,
        axes,
        **ranks,
    )
