"""A checkpoint's whole journey by the commands: into Megatron at one layout, out at another, and proven.

The checkpoints are of others' making: by transformers' own `save_pretrained`, and as the hub has them.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from isthmus import cli, launch
from isthmus.hosting.torch_functions import import_modeling
from isthmus.testing import ranks
from isthmus.testing.tiny import write_tiny
from isthmus_qwen3_next.family import FAMILY
from isthmus_qwen3_next.tiny import tiny_config

pytestmark = ranks.cpu_only
launch.preload("transformers.modeling_utils")

SHARD = "200KB"  # so that the checkpoint has several files
SIDE_FILES = {
    ".gitattributes": "*.safetensors filter=lfs diff=lfs merge=lfs -text\n",
    "LICENSE": "Apache License\n",
    "README.md": "---\nlibrary_name: transformers\n---\n# Tiny\n",
    "generation_config.json": '{\n    "do_sample": true,\n    "top_p": 0.8\n}',
    "merges.txt": "#version: 0.2\n",
}


def by_transformers(folder: Path) -> None:
    """A bf16 model as transformers initialises and saves it: no MTP block, its own spelling of the config."""
    modeling = import_modeling("transformers.models.qwen3_next.modeling_qwen3_next")
    torch.manual_seed(0)
    config = modeling.Qwen3NextConfig.from_dict(tiny_config())
    modeling.Qwen3NextForCausalLM(config).bfloat16().save_pretrained(folder, max_shard_size=SHARD)


def as_on_the_hub(folder: Path) -> None:
    """Several files, an MTP block, side files, and a config.json that no tool of today would write so."""
    write_tiny(FAMILY, folder, "sharded", dtype=torch.bfloat16)
    for name, text in SIDE_FILES.items():
        (folder / name).write_text(text)
    config = json.loads((folder / "config.json").read_text())
    text = json.dumps(config, indent=4).replace("1e-06", "0.000001")
    assert "0.000001" in text
    (folder / "config.json").write_text(text)  # without a last line break


SOURCES = {"transformers": by_transformers, "hub": as_on_the_hub}


@pytest.fixture(scope="module", params=SOURCES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / "hf"
    write: Callable[[Path], None] = SOURCES[request.param]
    write(folder)
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def contents(folder: Path) -> dict[str, tuple[torch.dtype, bytes]]:
    """Dtype and bytes of each tensor, as safetensors reads them."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                tensor = file.get_tensor(name)
                assert name not in found
                found[name] = tensor.dtype, tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return found


def other_files(folder: Path) -> dict[str, bytes]:
    """All files but weights and their index."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if ".safetensors" not in path.name}


@pytest.mark.parametrize(
    ("variant", "line"),
    [
        ("tied", "output_layer.weight is model.embed_tokens.weight"),
        ("tied_with_head", "lm_head.weight is model.embed_tokens.weight"),
    ],
)
def test_an_import_says_what_a_tied_head_is(
    tmp_path: Path, variant: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny(FAMILY, tmp_path / "hf", variant)
    report = tmp_path / "import.json"
    words = ["import", str(tmp_path / "hf"), str(tmp_path / "megatron"), "--json", str(report)]
    assert cli.main(words) == 0
    assert line in " ".join(capsys.readouterr().out.split())
    assert json.loads(report.read_text())["shared"] == dict([line.split(" is ")])


@pytest.mark.parametrize(
    ("into", "out_of"), [(("--tp", "2"), ("--pp", "2")), (("--pp", "2"), ("--tp", "2"))], ids=str
)
def test_the_export_is_the_source_bit_for_bit_and_file_for_file(
    source: Path, tmp_path: Path, into: tuple[str, str], out_of: tuple[str, str]
) -> None:
    megatron, out = str(tmp_path / "megatron"), tmp_path / "out"
    assert cli.main(["import", str(source), megatron, *into]) == 0
    assert cli.main(["export", megatron, str(out), *out_of, "--max-shard-size", SHARD]) == 0
    assert contents(out) == contents(source)
    assert other_files(out) == other_files(source)
    files = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert files.keys() == contents(source).keys()
    assert set(files.values()) == {path.name for path in out.glob("*.safetensors")}


@pytest.mark.parametrize("layout", [("--tp", "2"), ("--pp", "2")], ids=str)
def test_outputs_and_gradients_are_hugging_faces(
    source: Path, tmp_path: Path, layout: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "verify.json"
    code = cli.main(["verify", str(source), *layout, "--grads", "--json", str(report)])
    print(capsys.readouterr().out)
    document = json.loads(report.read_text())
    assert document["failures"] == []
    assert code == 0
    assert document["roundtrip"]["tensors"] == len(contents(source))
    assert (document["forward"]["mtp"] is not None) == any(
        name.startswith("mtp.") for name in contents(source)
    )
