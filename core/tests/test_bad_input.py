"""What a user can get wrong: exit code 2, one clear message, and not a byte written."""

import json
import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from isthmus import cli, launch
from isthmus.checkpoint.compare import compare
from isthmus.checkpoint.reader import CheckpointReader
from isthmus.cli import workers
from isthmus.layout import Layout
from isthmus.registry import families, family
from isthmus.testing.tiny import write_tiny

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Q_PROJ = "model.layers.3.self_attn.q_proj.weight"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, dot files too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def config(**changes: Any) -> Callable[[Path], None]:
    """Changes fields of config.json; None takes one out."""

    def change(folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text()) | changes
        kept = {key: value for key, value in raw.items() if key not in changes or value is not None}
        (folder / "config.json").write_text(json.dumps(kept))

    return change


def weights(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    """Changes the tensors of the only file."""

    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return rewrite


def data(change: Callable[[bytes], bytes], file: str = WEIGHTS) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes())) and None


def index(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        raw = json.loads((folder / INDEX).read_text())
        change(raw["weight_map"])
        (folder / INDEX).write_text(json.dumps(raw))

    return rewrite


def drop_experts(tensors: dict[str, Tensor]) -> None:
    for expert in range(4):
        del tensors[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"]


def unlink(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def in_place(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Something else in the place of a file."""

    def replace(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return replace


def dangle(path: Path) -> None:
    path.symlink_to("nowhere")


# What is done to a good checkpoint, and what the message must say.
DAMAGED: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "no config": (unlink("config.json"), ["has no config.json; it is not a Hugging Face checkpoint"]),
    "config cut short": (data(lambda text: text[:-20], "config.json"), ["config.json is not valid JSON"]),
    "no model type": (config(model_type=None), ["model_type is None, expected a name"]),
    "unknown model type": (
        config(model_type="gemma9"),
        ["no installed family handles model_type 'gemma9'", "qwen3_next", "pip install isthmus-gemma9"],
    ),
    "unknown field": (config(attention_sinks=4), ["attention_sinks"]),
    "values of the wrong kind": (
        config(hidden_size="64", rms_norm_eps=-1, layer_types=5, rope_scaling="linear"),
        [
            "hidden_size='64', expected a whole number",
            "rms_norm_eps=-1",
            "layer_types=5",
            "rope_scaling='linear'",
        ],
    ),
    "a layer that there is not": (
        config(mlp_only_layers=[1, 4]),
        ["mlp_only_layers has [4]", "last one 3"],
    ),
    "layer types of another model": (
        config(full_attention_interval=None, layer_types=["full_attention"] * 3),
        ["layer_types names 3 layers, num_hidden_layers=4"],
    ),
    "heads that share nothing": (config(num_key_value_heads=3), ["num_attention_heads=4 is not a multiple"]),
    "an odd number of rotated dims": (config(partial_rotary_factor=0.1), ["3 dims, expected an even number"]),
    "config with a name twice": (
        data(lambda text: text.replace(b"{", b'{"head_dim": 1, ', 1), "config.json"),
        ["config.json is not valid JSON: 'head_dim' given more than once"],
    ),
    "config without a bottom": (data(lambda _: b"[" * 100_000, "config.json"), ["nested more than 100 deep"]),
    "no weights": (unlink(WEIGHTS), ["safetensors"]),
    "missing tensors": (
        weights(drop_experts),
        ["missing from the checkpoint (4): model.layers.1.mlp.experts.{0..3}.up_proj.weight"],
    ),
    "unknown tensors": (
        weights(lambda t: t.update({f"model.layers.{i}.self_attn.sinks": torch.ones(4) for i in range(4)})),
        ["no rule for checkpoint tensors (4): model.layers.{0..3}.self_attn.sinks"],
    ),
    "missing and unknown tensors": (
        weights(lambda t: t.update(renamed=t.pop("model.norm.weight"))),
        ["missing from the checkpoint (1): model.norm.weight", "no rule for checkpoint tensors (1): renamed"],
    ),
    "wrong shape": (
        weights(lambda t: t.update({Q_PROJ: t[Q_PROJ][:-2].clone()})),
        [f"{Q_PROJ}: is (254, 64), the model's config makes it (256, 64)"],
    ),
    "another hidden size": (
        config(hidden_size=128),
        ["the model's config makes it", "model.embed_tokens.weight"],
    ),
    "another number of experts": (
        config(num_experts=16),
        ["model.layers.{0..3}.mlp.experts.{8..15}.gate_proj.weight"],
    ),
    "one layer too many": (config(num_hidden_layers=5), ["model.layers.4.input_layernorm.weight"]),
    "untied without head": (
        weights(lambda t: t.pop("lm_head.weight")),
        ["tie_word_embeddings=False", "no lm_head.weight"],
    ),
    "weights that are a folder": (
        in_place(WEIGHTS, Path.mkdir),
        ["folders where files should be: "],
    ),
    "weights that are a broken link": (in_place(WEIGHTS, dangle), ["broken links: " + WEIGHTS]),
    "config that is a folder": (in_place("config.json", Path.mkdir), ["config.json is a folder"]),
    "config that is a broken link": (in_place("config.json", dangle), ["config.json is a broken link"]),
    "cut short": (data(lambda raw: raw[:-1000]), [WEIGHTS]),
    "header damaged": (data(lambda raw: raw[:8] + b"[" + raw[9:]), [WEIGHTS]),
    "header without a bottom": (
        data(lambda raw: struct.pack("<Q", 80_000) + b'{"a":' * 16_000 + raw),
        [WEIGHTS, "nested more than 100 deep"],
    ),
    "header longer than the file": (
        data(lambda raw: b"\xff" * 8 + raw[8:]),
        ["header of 18446744073709551615 bytes"],
    ),
    "empty file": (data(lambda raw: b""), [WEIGHTS]),
    "a download's pointer file": (
        data(lambda raw: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        [WEIGHTS],
    ),
    "quantised by config": (
        config(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}),
        ["quantised", "fp8"],
    ),
    "quantised by its tensors": (
        weights(lambda t: t.update({Q_PROJ: t[Q_PROJ].to(torch.float8_e4m3fn)})),
        ["quantised", "float8_e4m3fn", Q_PROJ],
    ),
}
DAMAGED_SHARDS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "a shard is missing": (unlink("model-00002-of-00003.safetensors"), ["model-00002-of-00003.safetensors"]),
    "the index names a tensor that no file has": (
        index(lambda names: names.update(ghost="model-00001-of-00003.safetensors")),
        ["ghost"],
    ),
    "the index has no bottom": (data(lambda _: b'{"a":' * 16_000, INDEX), ["nested more than 100 deep"]),
    "the index leaves a tensor out": (index(lambda names: names.pop(Q_PROJ)), [Q_PROJ]),
    "the index names the wrong file": (
        index(lambda names: names.update({"model.norm.weight": "model-00001-of-00003.safetensors"})),
        ["model.norm.weight"],
    ),
}


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The message of a command that must end with exit code 2."""
    code = cli.main([str(word) for word in argv])
    captured = capsys.readouterr()
    assert code == 2, captured
    message = re.sub(r"\A(.* \.\.\.\n)*", "", captured.err)  # the stages that were reached
    assert message.startswith(f"isthmus {argv[0]}: "), captured.err
    assert "Traceback" not in message
    return message


@pytest.mark.parametrize(
    ("variant", "damage", "words"),
    [
        *(pytest.param("default", *case, id=name) for name, case in DAMAGED.items()),
        *(pytest.param("sharded", *case, id=name) for name, case in DAMAGED_SHARDS.items()),
    ],
)
def test_a_damaged_checkpoint_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    variant: str,
    damage: Callable[[Path], None],
    words: list[str],
) -> None:
    write_tiny(family("qwen3_next"), tmp_path / "hf", variant)
    damage(tmp_path / "hf")
    before = content(tmp_path)
    message = refused(capsys, "roundtrip", tmp_path / "hf", tmp_path / "out", "--tp", "2")
    assert [word for word in words if word not in message] == [], message
    assert len(message) < 3000, "a list that nobody reads"
    assert content(tmp_path) == before
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that nothing is wrong with."""
    folder = tmp_path_factory.mktemp("good") / "hf"
    write_tiny(family("qwen3_next"), folder)
    return folder


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tp", "3"], ["cannot divide 4 attention heads over tensor_model_parallel_size=3"]),
        (["--ep", "3"], ["cannot divide 8 experts over expert_model_parallel_size=3"]),
        (["--pp", "3"], ["cannot divide 4 layers over pp x vp = 3 x 1 stages", "--pipeline-layout"]),
        (["--vp", "2"], ["vp=2 needs pp > 1"]),
        (["--tp", "2", "--no-sp"], ["--sp"]),
        (["--tp", "0"], ["parallel sizes must be at least 1", "'tp': 0"]),
        (["--tp", "3", "--ep", "3"], ["attention heads over tensor_model_parallel_size=3", "8 experts over"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else None,
)
def test_a_layout_that_does_not_fit_is_refused(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: list[str]
) -> None:
    message = refused(capsys, "roundtrip", good, tmp_path / "out", *options)
    assert [word for word in words if word not in message] == [], message
    assert content(tmp_path) == {}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["num_layers=8"], ["num_layers: 4 by the checkpoint's config.json, 8 of the model of --set"]),
        (["hidden_size=x", "rotary_base=5"], ["hidden_size: 64 by", "'x' of", "rotary_base: 10000000 by"]),
        (["params_dtype=x"], ["--set params_dtype=x: use --dtype"]),
        (["nonsense=4"], ["have no field nonsense"]),
        (
            ["moe_grouped_gemm=3", "attention_dropout=x", "transformer_impl=foo", "recompute_modules=[1]"],
            [
                "moe_grouped_gemm=3, expected bool",
                "attention_dropout='x', expected float",
                "'local' or",
                "[1]",
            ],
        ),
    ],
    ids=lambda value: " ".join(value) if "=" in value[0] else None,
)
def test_fields_that_the_model_cannot_have_are_refused(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: list[str]
) -> None:
    settings = [word for option in options for word in ("--set", option)]
    message = refused(capsys, "import", good, tmp_path / "out", *settings)
    assert [word for word in words if word not in message] == [], message
    assert content(tmp_path) == {}


def test_a_shard_size_that_is_none_is_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(
        capsys, "export", tmp_path / "megatron", tmp_path / "out", "--max-shard-size", "nonsense"
    )
    assert "nonsense" in message


def test_torchruns_ranks_must_be_the_layouts(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    message = refused(capsys, "roundtrip", good, tmp_path / "out", "--tp", "2")
    assert "tp=2 needs 2 ranks, torchrun started 3" in message
    assert "--nproc-per-node 2" in message
    assert content(tmp_path) == {}


def test_a_target_that_is_not_empty_is_kept(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "precious.txt").write_text("a")
    monkeypatch.setattr(workers, "run", None)  # before any model is built
    for command in ("roundtrip", "import"):
        message = refused(capsys, command, good, tmp_path)
        assert "is not empty (precious.txt)" in message
        assert "--overwrite" in message
    assert content(tmp_path) == {"precious.txt": b"a"}


def test_a_source_is_never_its_own_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "runs" / "hf"
    write_tiny(family("qwen3_next"), source)
    before = content(tmp_path)
    refused(capsys, "roundtrip", source, source)
    refused(capsys, "roundtrip", source, source.parent, "--overwrite")
    assert content(tmp_path) == before


@pytest.mark.parametrize("path", ["missing/folder/somewhere", "no:such*name"])
def test_a_folder_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str
) -> None:
    message = refused(capsys, "roundtrip", path, tmp_path / "out")
    assert path in message


def test_a_hub_id_that_is_not_cached_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["roundtrip", "nobody/nothing", tmp_path / "out"], ["plan", "nobody/nothing"]):
        message = refused(capsys, *words)
        assert "nobody/nothing is not a folder here, nor a hub id in the cache" in message


def test_tiny_refuses_what_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "pip install isthmus-llama9" in refused(capsys, "tiny", "llama9", tmp_path / "out")
    assert refused(capsys, "tiny", "qwen3next", tmp_path / "out").endswith("Did you mean qwen3_next?\n")
    for nonsense in ("/x/y", "../../etc", "Some Model", "-", "7b", "x" * 60):
        message = refused(capsys, "tiny", "--", nonsense, tmp_path / "out")
        installed = ", ".join(sorted(families()))
        assert message.endswith(f"model_type {nonsense!r} (installed: {installed})\n")
    message = refused(capsys, "tiny", "qwen3_next", tmp_path / "out", "--variant", "huge")
    assert re.search(r"no tiny variant 'huge' \(it has: default, tied, ", message)
    assert "where to?" in refused(capsys, "tiny", "qwen3_next")
    (tmp_path / "precious.txt").write_text("a")
    assert "is not empty" in refused(capsys, "tiny", "qwen3_next", tmp_path)
    assert content(tmp_path) == {"precious.txt": b"a"}


def test_an_export_says_what_a_folder_is_that_is_not_megatrons(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert "nowhere does not exist" in refused(capsys, "export", tmp_path / "nowhere", out)
    assert "config.json is a file" in refused(capsys, "export", good / "config.json", out)
    message = refused(capsys, "export", good, out)
    assert "is a Hugging Face checkpoint" in message
    assert f"isthmus import {good} " in message
    assert f"isthmus import {good} " in refused(capsys, "export", good, out, "--hf", good)


def test_a_demo_keeps_what_an_earlier_one_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "precious.txt").write_text("a")
    message = refused(capsys, "demo", "--out", tmp_path)
    assert f"--out {tmp_path} is not empty" in message
    assert "--overwrite" not in message  # which demo does not have


def test_a_round_trip_onto_the_source_is_refused(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(good)
    (tmp_path / "link").symlink_to(good)
    for out in (good, tmp_path / "link"):
        assert "is HF_DIR itself" in refused(capsys, "roundtrip", good, out, "--overwrite")
    assert content(good) == before


@pytest.mark.parametrize("command", ["plan", "demo"])
def test_commands_on_the_cpu_say_that_transformer_engine_is_in_the_way(
    command: str, good: Path, tmp_path: Path
) -> None:
    (tmp_path / "transformer_engine.py").touch()
    words = ["plan", str(good)] if command == "plan" else ["demo", "--steps", "1"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-m", "isthmus", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 2
    assert "transformer_engine is installed. Use an environment without it" in run.stderr
    assert "Traceback" not in run.stderr


def die_in_mid_write(folder: Path, layout: Layout, target: Path, overwrite: bool) -> None:
    """Export, killed when this rank has written a third of what it has to."""
    from isthmus.bridge import AutoBridge

    layout.initialize()
    bridge = AutoBridge.from_hf_pretrained(folder)
    model = bridge.build_model(bridge.get_model_config(**layout.config_overrides()))
    bridge.load_hf_weights(model)
    left = sum(info.nbytes for info in bridge.reader.tensors.values()) // (3 * layout.world_size)

    def advance(nbytes: int) -> None:
        nonlocal left
        left -= nbytes
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    bridge.save_hf_pretrained(model, target, overwrite=overwrite, advance=advance)


def test_a_killed_export_leaves_the_target_as_it_was(good: Path, tmp_path: Path) -> None:
    target, layout = tmp_path / "out", Layout(tp=2).resolved()
    write_tiny(family("qwen3_next"), target, "tied")
    before = content(target)
    with pytest.raises(launch.WorkerError, match="killed by SIGKILL"):
        launch.run(2, die_in_mid_write, good, layout, target, True)
    assert content(target) == before
    assert len(list(tmp_path.iterdir())) == 2, "it was killed before it had begun, or after the end"

    assert cli.main(["roundtrip", str(good), str(target), "--tp", "2", "--overwrite"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "what the killed run left is gone"
    with CheckpointReader(good) as source, CheckpointReader(target) as written:
        assert compare(source, written).equal == len(source.tensors)


def save_onto_a_full_disk(folder: Path, layout: Layout, target: Path) -> None:
    """Export on a disk that takes no more than 100,000 bytes of a file, of which each rank has more."""
    import resource

    from isthmus.bridge import AutoBridge

    layout.initialize()
    bridge = AutoBridge.from_hf_pretrained(folder)
    model = bridge.build_model(bridge.get_model_config(**layout.config_overrides()))
    bridge.load_hf_weights(model)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    bridge.save_hf_pretrained(model, target, overwrite=True)


def test_a_full_disk_leaves_the_target_as_it_was(good: Path, tmp_path: Path) -> None:
    target, layout = tmp_path / "out", Layout(tp=2).resolved()
    write_tiny(family("qwen3_next"), target, "tied")
    before = content(tmp_path)
    with pytest.raises(OSError, match=r"cannot write .* of .*safetensors, a file of [\d,]+ bytes"):
        launch.run(2, save_onto_a_full_disk, good, layout, target)
    assert content(tmp_path) == before
