"""Reading checkpoints where they lie, against the safetensors library; and refusing every damaged one."""

import json
import os
import random
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from isthmus.checkpoint import readahead
from isthmus.checkpoint.header import DTYPES
from isthmus.checkpoint.reader import CheckpointReader

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random bits of a dtype; bool gets 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, size, generator=generator, dtype=torch.uint8).view(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def raw(header: dict | bytes, data: int = 0, length: int | None = None) -> bytes:
    """A file byte by byte, with `data` zero bytes; `length` overrides the header's true length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


def entry(code: str, shape: list[int], begin: int, end: int) -> dict:
    return {"dtype": code, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards of two tensors and their index."""
    files = {FIRST: ["a.0.w", "a.1.w"], SECOND: ["b.0.w", "b.1.w"]}
    for seed, (file, names) in enumerate(files.items()):
        save_file({name: random_tensor(torch.float32, (4, 3), seed) for name in names}, tmp_path / file)
    weight_map = {name: file for file, names in files.items() for name in names}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return tmp_path


def edit_index(folder: Path, edit) -> None:
    index = json.loads((folder / INDEX).read_text())
    edit(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError, match="is not a usable checkpoint") as caught:
        CheckpointReader(folder)
    return str(caught.value)


def test_every_dtype_reads_as_safetensors_reads_it(tmp_path):
    tensors = {code: random_tensor(dtype, (3, 8)) for code, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 4, dtype=torch.float64)}
    save_file(tensors, tmp_path / "model.safetensors")
    expected = load_file(tmp_path / "model.safetensors")
    with CheckpointReader(tmp_path) as reader:
        assert set(reader.tensors) == set(expected)
        for name, tensor in expected.items():
            info, got = reader.tensors[name], reader.slice(name)
            assert (info.dtype, info.shape, info.nbytes) == (tensor.dtype, tensor.shape, tensor.nbytes)
            assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
            assert bits(got) == bits(tensor)
        assert reader.bytes_read == sum(tensor.nbytes for tensor in expected.values())


def test_random_slices_equal_plain_indexing_and_are_counted_exactly(tmp_path):
    choose = random.Random(0)
    tensors = {
        f"t.{dim}.{number}": random_tensor(dtype, tuple(choose.randint(1, 9) for _ in range(dim)), number)
        for number, dtype in enumerate((torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64))
        for dim in (1, 2, 3)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    counted = 0
    with CheckpointReader(tmp_path) as reader:
        for _ in range(500):
            name = choose.choice(list(tensors))
            expected, arguments = tensors[name], {}
            if choose.random() < 0.5:
                arguments["index"] = choose.randrange(len(expected))
                expected = expected[arguments["index"]]
            for dim, argument in enumerate(("rows", "cols")):
                if dim < expected.dim() and choose.random() < 0.5:
                    start, stop = sorted(choose.choices(range(expected.size(dim) + 1), k=2))
                    arguments[argument] = slice(start, stop)
                    expected = expected.narrow(dim, start, stop - start)
            got = reader.slice(name, **arguments)
            assert got.shape == expected.shape, (name, arguments)
            assert bits(got) == bits(expected), (name, arguments)
            counted += expected.numel() * expected.itemsize
        assert reader.bytes_read == counted


def test_slices_are_views_of_one_map_and_outlive_the_reader(tmp_path):
    tensor = random_tensor(torch.float32, (64, 64))
    save_file({"w": tensor}, tmp_path / "model.safetensors")
    reader = CheckpointReader(tmp_path)
    whole, rows = reader.slice("w"), reader.slice("w", rows=slice(8, 16))
    assert whole.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
    reader.release()
    reader.close()
    assert bits(rows) == bits(tensor[8:16])
    with pytest.raises(ValueError, match="the reader is closed"):
        reader.slice("w")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_reader_that_nobody_closes_leaves_no_file_open(tmp_path):
    save_file({"w": torch.arange(3)}, tmp_path / "model.safetensors")

    def opened() -> list[str]:
        paths = map(os.path.realpath, Path("/proc/self/fd").iterdir())
        return [path for path in paths if path.startswith(str(tmp_path))]

    reader = CheckpointReader(tmp_path)
    view = reader.slice("w")
    del reader
    held = opened()
    assert view.tolist() == [0, 1, 2]
    del view
    assert len(held) <= 1, "the map's own, as long as a view of it lives"
    assert opened() == []


def test_a_write_to_a_view_never_reaches_the_file(tmp_path):
    save_file({"w": torch.zeros(64)}, tmp_path / "model.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()
    with CheckpointReader(tmp_path) as reader:
        reader.slice("w").fill_(1.0)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_headers_alone_are_read_at_construction(sharded, monkeypatch):
    largest = max((sharded / file).stat().st_size for file in (FIRST, SECOND))
    with (sharded / FIRST).open("r+b") as file:  # a hole of 1 TB would be noticed if it were read
        header_length = struct.unpack("<Q", file.read(8))[0]
        header = {"a.0.w": entry("U8", [1 << 40], 0, 1 << 40)}
        text = json.dumps(header).encode().ljust(header_length)
        file.seek(8)
        file.write(text)
        file.truncate(8 + header_length + (1 << 40))
    edit_index(sharded, lambda names: names.pop("a.1.w"))
    with CheckpointReader(sharded) as reader:
        assert reader.tensors["a.0.w"].nbytes == 1 << 40 > largest
        assert reader.bytes_read == 0


def test_tensors_come_in_file_order(sharded):
    with CheckpointReader(sharded) as reader:
        places = [(info.file, info.offset) for info in reader.tensors.values()]
        assert places == sorted(places)
        assert len(places) == 4


def test_an_unaligned_tensor_is_read_right(tmp_path):
    data = bytes(range(1, 60))
    header = {"a": entry("U8", [3], 0, 3), "w": entry("F32", [2, 7], 3, 59)}
    for padding in range(4):  # older writers did not pad the header
        text = json.dumps(header).encode() + b" " * padding
        (tmp_path / "model.safetensors").write_bytes(raw(text) + data)
        expected = torch.frombuffer(bytearray(data[3:]), dtype=torch.float32).view(2, 7)
        with CheckpointReader(tmp_path) as reader:
            assert bits(reader.slice("w")) == bits(expected)
            assert bits(reader.slice("w", cols=slice(2, 5))) == bits(expected[:, 2:5])
            assert bits(reader.slice("w", index=1, rows=slice(3, 7))) == bits(expected[1, 3:7])
            assert reader.slice("w", rows=slice(1, 1)).shape == (0, 7)
            assert reader.bytes_read == 56 + 24 + 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": slice(0, 5)}, r"w: rows slice\(0, 5, None\) do not lie in shape \(4, 3\)"),
        ({"rows": slice(-1, None)}, "rows"),
        ({"cols": slice(2, 1)}, "columns"),
        ({"rows": slice(0, 4, 2)}, "rows"),
        ({"index": 4}, r"w: no row 4 in shape \(4, 3\)"),
        ({"index": 0, "cols": slice(0, 1)}, "columns"),
    ],
)
def test_bounds_outside_the_tensor_are_refused(tmp_path, arguments, message):
    save_file({"w": torch.zeros(4, 3)}, tmp_path / "model.safetensors")
    with CheckpointReader(tmp_path) as reader, pytest.raises(ValueError, match=message):
        reader.slice("w", **arguments)


def test_an_unknown_name_is_a_lookup_error(sharded):
    with CheckpointReader(sharded) as reader, pytest.raises(LookupError, match="no tensor 'nope'"):
        reader.slice("nope")


def test_a_file_replaced_after_construction_is_refused(sharded):
    with CheckpointReader(sharded) as reader:
        save_file({"a.0.w": torch.zeros(12), "a.1.w": torch.zeros(12)}, sharded / FIRST)
        with pytest.raises(ValueError, match="has changed since its header was read"):
            reader.slice("a.0.w")


def test_all_defects_are_listed_at_once(sharded):
    def edit(names):
        del names["a.0.w"]
        names["a.1.w"] = SECOND
        names["ghost.0.w"] = names["ghost.1.w"] = FIRST
        names["gone.w"] = "model-00003-of-00002.safetensors"

    edit_index(sharded, edit)
    save_file({"stale": torch.zeros(1)}, sharded / "model.safetensors")
    message = refusal(sharded)
    for line in (
        f"in a file but not named by {INDEX}: a.0.w (in {FIRST})",
        f"in another file than {INDEX} says: a.1.w (index {SECOND}, found in {FIRST})",
        f"named by {INDEX} but in no file: ghost.{{0..1}}.w (first: should be in {FIRST})",
        f"{INDEX} names files that are not there: model-00003-of-00002.safetensors",
        f"not named by {INDEX}: model.safetensors",
    ):
        assert line in message
    assert "gone.w" not in message  # its file is reported, once


def test_a_tensor_in_two_files_is_refused(sharded):
    save_file({"b.0.w": torch.zeros(1), "b.1.w": torch.zeros(1), "a.0.w": torch.zeros(1)}, sharded / SECOND)
    assert f"held by two files: a.0.w ({FIRST} and {SECOND})" in refusal(sharded)


def test_a_truncated_file_is_refused_with_both_sizes(sharded):
    size = (sharded / SECOND).stat().st_size
    os.truncate(sharded / SECOND, size - 1)
    message = refusal(sharded)
    assert f"{SECOND}: truncated, these tensors lie beyond its end: b.1.w" in message
    assert f"ends at byte {size}, the file has {size - 1}" in message


DAMAGED = {
    "empty": (b"", "truncated, or not a safetensors file (0 bytes"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\n", "truncated, or not a safetensors file"),
    "header beyond the end": (raw(b"{}", length=1000), "truncated, or not a safetensors file"),
    "half a header": (raw(b'{"a": '), "corrupt header"),
    "no text": (raw(b"\xff\xfe\xff\xfe"), "corrupt header"),
    "not an object": (raw(b"[1]"), "corrupt header (not a JSON object)"),
    "name twice": (raw(b'{"a": 1, "a": 2}'), "corrupt header ('a' given more than once)"),
    "no shape": (raw({"a": {"dtype": "F32"}}), "corrupt header entry: a"),
    "negative shape": (raw({"a": entry("F32", [-1], 0, 4)}, 4), "shape or offsets are not counts: a"),
    "unknown dtype": (raw({"a": entry("F6", [8], 0, 6)}, 6), "unknown dtype F6: a (known: BOOL"),
    "dtype of no text": (raw({"a": entry(["F32"], [8], 0, 6)}, 6), "unknown dtype ['F32']: a"),
    "wrong shape": (
        raw({"a": entry("BF16", [3, 4], 0, 12)}, 12),
        "offsets and shape disagree: a (offsets [0, 12] hold 12 bytes, BF16 (3, 4) needs 24)",
    ),
    "overlap": (raw({"a": entry("U8", [8], 0, 8), "b": entry("U8", [8], 4, 12)}, 12), "tensors overlap: b"),
    "hole": (raw({"a": entry("U8", [8], 0, 8), "b": entry("U8", [4], 9, 13)}, 13), "unused bytes before: b"),
    "too long": (raw({"a": entry("U8", [8], 0, 8)}, 9), "longer than its header says"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused(tmp_path, case):
    content, message = DAMAGED[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    assert f"model.safetensors: {message}" in refusal(tmp_path)


def test_a_folder_without_safetensors_says_what_is_there(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert "found pytorch_model.bin: convert it to safetensors first" in refusal(tmp_path)


def test_shards_without_an_index_are_refused(sharded):
    (sharded / INDEX).unlink()
    assert FIRST in refusal(sharded)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not a folder"):
        CheckpointReader(tmp_path / "none")


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {"a": "../a"}}', '{"weight_map": {}}'])
def test_a_corrupt_index_is_refused(sharded, text):
    (sharded / INDEX).write_text(text)
    assert INDEX in refusal(sharded)


@pytest.mark.parametrize(
    ("value", "shown"), [("", "''"), ("x" * 300, "'" + "x" * 40), ("..", "'..'"), ("../a", "'../a'")]
)
def test_tensors_whose_file_has_no_name_are_listed(sharded, value, shown):
    edit_index(sharded, lambda names: names.update({"a.0.w": value, "a.1.w": value}))
    message = refusal(sharded)
    assert (
        f"{INDEX} gives no name of a file in this folder for: a.{{0..1}}.w (first: it says {shown}" in message
    )
    assert "Errno" not in message


@pytest.mark.parametrize("header", [b"{}", b'{"__metadata__": {"format": "pt"}}'])
def test_tensors_of_a_file_that_is_empty_are_missed(sharded, header):
    (sharded / FIRST).write_bytes(raw(header))
    assert f"named by {INDEX} but in no file: a.{{0..1}}.w (first: should be in {FIRST})" in refusal(sharded)


def test_other_safetensors_beside_an_index_are_left_alone(sharded):
    save_file({"x": torch.zeros(1)}, sharded / "consolidated.safetensors")
    with CheckpointReader(sharded) as reader:
        assert "x" not in reader.tensors


def test_reading_ahead_asks_for_every_planned_byte_once_and_no_further(monkeypatch):
    monkeypatch.setattr(readahead, "WINDOW", 64)
    monkeypatch.setattr(readahead, "STEP", 16)
    choose = random.Random(0)
    for _ in range(50):
        asked: list[tuple[str, int, int]] = []
        ahead = readahead.ReadAhead(lambda *what, asked=asked: asked.append(what))
        planned, end = [], 0
        for number in range(choose.randint(1, 30)):
            begin = end + choose.choice((0, 13))
            end = begin + choose.choice((1, 7, 16, 40))
            planned.append((("t", number), begin, end))
        sizes = [end - begin for _, begin, end in planned]
        for key, begin, end in planned:
            ahead.add(key, "f", begin, end)
        for number, (key, _, _) in enumerate(planned):
            ahead.reached(key, 0)
            total = sum(end - begin for _, begin, end in asked)
            assert total <= sum(sizes[:number]) + 64
            assert total >= min(sum(sizes), sum(sizes[:number]) + 64 - 16)
        assert not ahead.reached(("t", -1), 0)
        bytes_asked = [byte for _, begin, end in asked for byte in range(begin, end)]
        bytes_planned = [byte for _, begin, end in planned for byte in range(begin, end)]
        assert bytes_asked == bytes_planned


def test_planned_reads_give_the_same_tensors(sharded):
    with CheckpointReader(sharded) as reader:
        expected = {name: bits(reader.slice(name)) for name in reader.tensors}
        reader.will_need([("a.0.w", 1), "a.1.w", "b.0.w"])
        assert {name: bits(reader.slice(name)) for name in reader.tensors} == expected
        assert bits(reader.slice("a.0.w", index=1)) == expected["a.0.w"][12:24]
        with pytest.raises(LookupError):
            reader.will_need(["nope"])
