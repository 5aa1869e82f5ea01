"""A checkpoint folder that appears at once and complete, or not at all.

Files are written into a staging folder beside the target, which takes the target's place by one rename. A
killed run leaves the target as it was; what it leaves beside it is removed by the next run.
"""

import ctypes
import errno
import fcntl
import glob
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

# Weights in any format, and what points at them: never a side file.
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.ckpt", "*.h5", "*.msgpack", "*.ot")
WEIGHTS += ("*.onnx", "*.onnx_data", "*.safetensors.index*.json", "*.bin.index*.json")
MARGIN = 50  # one part in so many, for headers, side files and what a file system keeps for itself
PATIENCE = 20.0  # seconds that a killed process, or one it forked, may take to let go of its lock
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class Staging:
    """A new folder on the target's file system; a context manager that discards what was not published.

    ValueError, before anything is written, where the target is not empty and `overwrite` was not asked for,
    or where its place cannot be taken. `sources` are folders that must survive an overwrite.
    """

    def __init__(
        self, target: str | Path, overwrite: bool = False, *, nbytes: int = 0, sources: Sequence[Path] = ()
    ) -> None:
        self.target = Path(os.path.realpath(target))  # a link stays a link; its folder is replaced
        _check_above(self.target)
        _finish_replacement(self.target)
        _refuse(self.target, overwrite, sources)
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self._overwrite = overwrite
        _remove_dead(self.target)
        self._check_room(nbytes)
        self.path, self._lock = _claim(self.target.parent, _prefix(self.target))

    def publish(self) -> None:
        """Puts the staging folder in the target's place; what was there is gone."""
        if not self.target.exists() or not any(self.target.iterdir()):
            self.path.rename(self.target)  # takes the place of an empty folder too
        elif not self._overwrite:
            raise ValueError(
                f"{self.target} was filled while {self.path} was being written; nothing is published"
            )
        else:
            shutil.copymode(self.target, self.path)
            _sync(self.path)  # the old checkpoint goes only once the new one is on the disk
            _replace(self.path, self.target)
        self._unlock()

    def discard(self) -> None:
        """Removes the staging folder; nothing where it has been published."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._unlock()

    def __enter__(self) -> "Staging":
        return self

    def __exit__(self, *exception: object) -> None:
        self.discard()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _check_room(self, nbytes: int) -> None:
        free = shutil.disk_usage(self.target.parent).free
        needed = nbytes + nbytes // MARGIN
        if needed > free:
            raise OSError(
                errno.ENOSPC,
                f"{self.target} needs {needed:,} bytes and {self.target.parent} has {free:,} free; "
                f"make room or choose another disk",
            )


def check_target(target: str | Path, overwrite: bool = False, *, sources: Sequence[Path] = ()) -> None:
    """ValueError where :class:`Staging` would refuse this target; for asking before hours of work."""
    target = Path(os.path.realpath(target))
    _check_above(target)
    _refuse(target, overwrite, sources)


@contextmanager
def cleared(target: str | Path) -> Iterator[None]:
    """Around processes that write `target`: where they end early, nothing of theirs stays beside it.

    A KeyboardInterrupt goes on with words that say whether the target has been written.
    """
    target = Path(os.path.realpath(target))
    before, others = _identity(target), set(_staged(target))
    try:
        yield
    except BaseException as error:
        end = time.monotonic() + PATIENCE
        while _remove_dead(target) - others and time.monotonic() < end:
            time.sleep(0.05)
        if isinstance(error, KeyboardInterrupt):
            kept = _identity(target) in (before, None)
            error.args = ("nothing written" if kept else f"{target} is written",)
        raise


def _identity(folder: Path) -> tuple[int, int] | None:
    """Which folder it is, None for none: a published one is another than was there before."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def carry_side_files(source: str | Path, staging: Staging, into: str = "") -> list[str]:
    """Copies everything of a checkpoint that is not weights, sub-folders included; returns the names.

    They go into the staging folder, or its sub-folder `into`.

    config.json is left to the caller. Hidden folders and __pycache__ are caches, not part of a checkpoint.
    """
    carried = []
    for name in _side_files(Path(source), "", {staging.path, staging.target}):
        destination = staging.path / into / name
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(source) / name, destination)
        carried.append(name)
    return carried


def _side_files(root: Path, below: str, skip: set[Path]) -> Iterator[str]:
    """Names under `root / below`, relative to `root`, sorted within each folder."""
    real = Path(os.path.realpath(root / below))
    if real in skip:  # an output folder inside the source, or a link that leads round in a circle
        return
    for path in sorted((root / below).iterdir()):
        name = f"{below}{path.name}"
        if path.is_dir():
            if not path.name.startswith(".") and path.name != "__pycache__":
                yield from _side_files(root, f"{name}/", skip | {real})
        elif not path.is_file():
            raise ValueError(f"{path} is a broken link; complete the download of {root}")
        elif name != "config.json" and not any(fnmatch(path.name.lower(), pattern) for pattern in WEIGHTS):
            yield name


def _check_above(target: Path) -> None:
    """ValueError where a file stands in the way of the folders above the target."""
    if above := next((path for path in target.parents if path.exists() and not path.is_dir()), None):
        raise ValueError(f"{target} cannot be made: {above} is a file; choose another folder")


def _refuse(target: Path, overwrite: bool, sources: Sequence[Path]) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"{target} is a file; give a folder")
    if os.path.ismount(target):
        raise ValueError(
            f"{target} is a mount point and cannot be replaced; write to {target / 'checkpoint'}"
        )
    present = sorted(path.name for path in target.iterdir())
    if present and not overwrite:
        few = ", ".join(present[:3]) + (", ..." if len(present) > 3 else "")
        raise ValueError(
            f"{target} is not empty ({few}); choose another folder, or replace all that it holds with"
            " overwrite=True (--overwrite)"
        )
    for source in sources:
        if present and target == Path(os.path.realpath(source)):
            raise ValueError(
                f"{target} is the source itself: its other files would be lost; choose another folder"
            )
        if target in Path(os.path.realpath(source)).parents:
            raise ValueError(
                f"overwriting {target} would delete {source}, which lies in it; choose another folder"
            )


def _claim(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new folder and a lock on it, which ends with this process and so tells whether it lives."""
    while True:
        path = parent / f"{prefix}{secrets.token_hex(4)}"
        path.mkdir()
        lock = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            return path, lock  # no locks on this file system: then nobody removes the folder either
        if path.exists() and os.path.samestat(path.stat(), os.fstat(lock)):
            return path, lock
        os.close(lock)  # another run took it for dead before it was locked


def _prefix(target: Path) -> str:
    """How the names of the target's staging folders begin."""
    return f".{target.name}.staging-"


def _staged(target: Path) -> Iterator[Path]:
    """The target's staging folders, of whichever run."""
    return target.parent.glob(f"{glob.escape(_prefix(target))}*")


def _remove_dead(target: Path) -> set[Path]:
    """Removes the target's staging folders whose runs are gone; the others."""
    for path in _staged(target):
        _remove_if_dead(path)
    return set(_staged(target))


def _remove_if_dead(path: Path) -> None:
    """Removes a staging folder whose run is gone."""
    try:
        lock = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except OSError:  # alive, or no way to know
        pass
    finally:
        os.close(lock)


def _replace(new: Path, target: Path) -> None:
    """`new` in the place of a non-empty folder, in one step where the file system can swap two folders."""
    if not _swap(new, target):
        old = target.with_name(f".{target.name}.replaced-{secrets.token_hex(4)}")  # see _finish_replacement
        target.rename(old)
        try:
            new.rename(target)
        except OSError:
            old.rename(target)
            raise
        new = old
    shutil.rmtree(new)


def _finish_replacement(target: Path) -> None:
    """After a run that was killed between the two renames of :func:`_replace`: the old folder returns."""
    for old in target.parent.glob(f".{target.name}.replaced-*"):
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(target)


def _swap(a: Path, b: Path) -> bool:
    """Exchanges two folders atomically; False where the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    return renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0


def _sync(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
