"""What the fields of a quantization_config may hold, and which modules its lists of exceptions name."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import translate
from itertools import accumulate
from typing import Any

from isthmus.config_values import NAME, NAMES, SECTION, SIZE, SWITCH, Kind, misfits

LEFT = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")  # spellings of one thing


def _pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(SIZE.holds, value))


def _patterns(value: Any) -> bool:
    return NAMES.holds(value) and all(map(_compiles, value))


def _compiles(name: str) -> bool:
    try:
        re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
    except re.error:
        return False
    return True


PAIR = Kind("a list of two whole numbers, 1 or more: rows and columns of a block", _pair)
MODULES = Kind("a list of module names, `re:` before regular expressions", _patterns)
FORMAT = Kind("e4m3 or e5m2", lambda value: value in ("e4m3", "e5m2"))

_ALL: Mapping[str, Kind] = {**dict.fromkeys(LEFT, MODULES), "scale_fmt": NAME}
_OF_METHOD: Mapping[str, Mapping[str, Kind]] = {
    "fp8": {"weight_block_size": PAIR, "fmt": FORMAT},
    "modelopt": {"group_size": SIZE, "quant_algo": NAME},
    "compressed-tensors": {"config_groups": SECTION},
}
_WEIGHTS: Mapping[str, Kind] = {"num_bits": SIZE, "type": NAME, "strategy": NAME, "symmetric": SWITCH}
_OF_STRATEGY: Mapping[Any, Mapping[str, Kind]] = {
    "group": {"group_size": SIZE},
    "tensor_group": {"group_size": SIZE},
    "block": {"block_structure": PAIR},
}


def wrong_fields(method: str, entry: Mapping[str, Any], key: str) -> list[str]:
    """Every value of the entry that its field cannot have, `key` before its name; null is absence."""
    found = list(misfits(entry, {**_ALL, **_OF_METHOD.get(method, {})}, f"{key}."))
    groups = entry.get("config_groups")
    if method == "compressed-tensors" and isinstance(groups, Mapping):
        found += _wrong_groups(groups, f"{key}.config_groups.")
    return found


def _wrong_groups(groups: Mapping[str, Any], path: str) -> Iterator[str]:
    yield from misfits(groups, dict.fromkeys(groups, SECTION), path)
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            continue
        yield from misfits(group, {"weights": SECTION}, f"{path}{name}.")
        said = group.get("weights")
        if not isinstance(said, Mapping):
            continue
        strategy = said.get("strategy")
        needed = {"num_bits": SIZE, **_OF_STRATEGY.get(strategy if NAME.holds(strategy) else None, {})}
        yield from misfits(said, {**_WEIGHTS, **needed}, f"{path}{name}.weights.", needed)


def exceptions(entries: Iterable[str]) -> Callable[[str], str | None]:
    """Tells which of the entries names a module, or one that it is part of; None where none does.

    `re:` begins a regular expression from the name's beginning on, as in compressed-tensors; `*` and `?` are
    ModelOpt's.
    """
    names, patterns = set(), {}
    for entry in entries:
        if entry.startswith("re:"):
            patterns[entry] = re.compile(entry.removeprefix("re:"))
        elif "*" in entry or "?" in entry:
            patterns[entry] = re.compile(translate(entry))
        else:
            names.add(entry)

    def naming(module: str) -> str | None:
        for name in accumulate(module.split("."), "{}.{}".format):
            if name in names:
                return name
        return next((entry for entry, pattern in patterns.items() if pattern.match(module)), None)

    return naming


def may_name(entry: str, module: str) -> bool:
    """Whether an entry may be meant for a module though it does not name it: by a part of its name.

    Transformers takes parts of names, and the prefix of a release's names is not always its modules'.
    """
    end = entry[entry.find("layers.") :] if "layers." in entry else entry
    return end in module
