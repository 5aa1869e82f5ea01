"""Damaged torch_dist checkpoints: found by the sizes of their files, or by what stops their reading."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

METADATA = ".metadata"  # torch's list of what lies where in the .distcp files, pickled
AGAIN = "is damaged or incomplete; copy it again"


def check_files(checkpoint: str | Path) -> None:
    """ValueError that names the files of the checkpoint that are absent, too short, or begin with zeros."""
    path = Path(checkpoint)
    ends: dict[str, int] = {}
    for file, end in _extents(path / METADATA):
        ends[file] = max(end, ends.get(file, 0))
    lines = []
    for name, end in ends.items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size is None:
            lines.append(f"{file} is missing")
        elif size < end:
            lines.append(f"{file} has {size:,} bytes of {end:,}")
        elif end and not any(_first_bytes(file)):
            lines.append(f"{file} begins with zeros")
    if lines:
        raise ValueError(f"{path} {AGAIN}:\n  " + "\n  ".join(lines))


@contextmanager
def refused(checkpoint: str | Path) -> Iterator[None]:
    """ValueError where what is read of the checkpoint inside fails: its files are damaged. Errors of
    disk and memory are raised as they are."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:  # a BaseException; the first rank's alone has the reasons
        reasons = dict.fromkeys(_reason(failure) for failure, _ in error.failures.values())
        raise ValueError(f"{checkpoint} {AGAIN}" + _in_brackets("; ".join(reasons))) from error
    except (OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ValueError(f"{checkpoint} {AGAIN}{_in_brackets(_reason(error))}") from error


def _extents(file: Path) -> Iterator[tuple[str, int]]:
    """File and last byte of everything that the checkpoint's metadata lists."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    if not file.is_file():
        raise ValueError(f"{file} is missing; the checkpoint is incomplete, copy it again")
    with refused(file):
        stored: Any = FileSystemReader(file.parent).read_metadata().storage_data
        found = [(str(item.relative_path), int(item.offset + item.length)) for item in stored.values()]
    yield from found


def _first_bytes(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(64)


def _reason(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""
