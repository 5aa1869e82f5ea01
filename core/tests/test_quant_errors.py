"""A quantised checkpoint with something missing, unfit or unknown: one error, which names it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from isthmus.checkpoint.dequantised import open_checkpoint
from isthmus.checkpoint.manifest import load_manifest, save_manifest, save_scales
from isthmus.checkpoint.requantise import Requantiser

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}
MXFP4 = {"quant_method": "mxfp4"}


def int4(**weights: object) -> dict:
    said = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, **weights}
    group = {"targets": ["Linear"], "weights": said}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
    }


def e4m3(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)


def good() -> dict[str, Tensor]:
    """Two FP8 matrices of (72, 50) in blocks of 16, a stack, and a norm."""
    matrices = {
        f"layers.{i}.up.weight{end}": tensor
        for i in range(2)
        for end, tensor in {"": e4m3(72, 50), "_scale_inv": torch.ones(5, 4)}.items()
    }
    stack = {"experts.down": e4m3(3, 20, 20), "experts.down_scale_inv": torch.ones(3, 2, 2)}
    return {**matrices, **stack, "norm.weight": torch.ones(4).bfloat16()}


def words(cols: int) -> Tensor:
    return torch.zeros(4, cols // 8, dtype=torch.int32)


def without(name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in good().items() if key != name}


PLAIN = {"a.weight": torch.ones(4, 4).bfloat16()}
BAD: dict[str, tuple[Callable[[], dict[str, Tensor]], dict | None, list[str]]] = {
    "scale missing": (
        lambda: without("layers.1.up.weight_scale_inv"),
        FP8,
        ["FP8 codes without a scale", "layers.1.up.weight", "X_scale_inv", "X.scale"],
    ),
    "scale of a stack missing": (
        lambda: without("experts.down_scale_inv"),
        FP8,
        ["FP8 codes without a scale", "experts.down"],
    ),
    "all scales missing": (
        lambda: {k: t for k, t in good().items() if "_scale" not in k},
        FP8,
        ["layers.{0..1}.up.weight", "experts.down"],
    ),
    "weight missing": (
        lambda: without("layers.0.up.weight"),
        FP8,
        ["a scale of no quantised tensor", "layers.0.up.weight_scale_inv"],
    ),
    "two scales": (
        lambda: good() | {"layers.0.up.weight_scale": torch.ones(5, 4)},
        FP8,
        ["several scales", "layers.0.up.weight_scale_inv, layers.0.up.weight_scale"],
    ),
    "grid of whole blocks only": (
        lambda: good() | {"layers.0.up.weight_scale_inv": torch.ones(4, 4)},
        FP8,
        ["does not fit", "(4, 4) for (72, 50)", "expected (5, 4)"],
    ),
    "grid of a stack": (
        lambda: good() | {"experts.down_scale_inv": torch.ones(3, 2, 1)},
        FP8,
        ["does not fit", "experts.down", "(3, 2, 1)", "expected (3, 2, 2)"],
    ),
    "other blocks than the config's": (
        good,
        {**FP8, "weight_block_size": [8, 8]},
        ["does not fit", "block (8, 8): expected (3, 3, 3)"],
    ),
    "blocks, and none in the config": (
        good,
        {"quant_method": "fp8"},
        ["does not fit", "tensor or channel"],
    ),
    "other codes than the config's": (good, {**FP8, "fmt": "e5m2"}, ["e4m3 codes", "says fmt e5m2"]),
    "a scale of whole numbers": (
        lambda: good() | {"layers.0.up.weight_scale_inv": torch.ones(5, 4).int()},
        FP8,
        ["a scale cannot be torch.int32"],
    ),
    "not to be quantised": (
        good,
        {**FP8, "modules_to_not_convert": ["layers.1.up"]},
        ["quantization_config says that it is not", "layers.1.up.weight"],
    ),
    "quantised by the config alone": (
        lambda: PLAIN,
        FP8,
        ["quantization_config (fp8)", "no tensor is quantised"],
    ),
    "quantised by the tensors alone": (
        good,
        None,
        ["no quantization_config", "float8_e4m3fn", "layers.{0..1}"],
    ),
    "unknown method": (good, {"quant_method": "awq"}, ["quantization_config (awq)", "fp8, mxfp4"]),
    "method that is not the tensors'": (good, MXFP4, ["FP8 codes", "(mxfp4) says otherwise"]),
    "other floats of a byte": (
        lambda: {"a.weight": e4m3(4, 4).view(torch.float8_e4m3fnuz), "a.weight_scale": torch.ones(())},
        FP8,
        ["float8_e4m3fnuz codes that no known format explains"],
    ),
    "bytes without a scale": (
        lambda: good() | {"e.w1.weight": torch.zeros(4, 16, dtype=torch.int8)},
        FP8,
        ["int8 codes that no known format explains", "e.w1.weight"],
    ),
    "blocks of FP4 without scales": (
        lambda: {"e.up_blocks": torch.zeros(2, 4, 1, 16, dtype=torch.uint8)},
        MXFP4,
        ["MXFP4 codes without a scale", "e.up_blocks", "X_scales"],
    ),
    "scales of FP4 without blocks": (
        lambda: {"e.up_scales": torch.zeros(2, 4, 1, dtype=torch.uint8)},
        MXFP4,
        ["a scale of no quantised tensor", "e.up_scales"],
    ),
    "scales of FP4 that do not fit": (
        lambda: {
            "e.up_blocks": torch.zeros(2, 4, 2, 16, dtype=torch.uint8),
            "e.up_scales": torch.zeros(2, 4, 1, dtype=torch.uint8),
        },
        MXFP4,
        ["does not fit", "e.up_scales is (2, 4, 1), expected (2, 4, 2)"],
    ),
    "packed integers without a scale": (
        lambda: {"a.weight_packed": words(64)},
        int4(),
        ["integer codes without a scale", "a.weight_packed"],
    ),
    "packed integers in other groups": (
        lambda: {"a.weight_packed": words(64), "a.weight_scale": torch.ones(4, 4).bfloat16()},
        int4(),
        ["does not fit", "a.weight_scale is (4, 4), expected (4, 2)"],
    ),
    "zero points that the config denies": (
        lambda: {
            "a.weight_packed": words(64),
            "a.weight_scale": torch.ones(4, 2).bfloat16(),
            "a.weight_zero_point": torch.zeros(1, 2).int(),
        },
        int4(),
        ["with zero points", "says otherwise"],
    ),
    "columns in another order": (
        lambda: {
            "a.weight_packed": words(64),
            "a.weight_scale": torch.ones(4, 2).bfloat16(),
            "a.weight_g_idx": torch.zeros(64).int(),
        },
        int4(actorder="group"),
        ["actorder", "a.weight_packed"],
    ),
}


def write(folder: Path, tensors: dict[str, Tensor], entry: dict | None) -> dict:
    save_file(tensors, folder / "model.safetensors")
    config = {"torch_dtype": "bfloat16"} | ({} if entry is None else {"quantization_config": entry})
    (folder / "config.json").write_text(json.dumps(config))
    return config


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_named(tmp_path, case):
    tensors, entry, messages = BAD[case]
    with pytest.raises(ValueError, match=r"quantised|quantization|usable") as caught:
        open_checkpoint(tmp_path, write(tmp_path, tensors(), entry))
    for message in messages:
        assert message in str(caught.value)


def test_the_good_checkpoint_is_good(tmp_path):
    with open_checkpoint(tmp_path, write(tmp_path, good(), FP8)) as reader:
        assert list(reader.tensors) == [n for n in reader.stored.tensors if "_scale" not in n]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("layers.0.up.weight_scale_inv", float("nan"), "layers.0.up.weight_scale_inv: a scale is NaN or Inf"),
        ("layers.0.up.weight_scale_inv", float("inf"), "layers.0.up.weight_scale_inv: a scale is NaN or Inf"),
        ("layers.0.up.weight", float("nan"), "layers.0.up.weight: a code of FP8 e4m3 is NaN or Inf"),
        ("experts.down", float("nan"), "experts.down: a code of FP8 e4m3 is NaN or Inf"),
    ],
)
def test_nan_and_inf_are_errors_where_they_are_read(tmp_path, name, value, message):
    tensors = good()
    number = torch.tensor(value).to(tensors[name].dtype)
    flat = tensors[name].view(torch.uint8 if tensors[name].itemsize == 1 else tensors[name].dtype).flatten()
    flat[-1] = number.view(flat.dtype)
    with (
        open_checkpoint(tmp_path, write(tmp_path, tensors, FP8)) as reader,
        pytest.raises(ValueError, match="NaN or Inf") as caught,
    ):
        reader.slice(name.removesuffix("_scale_inv"))
    assert message in str(caught.value)


@pytest.mark.parametrize("code", [0x7C, 0x7D, 0xFC, 0xFF])
def test_e5m2_has_inf_and_nan(tmp_path, code):
    codes = torch.tensor([[0, code]], dtype=torch.uint8).view(torch.float8_e5m2)
    tensors = {"a.weight": codes, "a.weight_scale": torch.ones(())}
    config = write(tmp_path, tensors, {"quant_method": "fp8"})
    with open_checkpoint(tmp_path, config) as reader, pytest.raises(ValueError, match="NaN or Inf"):
        reader.slice("a.weight")


def test_nan_of_e8m0_is_an_error(tmp_path):
    tensors = {
        "e.up_blocks": torch.zeros(1, 4, 1, 16, dtype=torch.uint8),
        "e.up_scales": torch.full((1, 4, 1), 255, dtype=torch.uint8),
    }
    config = write(tmp_path, tensors, MXFP4)
    with (
        open_checkpoint(tmp_path, config) as reader,
        pytest.raises(ValueError, match="a scale is NaN or Inf"),
    ):
        reader.slice("e.up", index=0)


def test_a_shape_that_is_not_the_stored_one_is_an_error(tmp_path):
    tensors = {
        "a.weight_packed": words(64),
        "a.weight_scale": torch.ones(4, 2).bfloat16(),
        "a.weight_shape": torch.tensor([4, 63]),
    }
    config = write(tmp_path, tensors, int4())
    with open_checkpoint(tmp_path, config) as reader, pytest.raises(ValueError, match=r"says \[4, 63\]"):
        reader.slice("a.weight")


def shards(folder: Path, files: dict[str, dict[str, Tensor]], entry: dict) -> dict:
    """A checkpoint of several files and its index."""
    for file, tensors in files.items():
        save_file(tensors, folder / file)
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return {"torch_dtype": "bfloat16", "quantization_config": entry}


@pytest.fixture
def spread(tmp_path: Path) -> dict:
    """Weights in two files, their scales in a third."""
    tensors = good()
    named = ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"]
    third = "model-00003-of-00003.safetensors"
    files = {
        named[0]: {n: t for n, t in tensors.items() if n.startswith("layers") and "_scale" not in n},
        named[1]: {n: t for n, t in tensors.items() if not n.startswith("layers") and "_scale" not in n},
        third: {n: t for n, t in tensors.items() if "_scale" in n},
    }
    return shards(tmp_path, files, FP8)


def test_a_scale_in_another_file_is_found(tmp_path, spread):
    with open_checkpoint(tmp_path, spread) as reader:
        assert set(reader.quantised) == {"layers.0.up.weight", "layers.1.up.weight", "experts.down"}
        assert reader.slice("layers.0.up.weight").shape == (72, 50)


def test_an_absent_file_of_scales_is_named(tmp_path, spread):
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"files that are not there: model-00003-of-00003\.safetensors"):
        open_checkpoint(tmp_path, spread)


def test_names_that_only_look_like_scales_are_weights(tmp_path):
    tensors = good() | {
        "router.scale": torch.ones(2).bfloat16(),
        "attn.logit_scale": torch.ones(1).bfloat16(),
    }
    with open_checkpoint(tmp_path, write(tmp_path, tensors, FP8)) as reader:
        assert {"router.scale", "attn.logit_scale"} <= set(reader.tensors)


def test_the_same_name_with_an_ending_is_not_taken_for_the_weight(tmp_path):
    """KF 46: `x.weight` and `x.weight_scale_inv`, anchored."""
    tensors = {
        "x.weight": e4m3(16, 16),
        "x.weight_scale_inv": torch.full((1, 1), 2.0),
        "ax.weight": e4m3(16, 16),
        "ax.weight_scale_inv": torch.full((1, 1), 3.0),
    }
    with open_checkpoint(tmp_path, write(tmp_path, tensors, FP8)) as reader:
        assert {name: item.parts["scale"] for name, item in reader.quantised.items()} == {
            name: f"{name}_scale_inv" for name in ("x.weight", "ax.weight")
        }


def nvfp4(scale: float, whole: float, code: int = 0x70) -> dict[str, Tensor]:
    """(2, 32), the last code is 6."""
    codes = torch.zeros(2, 16, dtype=torch.uint8)
    codes[-1, -1] = code
    return {
        "a.weight": codes,
        "a.weight_scale": torch.full((2, 2), scale).to(torch.float8_e4m3fn),
        "a.weight_scale_2": torch.tensor(whole),
    }


def fp8(scale: float, code: float = 448.0) -> dict[str, Tensor]:
    """(20, 20) in blocks of 16, the last code is `code`, in the last block."""
    codes = torch.zeros(20, 20)
    codes[-1, -1] = code
    return {"a.weight": codes.to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.full((2, 2), scale)}


def int8(scale: float, code: int) -> dict[str, Tensor]:
    codes = torch.zeros(4, 8, dtype=torch.int8)
    codes[-1, -1] = code
    return {"a.weight": codes, "a.weight_scale": torch.full((4, 1), scale)}


def mxfp4_with(scale: int) -> dict[str, Tensor]:
    return {
        "a_blocks": torch.full((1, 4, 1, 16), 0x77, dtype=torch.uint8),
        "a_scales": torch.full((1, 4, 1), scale, dtype=torch.uint8),
    }


NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
INT8 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"g": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}},
}
BAD_SCALES: dict[str, tuple[dict[str, Tensor], dict, str, list[str]]] = {
    "too large": (
        fp8(3e38),
        FP8,
        "bfloat16",
        ["code 448 times scale 3e+38 = 1.344e+41", "[19, 19]", "a.weight_scale_inv again"],
    ),
    "large": (fp8(1e37), FP8, "bfloat16", ["code 448 times scale 1e+37 = 4.48e+39"]),
    "too large for float16": (fp8(1e3), FP8, "float16", ["= 448000 is more than torch.float16 has (65504)"]),
    "zero": (fp8(0.0, -1.0), FP8, "bfloat16", ["code -1 times scale 0 = -0 is 0", "from 0 to 0"]),
    "subnormal": (fp8(1e-45), FP8, "bfloat16", ["code 448 times scale 1.4013e-45", "is 0 in torch.bfloat16"]),
    "negative": (fp8(-1.0), FP8, "bfloat16", ["a.weight_scale_inv: a scale is negative: -1"]),
    "integers too large": (int8(1e37, -128), INT8, "bfloat16", ["code -128 times scale 1e+37"]),
    "integers, zero": (int8(0.0, 1), INT8, "bfloat16", ["code 1 times scale 0"]),
    "NVFP4, product too large": (nvfp4(448.0, 1e38), NVFP4, "bfloat16", ["a.weight_scale_2", "NaN or Inf"]),
    "NVFP4, value too large": (nvfp4(4.0, 8e37), NVFP4, "bfloat16", ["code 6 times scale 3.2e+38"]),
    "NVFP4, all groups 0": (nvfp4(0.0, 1.0), NVFP4, "bfloat16", ["code 6 times scale 0"]),
    "NVFP4, whole 0": (
        nvfp4(1.0, 0.0),
        NVFP4,
        "bfloat16",
        ["code 6 times scale 0", "a.weight_scale_2 again"],
    ),
    "MXFP4 too large": (mxfp4_with(254), MXFP4, "bfloat16", ["code 6 times scale 1.70141e+38", "a_scales"]),
    "MXFP4 too small": (mxfp4_with(0), MXFP4, "float16", ["code 6 times scale 5.87747e-39", "is 0 in"]),
}


@pytest.mark.parametrize("case", BAD_SCALES)
def test_values_that_the_dtype_does_not_have_are_errors(tmp_path, case):
    tensors, entry, dtype, messages = BAD_SCALES[case]
    config = write(tmp_path, tensors, entry) | {"torch_dtype": dtype}
    with open_checkpoint(tmp_path, config) as reader:
        [name] = reader.tensors
        index = 0 if len(reader.tensors[name].shape) == 3 else None
        with pytest.raises(ValueError, match="scale") as caught:
            reader.slice(name, index=index)
    for message in messages:
        assert message in str(caught.value)


FINE: dict[str, tuple[dict[str, Tensor], dict, float]] = {
    "a block of zeros with scale 0": (fp8(0.0, 0.0), FP8, 0.0),
    "a block of zeros with a scale too large": (fp8(3e38, 0.0), FP8, 0.0),
    "the largest scale of small codes": (fp8(2.0**127, 1.0), FP8, 2.0**127),
    "the smallest of e8m0": (mxfp4_with(0), MXFP4, 6 * 2.0**-127),
}


@pytest.mark.parametrize("case", FINE)
def test_values_that_the_dtype_has_are_none(tmp_path, case):
    tensors, entry, expected = FINE[case]
    with open_checkpoint(tmp_path, write(tmp_path, tensors, entry)) as reader:
        [name] = reader.tensors
        assert reader.slice(name).flatten()[-1].item() == expected


def test_a_group_too_small_for_e4m3_is_0(tmp_path):
    """Published NVFP4 has such groups beside others: 0 is the nearest scale there is."""
    tensors = nvfp4(1.0, 1.0)
    tensors["a.weight_scale"].view(torch.uint8)[-1, -1] = 0
    with open_checkpoint(tmp_path, write(tmp_path, tensors, NVFP4)) as reader:
        assert reader.slice("a.weight").count_nonzero() == 0


def test_only_what_is_read_is_checked(tmp_path):
    with open_checkpoint(tmp_path, write(tmp_path, fp8(3e38), FP8)) as reader:
        assert reader.slice("a.weight", slice(0, 19), slice(0, 20)).count_nonzero() == 0
        with pytest.raises(ValueError, match=r"code 448 times scale 3e\+38 .* at \[19, 19\] and 1 places"):
            reader.slice("a.weight", slice(17, 20), slice(3, 20))


FIELDS: dict[str, tuple[object, str]] = {
    "a section": ("fp8", "quantization_config='fp8', expected an object"),
    "a section, a list": ([1], "quantization_config=[1], expected an object"),
    **{
        f"blocks {value}": (
            {**FP8, "weight_block_size": value},
            f"quantization_config.weight_block_size={value!r}, expected a list of two whole numbers",
        )
        for value in ([48.9, 48.9], ["48", "48"], [48, 48, 48], [0, 0], [-1, 4], [48], [], 48, {"a": 1}, True)
    },
    **{
        f"exceptions {value}": (
            {**FP8, "modules_to_not_convert": value},
            f"quantization_config.modules_to_not_convert={value!r}, expected a list of module names",
        )
        for value in ("lm_head", {"lm_head": 1}, 3, [["a"]], ["re:("])
    },
    "ignore": (int4() | {"ignore": "lm_head"}, "quantization_config.ignore='lm_head', expected a list"),
    "scale_fmt": ({**FP8, "scale_fmt": ["x"]}, "quantization_config.scale_fmt=['x'], expected a name"),
    "fmt": ({**FP8, "fmt": 3}, "quantization_config.fmt=3, expected e4m3 or e5m2"),
    "group size of NVFP4": ({**NVFP4, "group_size": "16"}, "quantization_config.group_size='16', expected"),
    "groups": ({**int4(), "config_groups": [1]}, "config_groups=[1], expected an object"),
    "a group": ({**int4(), "config_groups": {"g": 3}}, "config_groups.g=3, expected an object"),
    "group size": (int4(group_size=32.5), "group_0.weights.group_size=32.5, expected a whole number"),
    "no group size": (int4(group_size=None), "group_0.weights.group_size=None, expected a whole number"),
    "bits": (int4(num_bits="4"), "group_0.weights.num_bits='4', expected a whole number"),
    "structure": (
        int4(strategy="block", block_structure="16x16"),
        "weights.block_structure='16x16', expected a list of two",
    ),
    "symmetric": (int4(symmetric="yes"), "group_0.weights.symmetric='yes', expected true or false"),
}


@pytest.mark.parametrize("case", FIELDS)
def test_a_field_that_cannot_be_read_is_named(tmp_path, case):
    entry, message = FIELDS[case]
    with pytest.raises(ValueError, match="expected") as caught:
        open_checkpoint(tmp_path, write(tmp_path, good(), entry))  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_all_fields_that_cannot_be_read_are_in_one_error(tmp_path):
    entry = {**FP8, "weight_block_size": 48, "scale_fmt": 3}
    with pytest.raises(ValueError, match="weight_block_size=48") as caught:
        open_checkpoint(tmp_path, write(tmp_path, good(), entry))
    assert "scale_fmt=3" in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ("layers.1", True),
        ("layers.1.up", True),
        ("re:layers.*up", True),
        ("re:.*down$", True),
        ("layers.1*", True),
        ("layers", True),
        ("layers.1.u", False),
        ("up", False),
        ("re:up", False),
        ("re:.*gate$", False),
        ("ayers.?.up", False),
    ],
)
def test_an_entry_names_modules_as_its_syntax_says(tmp_path, entry, found):
    config = write(tmp_path, good(), {**FP8, "modules_to_not_convert": [entry]})
    if found:
        with pytest.raises(ValueError, match="quantization_config says that it is not") as caught:
            open_checkpoint(tmp_path, config)
        assert f"entry {entry}" in str(caught.value)
    else:
        open_checkpoint(tmp_path, config).close()


def experts(plain: list[str]) -> dict[str, Tensor]:
    """Three layers of two FP8 experts, an attention and plain routers; `plain` are stored as numbers."""
    kinds = ("mlp.experts.0.up", "mlp.experts.1.up", "attn.q")
    found = {f"model.layers.{i}.mlp.gate.weight": torch.ones(4, 20).bfloat16() for i in range(3)}
    for name in (f"model.layers.{i}.{kind}.weight" for i in range(3) for kind in kinds):
        stored = {name: e4m3(20, 20), f"{name}_scale_inv": torch.ones(2, 2)}
        found |= {name: torch.ones(20, 20).bfloat16()} if name in plain else stored
    return found


QUERY, EXPERT = "model.layers.1.attn.q.weight", "model.layers.2.mlp.experts.1.up.weight"


@pytest.mark.parametrize("left", [{}, {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]}])
@pytest.mark.parametrize("plain", [[QUERY], [EXPERT], [QUERY, EXPERT]])
def test_numbers_where_the_config_says_codes_are_named(tmp_path, plain, left):
    with pytest.raises(ValueError, match="plain numbers where quantization_config says codes") as caught:
        open_checkpoint(tmp_path, write(tmp_path, experts(plain), {**FP8, **left}))
    assert all(name in str(caught.value) for name in plain)
    assert "gate" not in str(caught.value)


@pytest.mark.parametrize(
    ("plain", "left"),
    [
        ([], {}),
        ([QUERY], {"modules_to_not_convert": ["model.layers.1.attn.q"]}),
        ([QUERY], {"modules_to_not_convert": ["model.layers.1.attn"]}),
        ([QUERY], {"modules_to_not_convert": ["language_model.layers.1.attn.q"]}),
        ([QUERY], {"ignore": ["re:.*layers.1.attn"]}),
        ([QUERY], {"exclude_modules": ["model.layers.1.a*"]}),
        # a layer that is plain as a whole, as MTP's are where a quantiser did not see them
        (
            [name for name in experts([]) if name.startswith("model.layers.2.") and name.endswith(".weight")],
            {},
        ),
        # a kind that is plain in all layers
        ([f"model.layers.{i}.attn.q.weight" for i in range(3)], {}),
    ],
)
def test_numbers_that_a_release_may_leave_are_numbers(tmp_path, plain, left):
    with open_checkpoint(tmp_path, write(tmp_path, experts(plain), {**FP8, **left})) as reader:
        assert all(name in reader.tensors and name not in reader.quantised for name in plain)


def scales_gone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    folder.rmdir()


def scales_empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def scales_with(name: str, scale: Tensor) -> Callable[[Path], None]:
    kept = {n: t for n, t in good().items() if n.endswith("_scale_inv")}
    return lambda folder: save_file(kept | {name: scale}, folder / "model.safetensors")


SCALE = "layers.1.up.weight_scale_inv"
DAMAGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "gone": (scales_gone, "scales"),
    "empty": (scales_empty, "model.safetensors"),
    "one missing": (
        lambda folder: save_file({"x": torch.ones(1)}, folder / "model.safetensors"),
        f"{SCALE} should be torch.float32 (5, 4), and is nothing",
    ),
    "another shape": (scales_with(SCALE, torch.ones(4, 4)), "(5, 4), and is torch.float32 (4, 4)"),
    "NaN": (scales_with(SCALE, torch.full((5, 4), float("nan"))), f"{SCALE}: a scale is NaN or Inf"),
    "negative": (scales_with(SCALE, -torch.ones(5, 4)), f"{SCALE}: a scale is negative: -1"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_kept_scales_that_are_gone_or_damaged_are_named(tmp_path, case):
    damage, message = DAMAGED[case]
    source, target = tmp_path / "hf", tmp_path / "megatron"
    source.mkdir()
    target.mkdir()
    with open_checkpoint(source, write(source, good(), FP8)) as reader:
        config = {"model_type": "any"} | json.loads((source / "config.json").read_text())
        save_manifest(target, json.dumps(config), reader.stored.tensors.values())
        save_scales(target, reader)
        values = reader.slice("layers.1.up.weight")
    damage(target / "scales")
    with pytest.raises(ValueError, match=r"scales, the source's scales, cannot be used") as caught:
        list(Requantiser(load_manifest(target))("layers.1.up.weight", None, values))
    for expected in (message, str(target / "scales"), "--hf", "import it again"):
        assert expected in str(caught.value)
