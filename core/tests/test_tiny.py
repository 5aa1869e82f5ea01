"""Tiny checkpoints: the published layout, the same numbers in every variant, nothing of megatron."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from isthmus import cli
from isthmus.registry import family
from isthmus.testing.files import tensors
from isthmus.testing.tiny import stacked_experts, write_tiny

EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny variant, written once."""
    root = tmp_path_factory.mktemp("tiny")

    def folder(variant: str) -> Path:
        if not (root / variant).exists():
            write_tiny(family("qwen3_next"), root / variant, variant)
        return root / variant

    return folder


def test_one_seed_gives_one_checkpoint_and_another_seed_another(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_tiny(family("qwen3_next"), tmp_path / name, seed=seed)
    files = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    assert files["a"] == files["b"]
    first, other = tensors(tmp_path / "a"), tensors(tmp_path / "c")
    assert [name for name in first if torch.equal(first[name], other[name])] == []


def test_variants_hold_the_same_numbers(checkpoint: Callable[[str], Path]) -> None:
    default = tensors(checkpoint("default"))
    for variant in ("sharded", "v5_config", "no_mtp", "five_layers"):
        found = tensors(checkpoint(variant))
        assert all(torch.equal(found[name], default[name]) for name in found.keys() & default.keys())
    stacked = tensors(checkpoint("fused_experts"))
    for e in range(8):
        gate, up = default[f"{EXPERTS}.{e}.gate_proj.weight"], default[f"{EXPERTS}.{e}.up_proj.weight"]
        assert torch.equal(stacked[f"{EXPERTS}.gate_up_proj"][e], torch.cat([gate, up]))
        assert torch.equal(stacked[f"{EXPERTS}.down_proj"][e], default[f"{EXPERTS}.{e}.down_proj.weight"])
    assert f"{EXPERTS}.0.gate_proj.weight" not in stacked


def test_experts_are_stacked_by_number_and_stacks_stay() -> None:
    """Files have the experts by name, 10 before 2."""
    names = sorted(f"m.experts.{e}.{kind}_proj.weight" for e in range(12) for kind in ("gate", "up", "down"))
    single = {name: torch.full((2, 3), float(name.split(".")[2])) for name in names}
    stacks = stacked_experts({**single, "m.norm.weight": torch.ones(3)})
    assert stacks.keys() == {"m.experts.gate_up_proj", "m.experts.down_proj", "m.norm.weight"}
    for name, shape in (("gate_up_proj", (12, 4, 3)), ("down_proj", (12, 2, 3))):
        assert stacks[f"m.experts.{name}"].shape == shape
        assert stacks[f"m.experts.{name}"][:, 0, 0].tolist() == list(range(12))
    again = stacked_experts(stacks)
    assert again.keys() == stacks.keys()
    assert all(again[name] is stacks[name] for name in stacks)


def test_each_variant_is_what_its_name_says(checkpoint: Callable[[str], Path]) -> None:
    names = {variant: tensors(checkpoint(variant)).keys() for variant in ("default", "tied", "no_mtp")}
    assert "lm_head.weight" in names["default"]
    assert names["default"] - names["tied"] == {"lm_head.weight"}
    assert {name for name in names["default"] if name.startswith("mtp.")} == names["default"] - names[
        "no_mtp"
    ]
    repeated = tensors(checkpoint("tied_with_head"))
    assert torch.equal(repeated["lm_head.weight"], repeated["model.embed_tokens.weight"])
    assert len(list(checkpoint("sharded").glob("*.safetensors"))) == 3
    assert len(tensors(checkpoint("odd_vocab"))["lm_head.weight"]) == 151


def test_values_are_not_degenerate(checkpoint: Callable[[str], Path]) -> None:
    for name, tensor in tensors(checkpoint("default")).items():
        assert tensor.isfinite().all(), name
        assert len(tensor.unique()) > 1, f"{name} is one number"
    wide = tensors(checkpoint("fp32_a_log"))
    decay = [name for name in wide if name.endswith("A_log")]
    assert decay
    for name in decay:
        assert wide[name].dtype == torch.float32
        assert not torch.equal(wide[name], wide[name].bfloat16().float()), f"{name} would survive a rounding"


def test_a_dtype_is_written_and_stated(tmp_path: Path) -> None:
    for variant, key in (("default", "torch_dtype"), ("v5_config", "dtype")):
        write_tiny(family("qwen3_next"), tmp_path / variant, variant, dtype=torch.float32)
        assert {tensor.dtype for tensor in tensors(tmp_path / variant).values()} == {torch.float32}
        config = json.loads((tmp_path / variant / "config.json").read_text())
        assert config[key] == "float32"
        assert ("dtype" in config) + ("torch_dtype" in config) == 1


def test_files_carry_the_format_that_loaders_ask_for(checkpoint: Callable[[str], Path]) -> None:
    for file in [*checkpoint("default").glob("*.safetensors"), *checkpoint("sharded").glob("*.safetensors")]:
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}


def test_the_tokenizer_reads_what_it_wrote(checkpoint: Callable[[str], Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint("default"))
    ids = tokenizer("Hello, world!\n")["input_ids"]
    assert tokenizer.decode(ids) == "Hello, world!\n"
    assert max(ids) < 151
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]) == [0, 1]
    chat = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_the_command_lists_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tiny", "qwen3_next", "--list", "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert "odd_vocab" in captured.err
    assert "151 vocabulary rows" in captured.err
    document = json.loads(captured.out)
    assert document["variants"][0] == "default"
    assert [name for name in document["variants"] if not document["about"][name]] == []
    command = [
        "tiny",
        "qwen3_next",
        str(tmp_path / "out"),
        "--variant",
        "no_mtp",
        "--seed",
        "3",
        "--json",
        "-",
    ]
    assert cli.main(command) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tensors"] == len(tensors(tmp_path / "out"))
    assert document["seed"] == 3


def test_neither_megatron_nor_transformers_is_imported(tmp_path: Path) -> None:
    program = (
        "import sys; from isthmus import cli; code = cli.main(sys.argv[1:]);"
        "sys.exit(code or [m for m in ('megatron', 'transformers') if m in sys.modules] or 0)"
    )
    command = [sys.executable, "-c", program, "tiny", "qwen3_next", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [["out", "--variant", "huge"], ["."]], ids=["variant", "full folder"])
def test_a_wrong_request_is_refused_before_the_slow_imports(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "file").touch()
    program = (
        "import sys; from isthmus import cli; code = cli.main(sys.argv[1:]);"
        "sys.exit(code if 'torch' not in sys.modules else 'torch was imported')"
    )
    command = [sys.executable, "-c", program, "tiny", "qwen3_next", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2, done.stderr


@pytest.mark.parametrize("variant", ["default", "sharded"])
def test_files_have_the_usual_mode(tmp_path: Path, variant: str) -> None:
    before = os.umask(0o027)
    try:
        write_tiny(family("qwen3_next"), tmp_path / "out", variant)
    finally:
        os.umask(before)
    modes = {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "out").iterdir()}
    assert modes == {"0o640"}
