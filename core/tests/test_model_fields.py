"""Fields of the model config that a user sets: their names, and values of their types."""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Optional, Union

import pytest
import torch

from isthmus.model_fields import check_kinds, with_dtypes


class Backend(enum.Enum):
    FLASH = 1


@dataclass
class Inner:
    count: int = 1
    width: Optional[int] = None  # noqa: UP045 - as Megatron writes it
    rate: float = 0.5
    lists: Union[int, list[int]] = 1  # noqa: UP007
    kind: Literal["a", "b", 3] = "a"
    window: tuple[int, int] | None = None
    switch: bool = False
    function: Callable[[int], int] = abs
    backend: Backend = Backend.FLASH
    params_dtype: torch.dtype = torch.float32
    wrong_default: int = None  # type: ignore[assignment]  # Megatron has such
    made: int = field(init=False, default=0)


@dataclass
class Outer:
    name: str = "x"
    anything: Any = None


VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "count": ([0, -3], [1.0, "1", True, None, [1]]),
    "width": ([None, 4], ["x", 4.0]),
    "rate": ([0.5, 1], ["0.5", None, True]),
    "lists": ([1, [1, 0]], [["x"], "x", (1,), [1.0]]),
    "kind": (["a", 3], ["c", 1, None, 3.0]),
    "window": ([None, (1, 2), [1, 2]], [(1,), 5, ("a", "b")]),
    "switch": ([True, False], [0, "true", None]),
    "function": ([len, Inner], ["abs", 5]),
    "backend": ([Backend.FLASH], ["FLASH", 1]),
    "params_dtype": ([torch.bfloat16], ["bfloat16", 16]),
    "wrong_default": ([None, 5], ["x"]),
    "name": (["y"], [5, None]),
    "anything": ([5, None, "x"], []),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_field_takes_values_of_its_type_and_no_others(name: str) -> None:
    good, bad = VALUES[name]
    for value in good:
        check_kinds((Outer, Inner), {name: value})
    for value in bad:
        with pytest.raises(ValueError, match=rf"cannot have these values:\n  {name}=.*, expected "):
            check_kinds((Outer, Inner), {name: value})


def test_all_wrong_values_are_in_one_error_in_plain_words() -> None:
    with pytest.raises(ValueError, match="model config") as caught:
        check_kinds((Outer, Inner), {"width": "x", "kind": "c", "name": "fine", "params_dtype": 16})
    assert str(caught.value).splitlines()[1:] == [
        "  width='x', expected int or None",
        "  kind='c', expected 'a' or 'b' or 3",
        "  params_dtype=16, expected dtype",
    ]


@pytest.mark.parametrize("name", ["nonsense", "made"])
def test_what_is_no_field_is_a_lookup_error(name: str) -> None:
    with pytest.raises(LookupError, match=f"Outer and Inner have no field {name}"):
        check_kinds((Outer, Inner), {name: 1})


def test_dtypes_may_be_given_by_name() -> None:
    asked = {"params_dtype": "bfloat16", "pipeline_dtype": "torch.float16", "name": "float32"}
    assert with_dtypes(asked) == {
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.float16,
        "name": "float32",
    }
    for wrong in ("x", "nn", "bf16"):
        with pytest.raises(ValueError, match=rf"params_dtype='{wrong}' is no dtype of torch; use bfloat16"):
            with_dtypes({"params_dtype": wrong})
