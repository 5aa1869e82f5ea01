"""The installed families, found by entry points and imported on first use."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

from isthmus.family import Family

GROUP = "isthmus.families"
NAME = re.compile(r"(?=.{2,40}$)[a-z][a-z0-9]*([_-][a-z0-9]+)*")  # as transformers spells a model_type


@dataclass(frozen=True, slots=True)
class Entry:
    """An installed family package's claim on one `model_type`."""

    model_type: str
    dist: str
    version: str
    entry_point: EntryPoint

    def load(self) -> Family:
        """Import the family. LookupError, naming the dist, where the package is broken."""
        try:
            family = self.entry_point.load()
        except Exception as error:
            raise LookupError(
                f"{self.dist} {self.version} is installed for model_type {self.model_type!r} but"
                f" {self.entry_point.value} cannot be imported: {error}."
                f" Try: pip install --force-reinstall {self.dist}"
            ) from error
        if not isinstance(family, Family):
            raise LookupError(
                f"{self.dist}: {self.entry_point.value} is a {type(family).__name__}, not a Family"
            )
        return family


@cache
def families() -> Mapping[str, Entry]:
    """Every installed `model_type`; reads metadata only. LookupError where two dists claim one."""
    found: dict[str, Entry] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        dist = point.dist
        entry = Entry(point.name, dist.name if dist else "?", dist.version if dist else "?", point)
        other = found.setdefault(point.name, entry)
        if other.entry_point.value != point.value:
            raise LookupError(
                f"both {other.dist} and {entry.dist} claim model_type {point.name!r}; uninstall one"
            )
    return MappingProxyType(found)


def family(model_type: str) -> Family:
    """The family that handles `model_type`.

    LookupError names what is installed and what to install, or says why the family refuses this one.
    """
    installed = families()
    if model_type not in installed:
        known = ", ".join(sorted(installed)) or "none"
        raise LookupError(
            f"no installed family handles model_type {model_type!r} (installed: {known}){_advice(model_type)}"
        )
    found = installed[model_type].load()
    if model_type in found.refused:
        raise LookupError(found.refused[model_type])
    return found


def _advice(model_type: str) -> str:
    """What to try instead of a name that is not installed; nothing where it cannot be a family's."""
    if close := get_close_matches(model_type, families(), 1, cutoff=0.9):
        return f". Did you mean {close[0]}?"
    if NAME.fullmatch(model_type):
        return f". Try: pip install isthmus-{model_type.replace('_', '-')}"
    return ""
