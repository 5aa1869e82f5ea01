"""Each format against its published definition: one code at a time, in Python's own numbers.

The reference below knows the formats from their definitions and nothing of the implementation. Every case has
all codes there are (zeros, negatives, subnormals, the largest), and matrices whose last block is partial.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from isthmus.checkpoint.dequantised import DequantisedReader, open_checkpoint
from isthmus.checkpoint.dtypes import same_bits
from isthmus.checkpoint.requantise import Requantiser
from isthmus.cli.inspect import sample
from isthmus.quant.codec import Grids, dequantise, requantise

STATED_SHAPE = 2 * 8  # bytes of a `weight_shape`
FLOAT32 = 1e-5  # a sum in another order
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu


def small_float(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """A sign, an exponent, a mantissa; without the leading 1 where the exponent is 0."""
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = (code & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    return sign * (
        math.ldexp(mantissa, 1 - bias) if exponent == 0 else math.ldexp(1 + mantissa, exponent - bias)
    )


def e4m3(code: int) -> float:
    return small_float(code, 4, 3, 7)


def e5m2(code: int) -> float:
    return small_float(code, 5, 2, 15)


def e2m1(code: int) -> float:
    return small_float(code, 2, 1, 1)


def rounded(number: float) -> Tensor:
    """To float32, then to bfloat16, as the only two roundings."""
    return torch.tensor(number, dtype=torch.float64).float().bfloat16()


def matrix(rows: int, cols: int, value: Callable[[int, int], float]) -> Tensor:
    return torch.stack([torch.stack([rounded(value(r, c)) for c in range(cols)]) for r in range(rows)])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def codes8(shape: tuple[int, ...], invalid: Callable[[int], bool], seed: int = 0) -> Tensor:
    """Bytes in random order, each that is a number as often as any other."""
    valid = torch.tensor([code for code in range(256) if not invalid(code)], dtype=torch.uint8)
    count = math.prod(shape)
    found = valid.repeat(-(-count // len(valid)))[:count]
    return found[torch.randperm(count, generator=generator(seed))].view(shape)


def valid8(dtype: torch.dtype) -> tuple[Callable[[int], float], Callable[[int], bool]]:
    if dtype == E4M3:
        return e4m3, lambda code: code & 0x7F == 0x7F
    return e5m2, lambda code: code & 0x7C == 0x7C


def scales(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(shape, generator=generator(seed)) * 0.01 + 1e-4


def powers(*shape: int, seed: int = 2) -> Tensor:
    """Bytes of e8m0 around 1, from 2**-20 to 2**19."""
    return torch.randint(107, 147, shape, generator=generator(seed), dtype=torch.uint8)


type Case = tuple[dict[str, Tensor], dict, dict[str, Tensor]]  # stored, quantization_config, expected

FP8 = {"quant_method": "fp8", "fmt": "e4m3"}


def fp8_matrix(codes: Tensor, dtype: torch.dtype, scale_of: Callable[[int, int], float]) -> Tensor:
    value, _ = valid8(dtype)
    rows = codes.tolist()
    return matrix(*codes.shape, lambda r, c: value(rows[r][c]) * scale_of(r, c))


def fp8_block(dtype: torch.dtype = E4M3, scale_dtype: torch.dtype = torch.float32, name="_scale_inv") -> Case:
    """DeepSeek-V3's form at a fraction of its size: 72 rows in blocks of 16 have 5 scales."""
    codes = codes8((72, 50), valid8(dtype)[1])
    scale = scales(5, 4).to(scale_dtype) if scale_dtype != E8M0 else powers(5, 4).view(E8M0)
    exact = (
        scale.double().tolist()
        if scale_dtype != E8M0
        else torch.pow(2.0, powers(5, 4).double() - 127).tolist()
    )
    expected = fp8_matrix(codes, dtype, lambda r, c: exact[r // 16][c // 16])
    key = "a.weight" + name if name.startswith("_") else "a" + name
    fmt = {E4M3: "e4m3", E5M2: "e5m2"}[dtype]
    return (
        {"a.weight": codes.view(dtype), key: scale, "norm.weight": torch.ones(3).bfloat16()},
        {**FP8, "fmt": fmt, "weight_block_size": [16, 16]},
        {"a.weight": expected},
    )


def fp8_rectangle() -> Case:
    """Blocks that are not square, neither of whose sides divides the matrix."""
    codes, scale = codes8((37, 45), valid8(E4M3)[1]), scales(4, 3)
    exact = scale.double().tolist()
    expected = fp8_matrix(codes, E4M3, lambda r, c: exact[r // 10][c // 20])
    stored = {"a.weight": codes.view(E4M3), "a.weight_scale_inv": scale}
    return stored, {**FP8, "weight_block_size": [10, 20]}, {"a.weight": expected}


def fp8_tensor(shape: tuple[int, ...] = ()) -> Case:
    codes, scale = codes8((20, 30), valid8(E4M3)[1]), scales(*shape)
    stored = {"a.weight": codes.view(E4M3), "a.weight_scale": scale, "a.input_scale": torch.tensor(1.0)}
    expected = fp8_matrix(codes, E4M3, lambda r, c: scale.double().item())
    return stored, {**FP8, "activation_scheme": "static"}, {"a.weight": expected}


def fp8_channel(trailing: tuple[int, ...] = (1,)) -> Case:
    codes, scale = codes8((20, 30), valid8(E4M3)[1]), scales(20, *trailing).bfloat16()
    exact = scale.double().flatten().tolist()
    expected = fp8_matrix(codes, E4M3, lambda r, c: exact[r])
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    config |= {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    return {"a.weight": codes.view(E4M3), "a.weight_scale": scale}, config, {"a.weight": expected}


def fp8_stack(kind: str) -> Case:
    """Experts in one tensor (3, 20, 30): scales in blocks, one for each expert, or one for all."""
    codes = codes8((3, 20, 30), valid8(E4M3)[1])
    scale = {"block": scales(3, 3, 4), "expert": scales(3), "expert 3-D": scales(3, 1, 1), "all": scales()}[
        kind
    ]
    exact = scale.double().expand(3, 3, 4) if kind in ("block", "expert 3-D", "all") else None
    exact = scale.double()[:, None, None].expand(3, 3, 4) if exact is None else exact
    matrices = [
        fp8_matrix(codes[e], E4M3, lambda r, c, e=e: exact[e, r // 8, c // 8].item()) for e in range(3)
    ]
    config = {**FP8, **({"weight_block_size": [8, 8]} if kind == "block" else {})}
    stored = {"experts.up": codes.view(E4M3), "experts.up_scale_inv": scale}
    return stored, config, {"experts.up": torch.stack(matrices)}


def nibble(bytes_: list[int], col: int) -> int:
    """Code `col` of a row of bytes: the low half is the first."""
    return bytes_[col // 2] >> 4 * (col % 2) & 15


def mxfp4_blocks() -> Case:
    """(E, R, G, 16) bytes and (E, R, G) powers of two."""
    codes, scale = codes8((2, 5, 3, 16), lambda code: False), powers(2, 5, 3)
    flat = codes.view(2, 5, 48).tolist()
    matrices = [
        matrix(
            5, 96, lambda r, c, e=e: e2m1(nibble(flat[e][r], c)) * 2.0 ** (scale[e, r, c // 32].item() - 127)
        )
        for e in range(2)
    ]
    stored = {"mlp.experts.up_blocks": codes, "mlp.experts.up_scales": scale}
    return stored, {"quant_method": "mxfp4"}, {"mlp.experts.up": torch.stack(matrices)}


def mxfp4_packed() -> Case:
    """DeepSeek-V4's experts: int8 (R, C / 2) and e8m0 (R, C / 32); the last group is partial."""
    codes, scale = codes8((9, 40), lambda code: False), powers(9, 3)
    rows = codes.tolist()
    expected = matrix(9, 80, lambda r, c: e2m1(nibble(rows[r], c)) * 2.0 ** (scale[r, c // 32].item() - 127))
    stored = {"e.w1.weight": codes.view(torch.int8), "e.w1.scale": scale.view(E8M0)}
    config = {**FP8, "weight_block_size": [128, 128], "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    return stored, config, {"e.w1.weight": expected}


def nvfp4(divides: bool) -> Case:
    codes, group = codes8((9, 24), lambda code: False), codes8((9, 3), lambda code: code >= 0x7F, seed=3)
    whole = torch.tensor(0.37)
    rows, groups = codes.tolist(), [[e4m3(code) for code in row] for row in group.tolist()]

    def scale(r: int, c: int) -> float:
        """The product (or quotient) of the two scales is a float32 of its own."""
        number = groups[r][c // 16]
        exact = number / whole.double().item() if divides else number * whole.double().item()
        return torch.tensor(exact, dtype=torch.float64).float().double().item()

    expected = matrix(9, 48, lambda r, c: e2m1(nibble(rows[r], c)) * scale(r, c))
    if divides:
        weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
        config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
        config |= {"config_groups": {"group_0": {"weights": weights}}}
        names = ("a.weight_packed", "a.weight_scale", "a.weight_global_scale")
        return (
            dict(zip(names, (codes, group.view(E4M3), whole[None]), strict=True)),
            config,
            {"a.weight": expected},
        )
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    names = ("a.weight", "a.weight_scale", "a.weight_scale_2")
    return dict(zip(names, (codes, group.view(E4M3), whole), strict=True)), config, {"a.weight": expected}


def packed(numbers: list[list[int]], bits: int) -> Tensor:
    """Signed numbers of rows, each with 2**(bits - 1) added, in words of 32 bits from the lowest bits on."""
    each = 32 // bits
    words = []
    for row in numbers:
        line = []
        for begin in range(0, len(row), each):
            word = sum(n + 2 ** (bits - 1) << bits * i for i, n in enumerate(row[begin : begin + each]))
            line.append(word - 2**32 if word >= 2**31 else word)
        words.append(line)
    return torch.tensor(words, dtype=torch.int32)


def integers(bits: int, zero: bool, group: int | None, cols: int = 64, is_packed: bool = True) -> Case:
    """compressed-tensors' integers; 19 rows, so that the last word of zero points is partial."""
    rows, groups = 19, 1 if group is None else cols // group
    span = 2 ** (bits - 1)
    codes = [[(r * cols + c) * 7 % (2 * span) - span for c in range(cols)] for r in range(rows)]
    zeros = [[(r * groups + g) * 5 % (2 * span) - span for g in range(groups)] for r in range(rows)]
    scale = scales(rows, groups).bfloat16()
    exact = scale.double().tolist()

    def value(r: int, c: int) -> float:
        g = 0 if group is None else c // group
        return (codes[r][c] - (zeros[r][g] if zero else 0)) * exact[r][g]

    weights = {"num_bits": bits, "type": "int", "symmetric": not zero, "group_size": group}
    weights["strategy"] = "channel" if group is None else "group"
    form = "pack-quantized" if is_packed else "int-quantized"
    config = {"quant_method": "compressed-tensors", "format": form}
    config |= {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    expected = {"a.weight": matrix(rows, cols, value)}
    if not is_packed:
        stored = {"a.weight": torch.tensor(codes, dtype=torch.int8), "a.weight_scale": scale}
        extra = {"a.weight_zero_point": torch.tensor(zeros, dtype=torch.int8)} if zero else {}
        return stored | extra, config, expected
    stored = {"a.weight_packed": packed(codes, bits), "a.weight_scale": scale}
    stored["a.weight_shape"] = torch.tensor([rows, cols])
    if zero:
        stored["a.weight_zero_point"] = packed(list(map(list, zip(*zeros, strict=True))), bits).T.contiguous()
    return stored, config, expected


CASES: dict[str, Callable[[], Case]] = {
    "fp8 block": fp8_block,
    "fp8 e5m2": lambda: fp8_block(E5M2, torch.bfloat16),
    "fp8 e8m0": lambda: fp8_block(E4M3, E8M0, ".scale"),
    "fp8 rectangle": fp8_rectangle,
    "fp8 tensor, 0-d": fp8_tensor,
    "fp8 tensor, 1 element": lambda: fp8_tensor((1,)),
    "fp8 channel, column": fp8_channel,
    "fp8 channel, vector": lambda: fp8_channel(()),
    "fp8 stack, block": lambda: fp8_stack("block"),
    "fp8 stack, expert": lambda: fp8_stack("expert"),
    "fp8 stack, expert 3-D": lambda: fp8_stack("expert 3-D"),
    "fp8 stack, all": lambda: fp8_stack("all"),
    "mxfp4 blocks": mxfp4_blocks,
    "mxfp4 packed": mxfp4_packed,
    "nvfp4 multiplied": lambda: nvfp4(divides=False),
    "nvfp4 divided": lambda: nvfp4(divides=True),
    "int4": lambda: integers(4, zero=False, group=32),
    "int4 zero": lambda: integers(4, zero=True, group=32),
    "int4 channel": lambda: integers(4, zero=False, group=None),
    "int4 filled word": lambda: integers(4, zero=True, group=20, cols=60),
    "int8 packed": lambda: integers(8, zero=False, group=16),
    "int8 packed zero": lambda: integers(8, zero=True, group=16),
    "int8": lambda: integers(8, zero=False, group=None, is_packed=False),
    "int8 zero": lambda: integers(8, zero=True, group=None, is_packed=False),
}


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[DequantisedReader, dict[str, Tensor]]]:
    """A reader of a case's checkpoint, and what it must give; the reference is worked out once."""
    found: dict[str, tuple[DequantisedReader, dict[str, Tensor]]] = {}

    def make(case: str) -> tuple[DequantisedReader, dict[str, Tensor]]:
        if case not in found:
            stored, config, expected = CASES[case]()
            folder = tmp_path_factory.mktemp("case")
            found[case] = reader_of(folder, stored, config), expected
        return found[case]

    return make


def reader_of(folder: Path, stored: dict[str, Tensor], entry: dict, **config) -> DequantisedReader:
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    config = {"torch_dtype": "bfloat16", "quantization_config": entry, **config}
    (folder / "config.json").write_text(json.dumps(config))
    reader = open_checkpoint(folder, config)
    assert isinstance(reader, DequantisedReader)
    return reader


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_definition(case, made):
    reader, expected = made(case)
    assert set(reader.quantised) == set(expected)
    for name, values in expected.items():
        assert reader.tensors[name].shape == values.shape
        assert reader.tensors[name].dtype == torch.bfloat16
        assert same_bits(reader.slice(name), values)


@pytest.mark.parametrize("case", CASES)
def test_a_slice_is_the_slice_of_the_whole(case, made):
    reader, expected = made(case)
    for name, values in expected.items():
        rows, cols = values.shape[-2:]
        spans = [(0, 1), (1, 3), (rows // 2, rows), (rows - 1, rows), (3, 3)]
        wide = [(0, cols), (1, cols), (0, cols - 1), (5, 6), (cols // 2, cols), (7, 7)]
        for index in range(len(values)) if values.dim() == 3 else [None]:
            whole = values if index is None else values[index]
            for first, last in spans:
                for left, right in wide:
                    found = reader.slice(name, slice(first, last), slice(left, right), index)
                    assert same_bits(found, whole[first:last, left:right]), (first, last, left, right)
        if values.dim() == 3:
            assert same_bits(reader.slice(name, slice(1, 2), slice(2, 5)), values[1:2, 2:5])


@pytest.mark.parametrize("case", CASES)
def test_a_slice_reads_its_own_codes_and_the_scales(case, made):
    reader, expected = made(case)
    for name, values in expected.items():
        item, stored = reader.quantised[name], reader.stored
        sizes = {role: stored.tensors[part].nbytes for role, part in item.parts.items()}
        of_one = sizes.pop("codes") / values.numel()
        before, half = stored.bytes_read, values.shape[-1] // 2
        reader.slice(name, slice(1, 3), slice(0, half), 1 if values.dim() == 3 else None)
        codes = 2 * (half + item.codec.word) * of_one  # the last word may be cut
        assert stored.bytes_read - before <= codes + sum(sizes.values()) + STATED_SHAPE
        assert codes < 0.75 * of_one * values.numel()


@pytest.mark.parametrize("case", CASES)
def test_a_sample_shows_the_spread_of_what_is_stored_and_of_what_it_means(case, made):
    """`isthmus inspect`: standard deviations of the first 256 rows."""
    reader, expected = made(case)
    for row in sample(reader):
        item, values = reader.quantised[row["name"]], expected[row["name"]]
        first = (values if values.dim() == 2 else values[0])[:256].float()
        assert row["std_values"] == pytest.approx(first.std().item(), rel=FLOAT32)
        assert row["format"] == item.label
        if item.codec.word == 1:  # one code is one stored number
            codes = reader.stored.slice(item.codes).float()
            codes = codes if codes.dim() == 2 else codes[0]
            assert row["std_codes"] == pytest.approx(codes[:256].std().item(), rel=FLOAT32)


@pytest.mark.parametrize("case", CASES)
def test_what_nobody_changed_comes_back_bit_for_bit(case, made):
    reader, expected = made(case)
    again = Requantiser(reader)
    for name in expected:
        found = dict(again.whole(name, reader.slice(name)))
        assert set(found) == set(again.names(name))
        for stored, tensor in found.items():
            assert same_bits(tensor.contiguous(), reader.stored.slice(stored).contiguous()), stored


# Two codes may be one number: in bfloat16, where a code less its zero point needs more than 8 bits; and in
# groups whose scale is 0.
AMBIGUOUS = {"int8 zero", "int8 packed zero", "nvfp4 multiplied", "nvfp4 divided"}


@pytest.mark.parametrize("case", CASES)
def test_codes_are_found_again_from_numbers_and_scales_alone(case, made):
    """Without the source: as an export from a Megatron folder does, which keeps the scales."""
    reader, _ = made(case)
    for name, item in reader.quantised.items():
        dtypes = {role: reader.stored.tensors[part].dtype for role, part in item.parts.items()}
        for index in range(item.shape[0]) if len(item.shape) == 3 else [None]:
            parts = reader.parts(name, index)
            codes = parts.pop("codes")
            values = reader.slice(name, index=index)
            found = requantise(item.codec, item.block, values, reader.dtype, dtypes, parts)
            assert same_bits(found["codes"], codes) == (case not in AMBIGUOUS)
            if case.startswith("nvfp4"):
                other = (found["codes"] != codes).view(len(codes), -1, 8).any(2)
                assert not parts["scale"].float()[other].any()
            for role, part in parts.items():
                assert same_bits(found[role].contiguous(), part.contiguous()), role
            again = torch.empty(values.shape, dtype=reader.dtype)
            grids = Grids.of(item.codec, *item.codec.grids(parts))
            dequantise(item.codec, item.block, found["codes"], grids, again)
            assert torch.equal(again, values)  # 0 has a sign that a scale of 0 may lose


# Of the largest number: half the distance of its neighbours, at worst 1/14 for e5m2 and 1/5 for e2m1; and a
# whole step for integers, whose range is cut where their zero point is rounded.
STEP = {"fp8": 1 / 13, "mxfp4": 1 / 5, "nvfp4": 1 / 5, "int4": 2 / 15, "int8": 2 / 255}


@pytest.mark.parametrize("case", CASES)
def test_what_was_trained_comes_back_as_near_as_codes_are(case, made, tmp_path):
    reader, expected = made(case)
    again = Requantiser(reader)
    stored = {name: reader.stored.slice(name) for name in reader.stored.tensors}
    trained = {}
    for name, values in expected.items():
        noise = torch.randn(values.shape, generator=generator(9)) * 0.02
        trained[name] = noise.bfloat16().float()
        trained[name][..., 0, :] = 0.0  # a group without any number but 0
        stored |= dict(again.whole(name, trained[name]))
    config = json.loads((reader.folder / "config.json").read_text())
    back = reader_of(tmp_path, stored, config["quantization_config"])
    for name, values in trained.items():
        found = back.slice(name).float()
        assert torch.equal(found == 0, values == 0) or not case.startswith("fp8")
        assert (found[..., 0, :] == 0).all()
        error = (found - values).abs().max() / values.abs().max()
        assert error <= STEP[case.split()[0]]
