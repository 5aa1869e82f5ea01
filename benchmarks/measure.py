"""Taking turns, so that a noisy machine is noisy for both; cold files; the peak of a process's own memory."""

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace


def in_turn(
    runs: Mapping[str, Callable[[], object]], repeats: int, before: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Seconds of each of `repeats` runs, taken A B A B; `before` comes before each and is not counted.

    A first turn is not counted either.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            before()
            begin = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def ratio(seconds: Mapping[str, list[float]], reference: str, subject: str) -> float:
    """Rate of `subject` as a part of the rate of `reference`, from medians."""
    return statistics.median(seconds[reference]) / statistics.median(seconds[subject])


def evict(files: list[Path]) -> None:
    """Take the files out of the page cache. RuntimeError where more than 1 % of a file's pages stay.

    Pages that some process has mapped stay, so let go of every view first.
    """
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            left = 1.0
            for _ in range(50):  # pages that the kernel is busy with stay at first
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                left = cached(fd)
                if left <= 0.01:
                    break
                time.sleep(0.1)
        finally:
            os.close(fd)
        if left > 0.01:
            raise RuntimeError(
                f"{left:.0%} of {path} stays in the page cache: it is mapped by a process, or on a tmpfs"
            )


def cached(fd: int, samples: int = 1000) -> float:
    """The part of a file that is in the page cache, from `samples` pages spread over it."""
    size = os.fstat(fd).st_size
    found = 0
    for sample in range(samples):
        with suppress(BlockingIOError):
            found += os.preadv(fd, [bytearray(1)], size * sample // samples, os.RWF_NOWAIT)
    return found / samples


@contextmanager
def peak_memory() -> Iterator[SimpleNamespace]:
    """Measure `.nbytes`: how far this process's anonymous memory (RssAnon) rises inside the block.

    Sampled every 2 ms. Pages of files, mapped or cached, are not anonymous memory and are not counted.
    """
    begin = anonymous_memory()
    result = SimpleNamespace(nbytes=0)
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.002):
            result.nbytes = max(result.nbytes, anonymous_memory() - begin)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield result
    finally:
        done.set()
        thread.join()
        result.nbytes = max(result.nbytes, anonymous_memory() - begin)


def anonymous_memory() -> int:
    """Bytes of this process's memory that are no file's pages."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon; this needs Linux")
