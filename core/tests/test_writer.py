"""Writing safetensors files: what the safetensors library reads back, and what is refused."""

import errno
import json
import random
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from isthmus.checkpoint import writer as writing
from isthmus.checkpoint.header import DTYPES
from isthmus.checkpoint.writer import (
    OutputTensor,
    ShardWriter,
    parse_size,
    shard_names,
    split_files,
    write_index,
)

INDEX = "model.safetensors.index.json"


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, size, generator=generator, dtype=torch.uint8).view(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def declared(tensors: dict[str, torch.Tensor]) -> list[OutputTensor]:
    return [OutputTensor(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def assert_holds(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            got = file.get_tensor(name)
            assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape), name
            assert bits(got) == bits(tensor), name


def begins(path: Path) -> dict[str, int]:
    """Name -> first byte in the file, read with nothing of ours."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    assert length % 8 == 0
    header.pop("__metadata__")
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items()}


def test_safetensors_reads_every_dtype_and_shape_bit_for_bit(tmp_path):
    tensors = {code: random_tensor(dtype, (3, 8)) for code, dtype in DTYPES.items()}
    tensors |= {
        "scalar": torch.tensor(-2.5),
        "empty": torch.zeros(0, 4),
        "odd": random_tensor(torch.uint8, (7,)),
    }
    tensors |= {
        "na\u00efve.w": random_tensor(torch.bfloat16, (5,)),
        "late": random_tensor(torch.float64, (3,)),
    }
    with ShardWriter(tmp_path / "model.safetensors", declared(tensors)) as writer:
        for name in sorted(tensors):
            writer.write(name, tensors[name])
    assert_holds(tmp_path / "model.safetensors", tensors)
    assert writer.size == (tmp_path / "model.safetensors").stat().st_size


def test_tensors_lie_in_the_order_given(tmp_path):
    tensors = {name: random_tensor(torch.bfloat16, (4, 4), seed) for seed, name in enumerate("zaym")}
    tensors["b"] = random_tensor(torch.float32, (2,))
    with ShardWriter(tmp_path / "x", declared(tensors)) as writer:
        for name in sorted(tensors):
            writer.write(name, tensors[name])
    places = begins(tmp_path / "x")
    assert sorted(places, key=places.__getitem__) == list("zaymb")


def test_every_tensor_is_aligned_for_its_dtype(tmp_path):
    choose = random.Random(0)
    for _ in range(20):
        kinds = [torch.uint8, torch.bfloat16, torch.float32, torch.complex64, torch.float8_e4m3fn]
        tensors = {f"t{n}": random_tensor(choose.choice(kinds), (choose.randint(1, 9),)) for n in range(9)}
        path = tmp_path / "x"
        path.unlink(missing_ok=True)
        with ShardWriter(path, declared(tensors)) as writer:
            for name, tensor in tensors.items():
                writer.write(name, tensor)
        assert all(begin % tensors[name].itemsize == 0 for name, begin in begins(path).items())
        assert_holds(path, tensors)


def test_stacked_rows_and_strided_tensors_arrive_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "BLOCK", 64)  # bytes, so that a few rows make many blocks
    stack = random_tensor(torch.bfloat16, (5, 6, 8))
    base = random_tensor(torch.float32, (40, 30, 2))
    tensors = {
        "stack": stack,
        "transposed": base[:, :, 0].t(),
        "step": base[::3, :, 1],
        "wide": base.permute(2, 1, 0),
        "expanded": base[0, :1, 0].expand(50),
        "long": base.reshape(-1)[::2],
        "float8": random_tensor(torch.float8_e8m0fnu, (9, 8)).t(),
        "gradient": random_tensor(torch.int32, (8,)).float().requires_grad_(),
    }
    with ShardWriter(tmp_path / "x", declared(tensors)) as writer:
        for row in (3, 0, 4, 1, 2):
            writer.write("stack", stack[row], index=row)
        for name in set(tensors) - {"stack"}:
            writer.write(name, tensors[name])
    assert_holds(tmp_path / "x", {name: tensor.detach() for name, tensor in tensors.items()})


def test_rows_in_several_parts_are_one_tensor(tmp_path):
    whole, stack = random_tensor(torch.bfloat16, (7, 5)), random_tensor(torch.float32, (2, 6, 3))
    tensors = {"whole": whole, "stack": stack}
    with ShardWriter(tmp_path / "x", declared(tensors)) as writer:
        writer.write("whole", whole[:1], whole[1:5], whole[5:])
        writer.write("stack", stack[1, :4], stack[1, 4:], index=1)
        writer.write("stack", stack[0], index=0)
    assert_holds(tmp_path / "x", tensors)


def test_several_writers_fill_one_file(tmp_path):
    tensors = {
        "whole": random_tensor(torch.bfloat16, (7, 5)),
        "stack": random_tensor(torch.float32, (2, 6, 3)),
    }
    tensors["late"] = random_tensor(torch.uint8, (9,))
    whole, stack, late = tensors.values()
    first = ShardWriter(tmp_path / "x", declared(tensors))
    second = ShardWriter(tmp_path / "x", declared(tensors), joins=True)
    second.write("whole", whole[4:5], whole[5:], row=4)
    second.write("stack", stack[1], index=1)
    first.write("whole", whole[:1], row=0)
    second.write("stack", stack[0, 2:], index=0, row=2)
    first.write("stack", stack[0, :2], index=0, row=0)
    first.write("late", late)
    first.joined(second.written)
    assert first.missing() == ["whole[1]", "whole[2]", "whole[3]"]
    first.write("whole", whole[1:4], row=1)
    second.close(partial=True)
    first.close()
    assert_holds(tmp_path / "x", tensors)


def test_a_writer_joins_only_a_file_that_is_there(tmp_path):
    with pytest.raises(OSError, match=r"cannot write the file of .*x") as caught:
        ShardWriter(tmp_path / "x", [OutputTensor("w", torch.float32, (4, 2))], joins=True)
    assert caught.value.errno == errno.ENOENT


def test_what_two_writers_have_written_is_refused(tmp_path):
    files = [OutputTensor("w", torch.float32, (4, 2)), OutputTensor("s", torch.float32, (2, 3, 2))]
    writer = ShardWriter(tmp_path / "x", files)
    writer.write("w", torch.zeros(2, 2), row=1)
    writer.write("s", torch.zeros(1, 2), index=1, row=2)
    for part, place in (("w", (0, 9)), ("w", (23, 32)), ("s", (40, 48))):
        with pytest.raises(ValueError, match=f"{part} is written twice"):
            writer.joined({part: [place]})
    with pytest.raises(ValueError, match=r"s\[1\] is written twice"):
        writer.write("s", torch.zeros(3, 2), index=1)
    writer.joined({"w": [(0, 8), (24, 32)], "s": [(0, 24)]})
    assert writer.missing() == ["s[1]"]
    writer.close(partial=True)


@pytest.mark.parametrize("row", [-1, 3, 4])
def test_rows_beyond_a_tensor_are_refused(tmp_path, row):
    with ShardWriter(tmp_path / "x", [OutputTensor("w", torch.float32, (4, 2))]) as writer:
        with pytest.raises(
            ValueError, match=rf"w: declared .* \(4, 2\), given .* \(2, 2\) from row {row} on"
        ):
            writer.write("w", torch.zeros(2, 2), row=row)
        writer.write("w", torch.zeros(4, 2))


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([torch.zeros(2, 2), torch.zeros(1, 2)], id="too few rows"),
        pytest.param([torch.zeros(4, 2), torch.zeros(1, 2)], id="too many rows"),
        pytest.param([torch.zeros(2, 2), torch.zeros(2, 3)], id="another width"),
        pytest.param([torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.int32)], id="another dtype"),
    ],
)
def test_parts_that_are_not_the_rows_declared_are_refused(tmp_path, parts):
    with ShardWriter(tmp_path / "x", [OutputTensor("w", torch.float32, (4, 2))]) as writer:
        with pytest.raises(ValueError, match=r"w: declared torch.float32 \(4, 2\), given torch.float32 \("):
            writer.write("w", *parts)
        writer.write("w", torch.zeros(4, 2))


def test_what_was_never_written_is_named_at_close(tmp_path):
    files = [OutputTensor(f"a.{n}.w", torch.float32, (2,)) for n in range(4)]
    files.append(OutputTensor("s", torch.float32, (3, 2)))
    writer = ShardWriter(tmp_path / "x", files)
    writer.write("a.2.w", torch.zeros(2))
    writer.write("s", torch.zeros(2), index=1)
    with pytest.raises(ValueError, match="never written") as caught:
        writer.close()
    assert "a.{0..1,3}.w" in str(caught.value)
    assert "s[{0,2}]" in str(caught.value)
    writer.close()  # said once


def test_an_error_in_the_block_is_the_one_reported(tmp_path):
    files = [OutputTensor("a", torch.float32, (2,))]
    with pytest.raises(ZeroDivisionError), ShardWriter(tmp_path / "x", files):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("tensor", "index", "message"),
    [
        (torch.zeros(3, 2), None, r"w: declared torch.float32 \(4, 2\), given torch.float32 \(3, 2\)"),
        (torch.zeros(4, 2, dtype=torch.float16), None, "given torch.float16"),
        (torch.zeros(4, 2), 1, r"w\[1\]: declared torch.float32 \(2,\)"),
        (torch.zeros(2), 4, "no row 4"),
        (torch.zeros(2), -1, "no row -1"),
    ],
)
def test_a_tensor_that_was_not_declared_so_is_refused(tmp_path, tensor, index, message):
    with ShardWriter(tmp_path / "x", [OutputTensor("w", torch.float32, (4, 2))]) as writer:
        with pytest.raises(ValueError, match=message):
            writer.write("w", tensor, index=index)
        writer.write("w", torch.zeros(4, 2))


def test_a_second_write_of_a_tensor_or_row_is_refused(tmp_path):
    files = [OutputTensor(name, torch.float32, (2, 2)) for name in "ab"]
    writer = ShardWriter(tmp_path / "x", files)
    writer.write("a", torch.zeros(2, 2))
    writer.write("b", torch.zeros(2), index=0)
    for name, tensor, index in (
        ("a", torch.zeros(2, 2), None),
        ("a", torch.zeros(2), 0),
        ("b", torch.zeros(2), 0),
    ):
        with pytest.raises(ValueError, match="written twice"):
            writer.write(name, tensor, index=index)
    with pytest.raises(ValueError, match="written twice"):
        writer.write("b", torch.zeros(2, 2))
    with pytest.raises(LookupError, match="no tensor 'c'"):
        writer.write("c", torch.zeros(2))
    writer.close(partial=True)
    with pytest.raises(ValueError, match="closed"):
        writer.write("b", torch.zeros(2), index=1)


def test_dtypes_that_safetensors_lacks_and_repeated_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"safetensors has no torch\.complex128"):
        ShardWriter(tmp_path / "x", [OutputTensor("a", torch.complex128, (1,))])
    with pytest.raises(ValueError, match="a is listed twice"):
        ShardWriter(tmp_path / "x", [OutputTensor("a", torch.float32, (1,))] * 2)


def test_a_large_tensor_is_written_without_a_copy_of_it(tmp_path):
    script = r"""
        import re, sys, torch
        from pathlib import Path
        from isthmus.checkpoint.writer import OutputTensor, ShardWriter
        def most():  # getrusage would begin with what this process's parent has
            return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
        contiguous = torch.ones(100 << 20, dtype=torch.uint8).view(1024, -1)
        before = most()
        for name, tensor in (("plain", contiguous), ("strided", contiguous.t())):
            files = [OutputTensor("w", tensor.dtype, tuple(tensor.shape))]
            with ShardWriter(sys.argv[1] + name, files) as writer:
                writer.write("w", tensor)
            print(most() - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), f"{tmp_path}/"],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    plain, strided = map(int, done.stdout.split())  # KiB more than before
    assert plain < 20_000
    assert strided < 40_000  # a block of 16 MiB, not 100


def test_a_failed_write_names_path_and_sizes(tmp_path):
    path, limit = tmp_path / "model.safetensors", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))
    try:
        writer = ShardWriter(path, [OutputTensor("w", torch.uint8, (50_000,))])
        with pytest.raises(OSError, match=f"cannot write w .* of {path}, a file of 50,") as caught:
            writer.write("w", torch.zeros(50_000, dtype=torch.uint8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert caught.value.errno == errno.EFBIG
    assert "bytes free" in str(caught.value)
    writer.close(partial=True)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(OSError, match=f"cannot write the file of {tmp_path}/none/x") as caught:
        ShardWriter(tmp_path / "none" / "x", [])
    assert caught.value.errno == errno.ENOENT


def test_files_are_cut_in_order_at_the_size_given():
    tensors = [
        OutputTensor(f"t{n}", torch.uint8, (size,)) for n, size in enumerate((4, 6, 1, 30, 2, 8, 10, 0))
    ]
    cut = [[tensor.nbytes for tensor in file] for file in split_files(tensors, 10)]
    assert cut == [[4, 6], [1], [30], [2, 8], [10, 0]]
    assert split_files([], 10) == []


def test_file_names_are_those_of_transformers():
    assert shard_names(1) == ["model.safetensors"]
    assert shard_names(12)[2] == "model-00003-of-00012.safetensors"


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("5 gb", 5 * 10**9), ("2GiB", 2**31), ("1.5MB", 1_500_000), ("12", 12), (7, 7)],
)
def test_sizes_are_read_as_transformers_reads_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5XB", "-1GB", "0", "5GBs", "9" * 400, "9" * 400 + "GB"])
def test_a_size_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="is not a size; write it as 5GB"):
        parse_size(text)


def write_files(folder: Path) -> dict[str, list[OutputTensor]]:
    files = {}
    for number, file in enumerate(shard_names(2)):
        tensors = {f"t.{number}.{k}": random_tensor(torch.bfloat16, (3, k + 1)) for k in range(2)}
        files[file] = declared(tensors)
        with ShardWriter(folder / file, files[file]) as writer:
            for name, tensor in tensors.items():
                writer.write(name, tensor)
    return files


def test_the_index_says_what_the_files_hold(tmp_path):
    files = write_files(tmp_path)
    write_index(tmp_path, files)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == {"total_size": 2 * (6 + 12)}
    held = {}
    for file in files:
        with safe_open(tmp_path / file, "pt") as opened:
            held |= dict.fromkeys(opened.keys(), file)
    assert index["weight_map"] == held


def test_no_index_beside_a_single_file(tmp_path):
    files = {"model.safetensors": [OutputTensor("w", torch.float32, (1,))]}
    with ShardWriter(tmp_path / "model.safetensors", files["model.safetensors"]) as writer:
        writer.write("w", torch.zeros(1))
    write_index(tmp_path, files)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_no_index_for_files_that_do_not_hold_what_was_declared(tmp_path):
    files = write_files(tmp_path)
    first, second = files
    files[first] = [OutputTensor("t.0.0", torch.float32, (3, 1)), *files[first][1:]]
    files[second] = [*files[second], OutputTensor("ghost", torch.float32, (3, 1))]
    files["model-00003-of-00003.safetensors"] = []
    with pytest.raises(ValueError, match="not a usable checkpoint") as caught:
        write_index(tmp_path, files)
    for line in (
        f"{first}: not as declared: t.0.0",
        f"{second}: declared but not there: ghost",
        "cannot be read",
    ):
        assert line in str(caught.value)
    assert not (tmp_path / INDEX).exists()
