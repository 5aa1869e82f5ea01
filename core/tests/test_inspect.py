"""`isthmus inspect`: what it says of a checkpoint, from headers alone."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest

from isthmus import cli, registry
from isthmus.checkpoint.reader import CheckpointReader
from isthmus.config import HFConfig
from isthmus.family import Family
from isthmus.quant.find import find_or_refuse
from isthmus.tiny import Tiny
from isthmus.weights import WeightMap, column, ignore, passthrough, same, scope

ITEM = {"BF16": 2, "F32": 4, "I32": 4, "F8_E4M3": 1}
LAYER = [same("input_layernorm.weight", "norm.weight")]
EXPERT = [column("experts.{e}.linear_fc1.weight", "experts.{e}.up.weight")]


def weights(hf: dict, keys: frozenset[str], model: object) -> WeightMap:
    return WeightMap(
        [
            column("embedding.weight", "model.embed.weight"),
            *scope("decoder.layers.{i}", "model.layers.{i}", LAYER, i=range(2)),
            *scope("decoder.layers.{i}", "model.layers.{i}", EXPERT, i=[0], e=range(3)),
            *scope("mtp.layers.{i}.layer", "mtp.layers.{i}", LAYER, i=range(1)),
            ignore("*.inv_freq", because="recomputed"),
            passthrough("vision.*", because="not trained"),
        ]
    )


CHECKPOINT = {
    "model.embed.weight": ("BF16", (100, 8)),
    "model.layers.0.norm.weight": ("F32", (8,)),
    "model.layers.1.norm.weight": ("F32", (8,)),
    **{f"model.layers.0.experts.{e}.up.weight": ("BF16", (4, 8)) for e in range(3)},
    "mtp.layers.0.norm.weight": ("F32", (8,)),
}


def shapes(hf: HFConfig, mtp: bool) -> dict[str, tuple[int, ...]]:
    """Every tensor; experts' shapes follow `width`, the embedding's is left open."""
    norms = [*(f"model.layers.{i}.norm.weight" for i in range(2)), "mtp.layers.0.norm.weight"]
    experts = {f"model.layers.0.experts.{e}.up.weight": (hf.get("width") or 4, 8) for e in range(3)}
    return dict.fromkeys(norms, (8,)) | experts


@pytest.fixture(autouse=True)
def family(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A family for model_type "sample"."""
    package = ModuleType("sample_family")
    package.FAMILY = Family(
        name="sample",
        model_types=("sample",),
        model_config=lambda hf, keys: {"share_embeddings_and_output_weights": True},
        weights=weights,
        config_class="nowhere:Nothing",
        tiny=Tiny({}, shapes),
    )
    monkeypatch.setitem(sys.modules, "sample_family", package)
    points = [EntryPoint("sample", "sample_family:FAMILY", registry.GROUP)]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    registry.families.cache_clear()
    yield
    registry.families.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes a checkpoint whose tensor data is a hole: of any size, and free."""

    def write(tensors: dict[str, tuple[str, tuple[int, ...]]], **config: object) -> Path:
        header, end = {}, 0
        for name, (dtype, shape) in tensors.items():
            begin, end = end, end + ITEM[dtype] * _product(shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "sample", **config}))
        return tmp_path

    return write


def _product(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def inspect(path: Path, capsys: pytest.CaptureFixture[str], expected_code: int = 0) -> dict:
    assert cli.main(["inspect", str(path), "--json", "-"]) == expected_code
    return json.loads(capsys.readouterr().out)


def test_everything_about_a_sound_checkpoint(
    folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder(CHECKPOINT, architectures=["SampleForCausalLM"])
    assert inspect(path, capsys) == {
        "folder": str(path),
        "model_type": "sample",
        "architectures": ["SampleForCausalLM"],
        "files": 1,
        "tensors": 7,
        "parameters": 800 + 24 + 96,
        "bytes": 2 * (800 + 96) + 4 * 24,
        "dtypes": {
            "bfloat16": {"tensors": 4, "parameters": 896, "bytes": 1792},
            "float32": {"tensors": 3, "parameters": 24, "bytes": 96},
        },
        "quantization": None,
        "experts": {"layout": "per_expert", "count": 3},
        "tie_word_embeddings": True,
        "family": "sample",
        "overruled": {},
        "mtp": {"layers": 1, "tensors": 1, "parameters": 8},
        "coverage": {
            "hf_tensors": 7,
            "loaded": 7,
            "passed_through": [],
            "passed_through_reasons": {},
            "dropped": {},
            "missing": [],
            "unmapped_hf": [],
            "wrong_shapes": {},
        },
    }


def test_gaps_fail_and_are_named_collapsed(
    folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = dict(CHECKPOINT)
    del tensors["model.layers.1.norm.weight"]
    tensors |= {f"model.layers.{i}.new.weight": ("BF16", (2, 2)) for i in range(3)}
    tensors |= {"rope.inv_freq": ("F32", (4,)), "vision.patch.weight": ("F32", (4,))}
    path = folder(tensors)
    coverage = inspect(path, capsys, expected_code=1)["coverage"]
    assert coverage["missing"] == ["model.layers.1.norm.weight"]
    assert coverage["unmapped_hf"] == [f"model.layers.{i}.new.weight" for i in range(3)]
    assert coverage["dropped"] == {"rope.inv_freq": "recomputed"}
    assert coverage["passed_through"] == ["vision.patch.weight"]
    assert coverage["passed_through_reasons"] == {"vision.patch.weight": "not trained"}
    assert cli.main(["inspect", str(path)]) == 1
    out = capsys.readouterr().out
    assert "model.layers.{0..2}.new.weight" in out
    assert "rope.inv_freq (recomputed)" in out
    assert "vision.patch.weight (not trained)" in out
    assert "tensors in 1 file\n" in re.sub(" +\n", "\n", out)


def test_a_shape_that_is_not_the_configs_fails(
    folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder(CHECKPOINT | {"model.layers.1.norm.weight": ("F32", (9,))}, width=16)
    coverage = inspect(path, capsys, expected_code=1)["coverage"]
    expert = "is (4, 8), the config makes it (16, 8)"
    assert coverage["wrong_shapes"] == {
        "model.layers.1.norm.weight": "is (9,), the config makes it (8,)",
        **{f"model.layers.0.experts.{e}.up.weight": expert for e in range(3)},
    }
    assert coverage["loaded"] == 3
    assert cli.main(["inspect", str(path)]) == 1
    shown = " ".join(capsys.readouterr().out.split())  # however wide the table is
    assert f"model.layers.0.experts.{{0..2}}.up.weight {expert}" in shown


def test_no_weights_are_read(folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = folder(CHECKPOINT | {"model.embed.weight": ("BF16", (2**28, 512))})  # 256 GiB
    assert inspect(path, capsys)["bytes"] > 2**38


def test_stacked_experts_are_fused(folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = folder({"model.layers.0.mlp.experts.gate_up_proj": ("BF16", (5, 4, 2))})
    assert inspect(path, capsys, expected_code=1)["experts"] == {"layout": "fused", "count": 5}


def test_quantisation_is_seen_in_config_dtypes_and_a_sample(
    folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder(
        CHECKPOINT
        | {"model.embed.weight": ("F8_E4M3", (100, 8)), "model.embed.weight_scale": ("F32", (100, 1))},
        quantization_config={"quant_method": "fp8", "fmt": "e4m3"},
    )
    label = "FP8 e4m3, a scale for each row"
    assert inspect(path, capsys)["quantization"] == {
        "method": "fp8",
        "format": "e4m3",
        "dtypes": ["float8_e4m3fn"],
        "tensors": {label: 1},
        "sample": [{"name": "model.embed.weight", "format": label, "std_codes": 0.0, "std_values": 0.0}],
    }


@pytest.mark.parametrize(
    ("tensors", "config", "expected"),
    [
        (
            {},
            {"text_config": {"quantization_config": {"quant_method": "awq", "format": "gemm"}}},
            {"method": "awq", "format": "gemm", "dtypes": []},
        ),
        (
            {"x.qweight": ("I32", (4,))},
            {},
            {"method": None, "format": None, "dtypes": ["int32"]},
        ),
        ({"position_ids": ("I32", (4,))}, {}, None),
    ],
    ids=["nested config", "packed", "integers that are no codes"],
)
def test_what_an_import_would_refuse_is_called_quantised(
    folder: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    tensors: dict[str, tuple[str, tuple[int, ...]]],
    config: dict[str, object],
    expected: object,
) -> None:
    path = folder(CHECKPOINT | tensors, **config)
    with CheckpointReader(path) as reader:
        refusal = pytest.raises(ValueError, match="quantised") if expected else nullcontext()
        with refusal:
            find_or_refuse(config, reader.tensors, path)
    code = 2 if expected else 1
    assert inspect(path, capsys, expected_code=code)["quantization"] == expected


def test_a_checkpoint_of_no_installed_family_is_described_and_refused(
    folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder(CHECKPOINT, model_type="stranger")
    assert cli.main(["inspect", str(path), "--json", "-"]) == 2
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["parameters"] == 920
    assert document["coverage"] is None
    assert "no installed family handles model_type 'stranger' (installed: sample)" in err


def test_a_folder_without_a_checkpoint_is_a_wrong_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "sample"}')
    assert cli.main(["inspect", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "safetensors" in err
    assert "Traceback" not in err
