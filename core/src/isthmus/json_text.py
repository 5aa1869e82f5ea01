"""JSON as checkpoints hold it, read strictly: a name once in an object, finite numbers, few brackets deep."""

import json
from collections import Counter
from typing import Any

MAX_DEPTH = 100  # of brackets; what walks a config is recursive


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. ValueError: it is none, gives a name twice, has NaN, or nests too deep."""
    too_deep = f"nested more than {MAX_DEPTH} deep"
    try:
        value = json.loads(text, object_pairs_hook=_once, parse_constant=_constant)
    except RecursionError:
        raise ValueError(too_deep) from None
    level, depth = [value], 1
    while level := [child for item in level for child in _children(item)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(too_deep)
    return value


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [child for child in value if isinstance(child, dict | list)] if isinstance(value, list) else []


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{', '.join(map(repr, twice))} given more than once")
    return found


def _constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
