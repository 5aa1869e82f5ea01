"""Rewriting a config.json: the source's text, with other values for a few of its fields.

The text is edited, not parsed and written anew: order, indentation, spelling of numbers and all else stay.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Spellings of one field. A change may use any of them and lands in the one that the source uses.
SPELLINGS = (frozenset({"dtype", "torch_dtype"}),)

_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, slots=True)
class _Field:
    """A member of a JSON object, by position in the text: of its name, and from and to of its value."""

    path: tuple[str, ...]
    start: int
    value: int
    end: int


def write_config(source_text: str, changes: Mapping[str, Any], *, only_stated: bool = False) -> str:
    """The source's config.json with `changes`: the very same text where all values are already those.

    A plain name changes the field wherever the source states it: at the top level and in sections named
    `*_config`, except `quantization_config`. A dotted name (`text_config.dtype`) changes that one field. What
    the source does not state is added at the end of its object, or left so with `only_stated`.

    Raises:
        LookupError: a dotted name whose section the source does not have.
    """
    text = source_text
    for name, value in changes.items():
        path = tuple(name.split("."))
        found = [field for field in _fields(text) if _meant(field.path, path)]
        if not found and not only_stated:
            text = _with(text, path, value)
        for field in reversed(found):  # from the end, so that earlier positions stay true
            if json.dumps(json.loads(text[field.value : field.end])) != json.dumps(value):
                margin = _margin(text, field.start)
                text = text[: field.value] + _dumped(value, margin, len(field.path)) + text[field.end :]
    return text


def state_field(source_text: str, name: str, value: Any) -> str:
    """The source's config.json with this one field: where it has none there, or null, it is added.

    `name` is dotted for a field of a section. LookupError: the source does not have the section.
    """
    path = tuple(name.split("."))
    found = next((field for field in _fields(source_text) if field.path == path), None)
    if found is None:
        return _with(source_text, path, value)
    if json.loads(source_text[found.value : found.end]) == value:
        return source_text
    return source_text[: found.value] + json.dumps(value) + source_text[found.end :]


def remove_config(source_text: str, names: Collection[str]) -> str:
    """The source's config.json without the fields `names`, at the top level and in sections `*_config`."""
    text = source_text
    while found := [field for field in _fields(text) if any(_meant(field.path, (name,)) for name in names)]:
        first = found[0]
        at, begin = _skip(text, first.end), len(text[: first.start].rstrip(" \t\r\n"))
        if text[at] == ",":  # what follows takes its place
            text = text[: first.start] + text[_skip(text, at + 1) :]
        else:  # the last one: the comma before it goes too
            text = text[: begin - (text[begin - 1] == ",")] + text[first.end :]
    return text


def _meant(field: tuple[str, ...], path: tuple[str, ...]) -> bool:
    *sections, name = field
    if len(path) == 1:
        inside = all(section.endswith("_config") and section != "quantization_config" for section in sections)
    else:
        inside = tuple(sections) == path[:-1]
    return inside and (name == path[-1] or any({name, path[-1]} <= spellings for spellings in SPELLINGS))


def _fields(text: str, at: int = 0, path: tuple[str, ...] = ()) -> Iterator[_Field]:
    """Every member of the object at `at` and of the objects in it, in order of their names in the text."""
    decoder = json.JSONDecoder()
    at = _skip(text, _skip(text, at) + 1)  # the brace
    while text[at] != "}":
        start = at
        name, at = decoder.raw_decode(text, start)
        value = _skip(text, _skip(text, at) + 1)  # the colon
        _, end = decoder.raw_decode(text, value)
        yield _Field((*path, name), start, value, end)
        if text[value] == "{":
            yield from _fields(text, value, (*path, name))
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)


def _with(text: str, path: tuple[str, ...], value: Any) -> str:
    """The text with a member more, after the last one of its object."""
    fields = list(_fields(text))
    opening = 0
    if section := path[:-1]:
        holders = [field.value for field in fields if field.path == section and text[field.value] == "{"]
        if not holders:
            raise LookupError(
                f"cannot set {'.'.join(path)}: the source's config.json has no {'.'.join(section)}"
            )
        opening = holders[0]
    siblings = [field for field in fields if field.path[:-1] == section]
    if not siblings:
        at = _skip(text, opening) + 1
        return f"{text[:at]}{json.dumps(path[-1])}: {json.dumps(value)}{text[at:]}"
    last = siblings[-1]
    margin = _margin(text, last.start)
    member = f"{json.dumps(path[-1])}: {_dumped(value, margin, len(path))}"
    return f"{text[: last.end]},{margin if margin else ' '}{member}{text[last.end :]}"


def _margin(text: str, start: int) -> str:
    """The line break and indentation in front of a member, empty where it stands within a line."""
    before = text[:start]
    space = before[len(before.rstrip(" \t\r\n")) :]
    return space[space.index("\n") :] if "\n" in space else ""


def _dumped(value: Any, margin: str, depth: int) -> str:
    """The value as JSON, its further lines indented as the source indents a member at `depth`."""
    if not margin:
        return json.dumps(value, ensure_ascii=False)
    width = (len(margin) - 1) // depth
    return json.dumps(value, indent=width, ensure_ascii=False).replace("\n", margin)


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at
