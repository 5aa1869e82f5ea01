"""A bar with bytes and rate for people who watch; nothing in a log, a pipe or on ranks other than 0."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from isthmus.cli.output import is_reporting_rank


@contextmanager
def progress(description: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Gives `advance(nbytes)`: call it with what has just been read or written, from any thread."""
    if not (sys.stderr.isatty() and is_reporting_rank()):
        yield _ignore
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as bar:
        task = bar.add_task(description, total=total_bytes)
        yield lambda nbytes: bar.advance(task, nbytes)


def _ignore(nbytes: int) -> None:
    """Nobody watches."""
