"""Safetensors files written in one pass: the header first, then every tensor at its known place.

Tensor bytes go from where they are to the file; only what is not contiguous, or not on the CPU, is copied,
a block at a time.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from isthmus.checkpoint.header import CODES, Defects, encode, read_header
from isthmus.checkpoint.index import INDEX, SINGLE

BLOCK = 16 << 20  # bytes copied at a time for a tensor that cannot be written from where it lies
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", math.prod(self.shape) * self.dtype.itemsize)


def parse_size(text: str | int) -> int:
    """Bytes of "5GB" (10**9), "5GiB" (2**30) or a plain number; 1 to 2**63."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", str(text).strip().upper())
    size = float(match[1]) * _UNITS[match[2]] if match and match[2] in _UNITS else 0
    if not 1 <= size <= 1 << 63:
        shown = repr(text) if len(str(text)) <= 40 else f"{str(text)[:40]!r}..."
        raise ValueError(f"{shown} is not a size; write it as 5GB, 500MB or 2GiB")
    return int(size)


def split_files(tensors: Sequence[OutputTensor], max_shard_size: int) -> list[list[OutputTensor]]:
    """Tensors in their order, cut into files of at most `max_shard_size` bytes or of one tensor each."""
    files: list[list[OutputTensor]] = []
    room = 0
    for tensor in tensors:
        if not files or tensor.nbytes > room:
            files.append([])
            room = max_shard_size
        files[-1].append(tensor)
        room -= tensor.nbytes
    return files


def shard_names(count: int) -> list[str]:
    """File names as transformers writes and expects them."""
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


class ShardWriter:
    """One safetensors file; a context manager. Tensors may come in any order, and by rows.

    In the file they have the order given, unless a dtype would come to lie unaligned: then wider dtypes
    come first. One that `joins` finds a file that another process has begun, and adds to it.
    """

    def __init__(self, path: str | Path, tensors: Sequence[OutputTensor], *, joins: bool = False) -> None:
        self.path = Path(path)
        self.written: dict[str, list[tuple[int, int]]] = {}  # first byte of a tensor, and the byte after
        self._places: dict[str, tuple[OutputTensor, int]] = {}  # where each begins, in bytes of data
        for tensor in tensors:
            if tensor.dtype not in CODES:
                raise ValueError(f"{tensor.name}: safetensors has no {tensor.dtype}; cast it first")
            if tensor.name in self._places:
                raise ValueError(f"{self.path}: {tensor.name} is listed twice")
            self._places[tensor.name] = tensor, 0
        self.size = 0  # bytes, header included
        for tensor in _aligned(tensors):
            self._places[tensor.name] = tensor, self.size
            self.size += tensor.nbytes
        header = _header(tensors)
        self._data = len(header)
        self.size += self._data
        self._fd: int | None = None
        try:
            self._fd = os.open(self.path, os.O_WRONLY | (0 if joins else os.O_CREAT | os.O_TRUNC), 0o666)
        except OSError as error:
            raise self._failure(error, "the file") from error
        if not joins:
            self._put(memoryview(header), 0, "the header")

    def write(
        self, name: str, *parts: torch.Tensor, index: int | None = None, row: int | None = None
    ) -> None:
        """Writes a tensor, or row `index` of a stacked one; ValueError if it is not what was declared.

        Several `parts` are its rows, one after the other: all of them, or those that begin at `row`.
        """
        if name not in self._places:
            raise LookupError(f"{self.path.name} has no tensor {name!r}; it was opened for other names")
        declared, place = self._places[name]
        shape, label, begin = declared.shape, name, 0
        if index is not None:
            label = f"{name}[{index}]"
            if not shape or not 0 <= index < shape[0]:
                raise ValueError(f"{name}: no row {index} in shape {shape}")
            shape = shape[1:]
            begin += index * (declared.nbytes // declared.shape[0])
        if not _fit(parts, declared.dtype, shape, row):
            given = ", ".join(f"{part.dtype} {tuple(part.shape)}" for part in parts)
            rows = "" if row is None else f" from row {row} on"
            raise ValueError(f"{label}: declared {declared.dtype} {shape}, given {given}{rows}")
        if row:
            begin += row * (math.prod(shape[1:]) * declared.dtype.itemsize)
        end = begin + sum(part.nbytes for part in parts)
        self._check_new(name, begin, end, label)
        place += self._data + begin
        for part in parts:
            for block in _blocks(part):
                self._put(block, place, label)
                place += len(block)
        self.written[name].append((begin, end))

    def joined(self, written: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        """Takes note of what one that joined has `written`; ValueError where it was written already."""
        for name, intervals in written.items():
            for begin, end in intervals:
                self._check_new(name, begin, end, name)
                self.written[name].append((begin, end))

    def _check_new(self, name: str, begin: int, end: int, label: str) -> None:
        for other, other_end in self.written.setdefault(name, []):
            if begin < other_end and other < end:
                raise ValueError(f"{label} is written twice to {self.path}")

    def missing(self) -> list[str]:
        """Tensors, or `name[row]`, that are not written, or not all of them."""
        names: dict[str, None] = {}
        for name, (tensor, _) in self._places.items():
            intervals = sorted(self.written.get(name, []))
            if not intervals and tensor.nbytes:
                names[name] = None
                continue
            begin = 0
            for end, following in (*intervals, (tensor.nbytes, tensor.nbytes)):
                if begin < end:
                    row = tensor.nbytes // tensor.shape[0]
                    rows = range(begin // row, -(-end // row))
                    names |= dict.fromkeys(f"{name}[{number}]" for number in rows)
                begin = following
        return list(names)

    def close(self, partial: bool = False) -> None:
        """Closes the file; ValueError naming what was never written, unless an error ended it early."""
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        try:
            os.close(fd)
        except OSError as error:
            raise self._failure(error, "its last bytes") from error
        missing = [] if partial else self.missing()
        if missing:
            from isthmus.weights import collapse

            raise ValueError(f"never written to {self.path}:\n  " + "\n  ".join(collapse(missing)))

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(partial=kind is not None)  # an error under way is the one to report

    def _put(self, data: memoryview, place: int, label: str) -> None:
        if self._fd is None:
            raise ValueError(f"{self.path} is closed; {label} comes too late")
        try:
            while data:
                count = os.pwrite(self._fd, data, place)
                data, place = data[count:], place + count
        except OSError as error:
            raise self._failure(error, f"{label} ({len(data):,} bytes at {place:,})") from error

    def _failure(self, error: OSError, label: str) -> OSError:
        """The same kind of error, with what was being written, where, and the room there is."""
        try:
            state = os.statvfs(self.path.parent)
            room = f"{state.f_bavail * state.f_frsize:,} bytes free"
        except OSError:
            room = "no such folder"
        return OSError(
            error.errno,
            f"{os.strerror(error.errno or 0)}: cannot write {label} of {self.path}, "
            f"a file of {self.size:,} bytes ({room})",
        )


def write_index(folder: str | Path, files: Mapping[str, Sequence[OutputTensor]]) -> None:
    """Writes the index of a folder's files, computed from their headers; none where it has a single file.

    ValueError where the files do not hold exactly what they were declared to hold.
    """
    folder = Path(folder)
    defects = Defects()
    weight_map: dict[str, str] = {}
    total = 0
    for file, declared in files.items():
        if not _is_as_declared(folder / file, declared):
            _compare(folder / file, declared, defects)
        for tensor in declared:
            if tensor.name in weight_map:
                defects.add("in two files", tensor.name, f"{weight_map[tensor.name]} and {file}")
            weight_map[tensor.name] = file
            total += tensor.nbytes
    defects.raise_any(folder)
    if list(files) == [SINGLE]:
        return
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / INDEX).write_text(text, encoding="utf-8")


def _header(tensors: Sequence[OutputTensor]) -> bytes:
    """The header of a file of these tensors."""
    places = []
    end = 0
    for tensor in _aligned(tensors):
        places.append((tensor.name, tensor.dtype, tensor.shape, end, end + tensor.nbytes))
        end += tensor.nbytes
    return encode(places)


def _is_as_declared(path: Path, declared: Sequence[OutputTensor]) -> bool:
    """Whether a file begins and ends as :class:`ShardWriter` makes it."""
    header = _header(declared)
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            return size == len(header) + sum(t.nbytes for t in declared) and file.read(len(header)) == header
    except OSError:
        return False


def _compare(path: Path, declared: Sequence[OutputTensor], defects: Defects) -> None:
    """Adds to `defects` where a file's tensors are not those declared."""
    found, _ = read_header(path, defects)
    expected = {tensor.name: (tensor.dtype, tensor.shape) for tensor in declared}
    for info in found:
        if expected.pop(info.name, None) != (info.dtype, info.shape):
            defects.add(f"{path.name}: not as declared", info.name, f"{info.dtype} {info.shape}")
    for name in expected:
        defects.add(f"{path.name}: declared but not there", name)


def _fit(parts: Sequence[torch.Tensor], dtype: torch.dtype, shape: tuple[int, ...], row: int | None) -> bool:
    """Whether `parts` are the rows of one tensor of this dtype and shape, or those from `row` on."""
    if row is None and len(parts) == 1:
        return parts[0].dtype == dtype and parts[0].shape == shape
    count = sum(part.shape[0] for part in parts)
    return (count == shape[0] if row is None else 0 <= row <= shape[0] - count) and all(
        part.dtype == dtype and part.shape[1:] == shape[1:] for part in parts
    )


def _aligned(tensors: Sequence[OutputTensor]) -> list[OutputTensor]:
    """The order given if every tensor then begins at a multiple of its item size, else wide dtypes first."""
    begin = 0
    for tensor in tensors:
        if begin % tensor.dtype.itemsize:
            return sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
        begin += tensor.nbytes
    return list(tensors)


def _blocks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """A tensor's bytes in order; each view is good until the next is asked for."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_cpu and tensor.is_contiguous():
        yield memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
        return
    if tensor.numel() == 0:
        return
    if tensor.itemsize == 1:
        tensor = tensor.view(torch.uint8)  # torch cannot copy every kind of float this small
    buffer = torch.empty(min(BLOCK, tensor.numel() * tensor.itemsize), dtype=torch.uint8)
    for part in _parts(tensor):
        block = buffer[: part.numel() * part.itemsize]
        block.view(part.dtype).view(part.shape).copy_(part)
        yield memoryview(block.numpy())


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor cut into blocks along its first dims, as views."""
    if tensor.numel() * tensor.itemsize <= BLOCK:
        yield tensor
    elif rows := BLOCK // (tensor[0].numel() * tensor.itemsize):
        yield from tensor.split(rows)
    else:  # one row is larger than a block: a stack of experts
        for row in tensor:
            yield from _parts(row)
