"""A checkpoint read where it lies: headers at once, tensors as views of memory-mapped files.

No tensor is ever read whole unless it is asked for whole, and nothing is copied on the way.
"""

import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import torch

from isthmus.checkpoint.header import TensorInfo as TensorInfo
from isthmus.checkpoint.index import read_tensors
from isthmus.checkpoint.mapped import MappedFile
from isthmus.checkpoint.readahead import ReadAhead


class CheckpointReader:
    """The safetensors files of one folder; a context manager.

    Construction reads headers only and raises one ValueError that lists everything wrong with the files.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        tensors, self._files = read_tensors(self.folder)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)
        self.bytes_read = 0  # bytes of tensor data handed out by `slice`
        self._mapped: dict[str, MappedFile] = {}
        self._thread = ThreadPoolExecutor(1, "read-ahead")  # starts with its first task
        # Also where nobody calls `close`.
        self._let_go = weakref.finalize(self, _close, self._mapped, self._thread)
        self._ahead: ReadAhead | None = None
        self._closed = False

    def slice(
        self,
        name: str,
        rows: slice | None = None,
        cols: slice | None = None,
        index: int | None = None,
        *,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """View of `tensor[index]` where given, then of its `[rows, cols]`; the caller must not write to it.

        With `into` it is copied there, and that is what comes back. Bounds are exact: nothing is clipped or
        counted from the end. The view outlives the reader.
        """
        info = self._info(name)
        shape = list(info.shape)
        strides, first, step = [0] * len(shape), 0, 1
        for dim in range(len(shape) - 1, -1, -1):
            strides[dim] = step
            step *= shape[dim]
        if index is not None:
            if not shape or not 0 <= index < shape[0]:
                raise ValueError(f"{name}: no row {index} in shape {info.shape}")
            first = index * strides[0]
            del shape[0], strides[0]
        for dim, span in ((0, rows), (1, cols)):
            if span is not None:
                start, length = bounds(span, dim, shape, info)
                first += start * strides[dim]
                shape[dim] = length
        item = info.dtype.itemsize
        if self._ahead is not None:
            own = first * item if index is None else first * item - index * (info.nbytes // info.shape[0])
            if not self._ahead.reached((name, index), own) and index is not None:
                self._ahead.reached((name, None), first * item)
        file = self._mapped.get(info.file) or self._map(info.file)
        result = file.view(info.dtype, info.offset, first, shape, strides)
        self.bytes_read += result.numel() * item
        return result if into is None else into.copy_(result)

    def will_need(self, names: Iterable[str | tuple[str, int | None]]) -> None:
        """Says what `slice` will be asked for: tensors, or (name, index) for single rows of stacked ones.

        A hint that keeps a cold disk or a network file system busy where the kernel would not. It is best
        followed in file order; each call replaces the one before.
        """
        ahead = self._ahead = ReadAhead(self._ask)
        keys = dict.fromkeys((name, None) if isinstance(name, str) else name for name in names)
        ranges = []
        for name, index in keys:
            info = self._info(name)
            nbytes = info.nbytes if index is None else info.nbytes // info.shape[0]
            begin = info.offset + (index or 0) * nbytes
            ranges.append((info.file, begin, begin + nbytes, (name, index)))
        for file, begin, end, key in sorted(ranges, key=lambda item: item[:3]):
            ahead.add(key, file, begin, end)
        ahead.start()

    def release(self) -> None:
        """Takes the pages read so far out of this process's resident memory.

        They stay in the page cache, and views handed out stay valid.
        """
        for file in self._mapped.values():
            file.release()

    def close(self) -> None:
        """Lets the files go; views handed out stay valid."""
        self._closed = True
        self._let_go()

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _ask(self, file: str, begin: int, end: int) -> None:
        """Starts a read; from a thread, since a kernel may come back only when much of it is done."""
        self._thread.submit(self._map(file).ask, begin, end)

    def _info(self, name: str) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            raise LookupError(f"{self.folder} holds no tensor {name!r} (it holds {len(self.tensors)} others)")
        return info

    def _map(self, file: str) -> MappedFile:
        """The file, mapped on first use."""
        if self._closed:
            raise ValueError(f"{self.folder}: the reader is closed")
        if file not in self._mapped:
            self._mapped[file] = MappedFile(self.folder / file, self._files[file])
        return self._mapped[file]


def _close(mapped: dict[str, MappedFile], thread: ThreadPoolExecutor) -> None:
    thread.shutdown(cancel_futures=True)
    while mapped:
        mapped.popitem()[1].close()


def bounds(span: slice | None, dim: int, shape: list[int], info: TensorInfo) -> tuple[int, int]:
    """Start and length of a slice along `dim`, exactly as given; all of it for None."""
    if span is None:
        return 0, shape[dim]
    if dim < len(shape) and span.step in (None, 1):
        start = 0 if span.start is None else span.start
        stop = shape[dim] if span.stop is None else span.stop
        if 0 <= start <= stop <= shape[dim]:
            return start, stop - start
    which = "columns" if dim else "rows"
    raise ValueError(f"{info.name}: {which} {span} do not lie in shape {info.shape}")
