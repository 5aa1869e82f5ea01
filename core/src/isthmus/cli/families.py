"""Installed model families: package, version, model types, layouts.

Exit code 1 where an installed family does not load: the others are still listed.
"""

import argparse
from typing import TYPE_CHECKING, Any

from isthmus.cli import output
from isthmus.layout import AXES

if TYPE_CHECKING:
    from isthmus.registry import Entry


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options of its own."""


def run(args: argparse.Namespace) -> int:
    """List every entry point of the group; a broken one is a line with its error."""
    from isthmus.registry import families

    found: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in families().values():
        row = _describe(entry)
        first = found.setdefault((row["dist"], row["name"]), row)
        if first is not row:
            first["model_types"] += row["model_types"]
            first["error"] = first["error"] or row["error"]
    rows = list(found.values())

    out = output.console(args)
    if not rows:
        out.print("No family is installed. Try: pip install isthmus-qwen3-next")
    else:
        listing = output.table("family", "package", "version", "model types", "layouts")
        for row in rows:
            layouts = row["error"] or " ".join(row["layout_axes"])
            listing.add_row(row["name"], row["dist"], row["version"], ", ".join(row["model_types"]), layouts)
        out.print(listing)
    output.write_json(args, {"families": rows})
    return 1 if any(row["error"] for row in rows) else 0


def _describe(entry: "Entry") -> dict[str, Any]:
    """One entry as a JSON row; the error of a family that does not load instead of its layouts."""
    row: dict[str, Any] = {
        "name": entry.model_type,
        "dist": entry.dist,
        "version": entry.version,
        "model_types": [entry.model_type],
        "layout_axes": [],
        "error": None,
    }
    try:
        family = entry.load()
    except Exception as error:  # whatever a package raises at import is that package's line, not our crash
        row["error"] = str(error) if isinstance(error, LookupError) else f"{type(error).__name__}: {error}"
    else:
        row["name"] = family.name
        row["model_types"] = [] if entry.model_type in family.refused else [entry.model_type]
        row["layout_axes"] = [axis for axis in AXES if axis in family.axes]
    return row
