"""What a load refuses before it touches a parameter, and the dtype that each parameter gets."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from isthmus.checkpoint.export import plan, stream
from isthmus.checkpoint.load import load
from isthmus.checkpoint.reader import CheckpointReader
from isthmus.layout import Layout
from isthmus.names import live_tensors
from isthmus.registry import family
from isthmus.testing import ranks
from isthmus.testing.tiny import write_tiny
from isthmus.weights import WeightMap, column, same, scope, vocabulary

NORM = "model.layers.0.input_layernorm.weight"


class Alone:
    """A process group of one rank."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


class Model(nn.Module):
    """Parameters and buffers by dotted name, as a Megatron model on one rank."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_moe_experts=None)
        groups = ("tp", "cp", "dp", "pp", "ep", "expt_tp", "expt_dp")
        self.pg_collection = SimpleNamespace(**{name: Alone() for name in groups})
        for name, tensor in tensors.items():
            *path, last = name.split("__")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            if tensor.is_floating_point():
                module.register_parameter(last, nn.Parameter(tensor))
            else:
                module.register_buffer(last, tensor)


def written(folder: Path, **tensors: Tensor) -> CheckpointReader:
    save_file(tensors, folder / "model.safetensors")
    return CheckpointReader(folder)


def refused(model: Model, weights: WeightMap, reader: CheckpointReader) -> str:
    """Why the load is refused; nothing of the model has changed then."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"cannot load|differs from") as caught:
        load([model], weights, reader)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    return str(caught.value)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_stack_of_another_size_is_refused(tmp_path: Path, rows: int) -> None:
    experts = scope("", "", [column("experts.{e}.weight", "stack[{e}]")], e=range(2))
    model = Model(experts__0__weight=torch.zeros(4, 3), experts__1__weight=torch.zeros(4, 3))
    message = refused(model, WeightMap(experts), written(tmp_path, stack=torch.ones(rows, 4, 3)))
    assert f"stack: is ({rows}, 4, 3), the model's config makes it (2, 4, 3)" in message


HEAD = vocabulary("weight", "embed", 4, also=("head",))


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (torch.ones(5, 3), "head: is (5, 3), the model's config makes it (4, 3)"),
        (torch.ones(4, 3).bfloat16(), "head: is bfloat16, embed, which it repeats, is float32"),
        (torch.ones(4, 3) + 1, "head differs from embed"),
    ],
    ids=["shape", "dtype", "bits"],
)
def test_a_copy_that_is_no_copy_is_refused(tmp_path: Path, head: Tensor, words: str) -> None:
    # `first` comes before it in the file: it would be filled already.
    model = Model(first=torch.zeros(2), weight=torch.zeros(4, 3))
    weights = WeightMap([same("first", "first"), HEAD])
    reader = written(tmp_path, embed=torch.ones(4, 3), first=torch.ones(2), head=head)
    assert words in refused(model, weights, reader)


def test_comparing_copies_is_not_counted_as_filling(tmp_path: Path) -> None:
    model = Model(weight=torch.zeros(4, 3))
    reader = written(tmp_path, embed=torch.ones(4, 3), head=torch.ones(4, 3))
    assert load([model], WeightMap([HEAD]), reader).bytes_read == 4 * 3 * 4
    assert torch.equal(model.get_parameter("weight"), torch.ones(4, 3))


@pytest.mark.parametrize(
    ("held", "source", "words"),
    [
        (torch.zeros(3).bfloat16(), torch.ones(3).to(torch.int8), "source is int8, parameter is bfloat16"),
        (torch.zeros(3), torch.ones(3).long(), "source is int64, parameter is float32"),
        (torch.zeros(3).long(), torch.ones(3), "source is float32, parameter is int64"),
    ],
    ids=["int8", "int64", "float"],
)
def test_integers_are_no_floats(tmp_path: Path, held: Tensor, source: Tensor, words: str) -> None:
    weights = WeightMap([same("weight", "codes"), same("other", "other")])
    model = Model(weight=held, other=torch.zeros(1))
    message = refused(model, weights, written(tmp_path, codes=source, other=torch.ones(1)))
    assert f"codes: {words}" in message


def test_integers_fill_integers(tmp_path: Path) -> None:
    model = Model(table=torch.zeros(3).long(), other=torch.zeros(1))
    weights = WeightMap([same("table", "table"), same("other", "other")])
    load([model], weights, written(tmp_path, table=torch.arange(3), other=torch.ones(1)))
    assert model.get_buffer("table").tolist() == [0, 1, 2]


def test_single_numbers_go_in_and_out(tmp_path: Path) -> None:
    experts = scope("", "", [same("experts.{e}.scale", "scales[{e}]")], e=range(2))
    weights = WeightMap([same("scale", "scale"), *experts])
    model = Model(
        scale=torch.tensor(0.0), experts__0__scale=torch.tensor(0.0), experts__1__scale=torch.tensor(0.0)
    )
    source = {"scale": torch.tensor(1.5), "scales": torch.tensor([2.5, 3.5])}
    load([model], weights, written(tmp_path, **source))
    assert [tensor.item() for tensor in model.state_dict().values()] == [1.5, 2.5, 3.5]
    exported = dict(stream(plan(list(live_tensors([model])), model, weights), everywhere=True))
    assert exported.keys() == source.keys()
    assert all(torch.equal(exported[name], source[name]) for name in source)


# Dtypes of a whole model


def changed(folder: Path, change: Callable[[dict[str, Tensor]], object], **config: Any) -> Path:
    """A tiny checkpoint (bfloat16) with other tensors and fields of config.json."""
    write_tiny(family("qwen3_next"), folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def through(folder: Path, target: Path, **fields: Any) -> dict[str, str]:
    """In a worker: load and save; the dtype of each parameter by canonical name."""
    from isthmus.bridge import AutoBridge

    Layout().initialize()
    bridge = AutoBridge.from_hf_pretrained(folder)
    model = bridge.build_model(bridge.get_model_config(**fields))
    bridge.load_hf_weights(model)
    bridge.save_hf_pretrained(model, target)
    return {live.canonical: str(live.tensor.dtype) for live in live_tensors(model)}


def widen(tensors: dict[str, Tensor]) -> None:
    tensors |= {name: tensor.float() + 1e-4 for name, tensor in tensors.items()}


def test_a_config_that_contradicts_the_files_rounds_nothing(tmp_path: Path) -> None:
    source = changed(tmp_path / "hf", widen)
    words = "config.json says bfloat16, most of the weights are float32. .* params_dtype"
    with pytest.raises(ValueError, match=words):
        ranks.run(1, through, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (dtypes,) = ranks.run(1, through, source, tmp_path / "out", params_dtype=torch.float32)
    assert set(dtypes.values()) == {"torch.float32"}
    exported, expected = (
        load_file(tmp_path / "out" / "model.safetensors"),
        load_file(source / "model.safetensors"),
    )
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)


def test_a_float16_tensor_of_a_bfloat16_checkpoint_is_kept_in_float32(tmp_path: Path) -> None:
    values = torch.linspace(-1, 1, 64).half()
    assert not torch.equal(values.bfloat16().half(), values), "values that bfloat16 rounds"
    source = changed(tmp_path / "hf", lambda tensors: tensors.update({NORM: values}))
    (dtypes,) = ranks.run(1, through, source, tmp_path / "out")
    norms = {name: dtype for name, dtype in dtypes.items() if name.endswith(".input_layernorm.weight")}
    assert norms.pop("decoder.layers.0.input_layernorm.weight") == "torch.float32"
    assert set(norms.values()) == {"torch.bfloat16"}
    exported = load_file(tmp_path / "out" / "model.safetensors")[NORM]
    assert exported.dtype == torch.float16
    assert torch.equal(exported, values)


def test_a_float64_tensor_is_refused_by_name(tmp_path: Path) -> None:
    source = changed(tmp_path / "hf", lambda tensors: tensors.update({NORM: tensors[NORM].double()}))
    words = r"float64: decoder\.layers\.0\.input_layernorm\.weight"
    with pytest.raises(ValueError, match=words):
        ranks.run(1, through, source, tmp_path / "out")


def test_finite_values_that_become_infinite_are_refused_by_name(tmp_path: Path) -> None:
    large, infinite = torch.ones(2, 3), torch.full((2, 3), torch.inf)
    large[1, 2] = 65520.0  # the least number that rounds to infinity in float16
    names = ("a", "b", "c", "d")
    weights = WeightMap([same(name, name) for name in names])
    sources = {"a": large, "b": torch.full((2, 3), 65519.0), "c": infinite, "d": -large}

    def held() -> Model:
        return Model(**{name: torch.zeros(2, 3, dtype=torch.float16) for name in names})

    with pytest.raises(ValueError, match=r"infinite in float16 \(2 tensors\): a, d; choose"):
        load([held()], weights, written(tmp_path, **sources))
    model = held()
    load([model], weights, written(tmp_path, **{**sources, "a": infinite.clone(), "d": -infinite}))
    assert model.get_parameter("a").isinf().all(), "what was infinite stays so"
    assert model.get_parameter("b").isfinite().all()
