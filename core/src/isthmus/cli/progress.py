"""What goes on, for people who wait: a line for each stage, and the bytes read or written, on rank 0 alone.

A terminal has a bar, anything else a line now and then; where a script reads `--json -` nothing is told.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from isthmus.cli.output import is_reporting_rank

EVERY = 10.0  # seconds between the lines of one long stage

silent = False  # no lines; a bar stays, for only a person has a terminal


def announce(text: str) -> None:
    """A line on stderr: this begins now."""
    _say(f"{text} ...")


def _say(line: str) -> None:
    if is_reporting_rank() and not silent:
        print(line, file=sys.stderr, flush=True)


@contextmanager
def progress(description: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Gives `advance(nbytes)`: call it with what has just been read or written, from any thread.

    Bytes are rank 0's own, which is said where there are others.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    told = f"{description}, rank 0 of {ranks}" if ranks > 1 else description
    if not is_reporting_rank():
        yield lambda nbytes: None
    elif sys.stderr.isatty():
        with _bar(told, total_bytes) as advance:
            yield advance
    else:
        announce(description)
        with _lines(told, total_bytes) as advance:
            yield advance


@contextmanager
def _bar(description: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
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


@contextmanager
def _lines(description: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A line every :data:`EVERY` seconds, whether or not anything moved."""
    from rich.filesize import decimal

    done, over, lock = 0, threading.Event(), threading.Lock()

    def advance(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes

    def tell() -> None:
        while not over.wait(EVERY):
            share = done / max(1, total_bytes)
            _say(f"{description}: {decimal(done)} of {decimal(total_bytes)}, {share:.0%}")

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield advance
    finally:
        over.set()
        teller.join()
