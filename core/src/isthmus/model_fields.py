"""Fields of Megatron's model config that a user sets: whether there are such, and what they may hold.

Megatron's dataclasses check no types themselves: a word where a number belongs would fail deep in torch.
"""

import dataclasses
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

DTYPES = frozenset({"params_dtype", "pipeline_dtype", "autocast_dtype"})


def with_dtypes(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, dtypes that are given by name ("bfloat16") as torch's own. ValueError: no such dtype."""
    import torch

    found = dict(asked)
    for name in DTYPES & {name for name, value in asked.items() if isinstance(value, str)}:
        dtype = getattr(torch, asked[name].removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name}={asked[name]!r} is no dtype of torch; use bfloat16, float16 or float32")
        found[name] = dtype
    return found


def check_kinds(classes: tuple[type, ...], asked: Mapping[str, Any]) -> None:
    """ValueError that lists the values `asked` for which are not of their field's type in these dataclasses.

    LookupError names what is no field of any.
    """
    hints = {name: hint for owner in reversed(classes) for name, hint in get_type_hints(owner).items()}
    fields = {field.name: field for owner in reversed(classes) for field in dataclasses.fields(owner)}
    known = {name for name, field in fields.items() if field.init}
    if unknown := sorted(asked.keys() - known):
        names = " and ".join(owner.__name__ for owner in classes)
        raise LookupError(f"{names} have no field {', '.join(unknown)}")
    wrong = [
        f"{name}={value!r}, expected {_words(hints[name])}"
        for name, value in asked.items()
        if not _fits(value, hints[name]) and value is not fields[name].default
    ]
    if wrong:
        raise ValueError("fields of the model config cannot have these values:\n  " + "\n  ".join(wrong))


def _fits(value: Any, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, option) for option in args)
    if origin is Literal:
        return any(value == option and type(value) is type(option) for option in args)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, hint) for item in value for hint in args)
    if origin is tuple:
        return isinstance(value, list | tuple) and len(value) == len(args) and all(map(_fits, value, args))
    if hint is Any:
        return True
    if hint is int:
        return type(value) is int
    if hint is float:
        return type(value) in (int, float)
    return isinstance(value, origin or hint) if isinstance(origin or hint, type) else True


def _words(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_words(option) for option in args)
    if origin is Literal:
        return " or ".join(map(repr, args))
    if hint is NoneType:
        return "None"
    return getattr(hint, "__name__", str(hint)) if origin is None else str(hint).replace("typing.", "")
