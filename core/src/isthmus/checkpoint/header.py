"""The safetensors format: an 8-byte length, a JSON header, then tensor bytes without gaps.

Only headers are read and written here; no tensor data passes through this file.
"""

import json
import math
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from isthmus.json_text import parse_json

MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library itself

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F4": torch.float4_e2m1fn_x2,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: `offset` and `nbytes` count bytes of `file`, header included."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int


class Defects:
    """Everything wrong with a checkpoint, gathered so that it is reported at once."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[str, str]]] = {}

    def add(self, what: str, name: str = "", detail: str = "") -> None:
        """One defect; those of the same kind (`what`) share a line, with the first one's detail."""
        self._found.setdefault(what, []).append((name, detail))

    def __len__(self) -> int:
        return sum(map(len, self._found.values()))

    def raise_any(self, where: Path | str) -> None:
        """ValueError with a line for each kind of defect, names collapsed; nothing where there is none."""
        if not self._found:
            return
        from isthmus.weights import collapse

        lines = []
        for what, cases in self._found.items():
            names, detail = ", ".join(collapse(name for name, _ in cases if name)), cases[0][1]
            first = f" ({'first: ' if len(cases) > 1 else ''}{detail})" if detail else ""
            lines.append(f"  {what}{': ' if names else ''}{names}{first}")
        raise ValueError("\n".join([f"{where} is not a usable checkpoint:", *lines]))


def encode(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...], int, int]]) -> bytes:
    """Header of a file whose `(name, dtype, shape, begin, end)` are given; begin, end in bytes of data."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, dtype, shape, begin, end in tensors:
        if dtype is torch.float4_e2m1fn_x2:  # torch counts bytes, the file counts 4-bit values
            shape = (*shape[:-1], 2 * shape[-1])
        entries[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensor data starts at a multiple of 8
    return struct.pack("<Q", len(text)) + text


def read_header(path: Path, defects: Defects) -> tuple[list[TensorInfo], os.stat_result | None]:
    """Tensors of one file by offset, and the file's status; what is wrong is added to `defects`."""
    name = path.name
    try:
        with path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            length_bytes = file.read(8)
            length = struct.unpack("<Q", length_bytes)[0] if len(length_bytes) == 8 else 0
            if not 2 <= length <= min(status.st_size - 8, MAX_HEADER):
                defects.add(
                    f"{name}: truncated, or not a safetensors file",
                    detail=f"{status.st_size} bytes, header of {length} bytes",
                )
                return [], status
            text = _read_exactly(file.fileno(), length)
        entries = parse_json(text)
        if not isinstance(entries, dict):
            raise ValueError("not a JSON object")
    except OSError as error:
        defects.add(f"{name}: cannot be read", detail=str(error))
        return [], None
    except ValueError as error:  # json and unicode errors are ValueErrors
        defects.add(f"{name}: corrupt header", detail=str(error))
        return [], status
    entries.pop("__metadata__", None)
    found = []
    for tensor, entry in entries.items():
        info = _tensor(tensor, entry, name, 8 + length, defects)
        if info:
            found.append(info)
    found.sort(key=lambda info: (info.offset, info.nbytes))
    _check_cover(found, len(found) == len(entries), name, 8 + length, status.st_size, defects)
    return found, status


def _read_exactly(fd: int, length: int) -> bytes:
    """`length` bytes from a file known to hold them; a read may return fewer at a time."""
    blocks = []
    while length:
        block = os.read(fd, length)
        if not block:
            raise OSError(f"file ended {length} bytes early")
        blocks.append(block)
        length -= len(block)
    return b"".join(blocks)


def _tensor(name: str, entry: Any, file: str, data: int, defects: Defects) -> TensorInfo | None:
    """One header entry; `data` is where the file's tensor bytes begin."""
    try:
        code, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        defects.add(f"{file}: corrupt header entry", name, f"{entry}"[:200])
        return None
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        defects.add(f"{file}: shape or offsets are not counts", name, f"{shape}, [{begin}, {end}]")
        return None
    dtype = DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        defects.add(f"{file}: unknown dtype {code}", name, f"known: {', '.join(DTYPES)}")
        return None
    if dtype is torch.float4_e2m1fn_x2:
        if not shape or shape[-1] % 2:
            defects.add(f"{file}: F4 values do not fill whole bytes", name, f"shape {shape}")
            return None
        shape = (*shape[:-1], shape[-1] // 2)
    nbytes = math.prod(shape) * dtype.itemsize
    if end - begin != nbytes:
        defects.add(
            f"{file}: offsets and shape disagree",
            name,
            f"offsets [{begin}, {end}] hold {end - begin} bytes, {code} {shape} needs {nbytes}",
        )
        return None
    return TensorInfo(name, dtype, shape, file, data + begin, nbytes)


def _check_cover(
    tensors: list[TensorInfo], complete: bool, file: str, data: int, size: int, defects: Defects
) -> None:
    """Tensors must lie one after the other from the header's end to the file's end."""
    end = data
    for info in tensors:
        if info.offset < end:
            defects.add(
                f"{file}: tensors overlap", info.name, f"begins at byte {info.offset}, others end at {end}"
            )
        elif info.offset > end and complete:
            defects.add(f"{file}: unused bytes before", info.name, f"{end} to {info.offset}")
        if info.offset + info.nbytes > size:
            defects.add(
                f"{file}: truncated, these tensors lie beyond its end",
                info.name,
                f"ends at byte {info.offset + info.nbytes}, the file has {size}: download or copy it again",
            )
        end = max(end, info.offset + info.nbytes)
    if complete and end < size:
        defects.add(f"{file}: longer than its header says", detail=f"{size} bytes, tensors end at {end}")
