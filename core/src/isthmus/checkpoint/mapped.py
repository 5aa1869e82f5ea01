"""A file in memory as it lies on disk: its bytes as tensors of any dtype."""

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import torch

# A private writable map is charged against memory unless it is marked so; Python 3.12 lacks the name.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class MappedFile:
    """A file, mapped without reading it; ValueError if it is not the one whose status was `seen` before."""

    def __init__(self, path: Path, seen: os.stat_result) -> None:
        self._fd = os.open(path, os.O_RDONLY)
        try:
            now = os.fstat(self._fd)
            if (seen.st_size, seen.st_mtime_ns, seen.st_ino) != (now.st_size, now.st_mtime_ns, now.st_ino):
                raise ValueError(f"{path} has changed since its header was read; open the checkpoint anew")
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # a longer kernel readahead
            # Private: a stray write stays in this process. Pages that nobody writes to are the file's own.
            flags, prot = mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            self._map = mmap.mmap(self._fd, now.st_size, flags=flags, prot=prot)
        except BaseException:
            os.close(self._fd)
            raise
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._typed: dict[torch.dtype, torch.Tensor] = {}

    def view(
        self, dtype: torch.dtype, offset: int, first: int, shape: Sequence[int], strides: Sequence[int]
    ) -> torch.Tensor:
        """Elements of a tensor that begins at byte `offset`; `first` and `strides` count its elements.

        A view, except where `offset` is not a multiple of the item size: then a copy of what is asked for.
        """
        item = dtype.itemsize
        if offset % item == 0:
            typed = self._typed.get(dtype)
            if typed is None:
                typed = self._bytes[: self._bytes.numel() // item * item].view(dtype)
                self._typed[dtype] = typed
            return typed.as_strided(shape, strides, offset // item + first)
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        count = 0 if 0 in shape else (last + 1) * item
        begin = offset + first * item
        return self._bytes[begin : begin + count].clone().view(dtype).as_strided(shape, strides)

    def ask(self, begin: int, end: int) -> None:
        """Reads bytes `begin` to `end` into the page cache, or starts to, where a system has the call."""
        if not hasattr(os, "posix_fadvise"):
            return
        try:
            if os.preadv(self._fd, [bytearray(1)], end - 1, os.RWF_NOWAIT):
                return  # cached to the end: a walk through all its pages would only cost time
        except (AttributeError, OSError):  # not cached, or a system that cannot say
            pass
        os.posix_fadvise(self._fd, begin, end - begin, os.POSIX_FADV_WILLNEED)

    def release(self) -> None:
        """Takes the file's pages out of this process's resident memory; they stay in the page cache."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Closes the file; the map lives as long as a tensor that was handed out."""
        os.close(self._fd)
        self._typed.clear()
