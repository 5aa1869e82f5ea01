"""Where a command's words go: tables for people, one JSON document for scripts, on the first rank only."""

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PLAIN_WIDTH = 120  # columns where there is no terminal to ask and COLUMNS is not set


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--json FILE`, the same on every command."""
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the result as JSON; '-' is standard output, and what people read then goes to stderr",
    )


def check_destination(args: argparse.Namespace) -> None:
    """FileNotFoundError or IsADirectoryError where `--json` cannot be written, before any work is done."""
    if args.json not in (None, "-"):
        check_file("--json", Path(args.json))


def check_file(option: str, file: Path) -> None:
    """FileNotFoundError or IsADirectoryError where the file that `option` names cannot be written."""
    if file.is_dir():
        raise IsADirectoryError(f"{option} {file}: is a folder; give the name of a file")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"{option} {file}: there is no folder {file.parent}")


def is_reporting_rank() -> bool:
    """True outside torchrun and on rank 0: the one process that prints and writes."""
    return os.environ.get("RANK", "0") == "0"


def console(args: argparse.Namespace) -> Console:
    """Where people read: stdout, or stderr where `--json -` has stdout; silent on ranks other than 0."""
    stream = sys.stderr if args.json == "-" else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PLAIN_WIDTH
    # No markup: tensor names such as experts[{e}] are not styles.
    return Console(
        file=stream, width=width, markup=False, emoji=False, highlight=False, quiet=not is_reporting_rank()
    )


def overruled(document: dict[str, Any]) -> list[str]:
    """A line for each config field of the checkpoint in which its tensors overrule config.json."""
    return [
        f"{name}={value} by the checkpoint's tensors, not as config.json says"
        for name, value in document["overruled"].items()
    ]


def table(*columns: str, right: tuple[str, ...] = (), title: str | None = None) -> Table:
    """An empty table; `right` names the columns of numbers. Long cells fold, nothing is cut off."""
    result = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        result.add_column(
            name, justify="right" if name in right else "left", overflow="fold", no_wrap=name in right
        )
    return result


def counted(count: int, noun: str) -> str:
    """`1 file`, `2 files`, `2 processes`."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"


def write_json(args: argparse.Namespace, document: dict[str, Any]) -> None:
    """Write `document` where `--json` says; nothing without it and on ranks other than 0.

    JSON has no NaN and no infinity: they are written as the strings "nan", "inf" and "-inf".
    """
    if args.json is None or not is_reporting_rank():
        return
    text = json.dumps(_standard(document), indent=2, allow_nan=False) + "\n"
    if args.json == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        Path(args.json).write_text(text, encoding="utf-8")


def _standard(value: Any) -> Any:
    """The value with strings for the numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _standard(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_standard(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
