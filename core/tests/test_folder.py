"""Folders that appear whole or not at all, and what travels beside the weights."""

import errno
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from isthmus.checkpoint import folder as folders
from isthmus.checkpoint.folder import Staging, carry_side_files, check_target, cleared
from isthmus.checkpoint.writer import OutputTensor, ShardWriter


def fill(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def content(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def publish(target: Path, overwrite: bool = False, **files: str) -> None:
    with Staging(target, overwrite) as staging:
        fill(staging.path, **files)
        staging.publish()


def test_a_folder_appears_only_when_it_is_published(tmp_path):
    target = tmp_path / "runs" / "out"
    with Staging(target) as staging:
        fill(staging.path, config="new")
        assert not target.exists()
        assert staging.path.parent == target.parent
        staging.publish()
        assert content(target) == {"config": "new"}
    assert [path.name for path in target.parent.iterdir()] == ["out"]
    mode = fill(tmp_path / "plain").stat().st_mode
    assert target.stat().st_mode == mode


def test_an_empty_target_is_filled(tmp_path):
    publish(fill(tmp_path / "out"), a="1")
    assert content(tmp_path / "out") == {"a": "1"}


def test_a_filled_target_is_refused_before_anything_is_written(tmp_path):
    target = fill(tmp_path / "out", precious="1", b="2", c="3", d="4")
    with pytest.raises(ValueError, match=r"is not empty \(b, c, d, \.\.\.\); choose another folder"):
        Staging(target)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_overwrite_leaves_nothing_of_the_old_folder(tmp_path):
    target = fill(tmp_path / "out", stale="1", config="old")
    fill(target / "sub", stale="1")
    publish(target, overwrite=True, config="new")
    assert content(target) == {"config": "new"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_overwrite_works_where_folders_cannot_be_swapped(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_swap", lambda new, target: False)
    publish(fill(tmp_path / "out", stale="1"), overwrite=True, config="new")
    assert content(tmp_path / "out") == {"config": "new"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_without_a_swap_a_failed_or_killed_replacement_gives_the_old_folder_back(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_swap", lambda new, target: False)
    target, rename = fill(tmp_path / "out", config="old"), Path.rename
    for killed in (False, True):
        with Staging(target, overwrite=True) as staging:

            def fail(path, to, staging=staging, killed=killed):
                if path == staging.path or (killed and ".replaced-" in path.name):
                    raise OSError(errno.EIO, "failed")
                return rename(path, to)

            monkeypatch.setattr(Path, "rename", fail)
            with pytest.raises(OSError, match="failed"):
                staging.publish()
            monkeypatch.setattr(Path, "rename", rename)
        assert target.exists() is not killed
        with pytest.raises(ValueError, match="not empty"):
            Staging(target)
        assert content(target) == {"config": "old"}
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_error_or_no_publish_leaves_no_trace(tmp_path):
    target = fill(tmp_path / "out", config="old")
    with pytest.raises(FileNotFoundError), Staging(target, overwrite=True) as staging:
        fill(staging.path, config="new").joinpath("none").read_text()
    with Staging(target, overwrite=True) as staging:
        fill(staging.path, config="new")
    assert content(target) == {"config": "old"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_target_filled_meanwhile_is_kept(tmp_path):
    with Staging(tmp_path / "out") as staging:
        fill(tmp_path / "out", other="1")
        with pytest.raises(ValueError, match="was filled while"):
            staging.publish()
    assert content(tmp_path) == {"out/other": "1"}


def test_a_link_to_a_folder_stays_a_link(tmp_path):
    real = fill(tmp_path / "disk" / "real", config="old")
    (tmp_path / "out").symlink_to(real)
    publish(tmp_path / "out", overwrite=True, config="new")
    assert (tmp_path / "out").is_symlink()
    assert content(real) == {"config": "new"}


def test_targets_that_cannot_be_replaced_are_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is a file"):
        Staging(tmp_path / "file", overwrite=True)
    with pytest.raises(ValueError, match="is a mount point"):
        Staging("/proc", overwrite=True)
    source = fill(tmp_path / "models" / "hf", config="1")
    with pytest.raises(ValueError, match="would delete"):
        Staging(tmp_path / "models", overwrite=True, sources=[source])
    with pytest.raises(ValueError, match="is the source itself"):
        Staging(source, overwrite=True, sources=[source])
    assert content(tmp_path / "models") == {"hf/config": "1"}


def test_too_little_room_is_said_up_front_with_both_numbers(tmp_path):
    with pytest.raises(OSError, match=r"needs 1,175,979,934,698,983,915 bytes .* has [\d,]+ free") as caught:
        Staging(tmp_path / "out", nbytes=1 << 60)
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_the_tensors_alone_would_fill_is_too_small(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_010_000))
    with pytest.raises(OSError, match=r"needs 1,020,000 bytes .* has 1,010,000 free"):
        Staging(tmp_path / "out", nbytes=1_000_000)
    Staging(tmp_path / "out", nbytes=990_000).discard()
    assert list(tmp_path.iterdir()) == []


def test_a_file_above_the_target_is_named(tmp_path):
    (tmp_path / "file").touch()
    for ask in (Staging, check_target):
        with pytest.raises(ValueError, match=r"cannot be made: .*file is a file"):
            ask(tmp_path / "file" / "sub" / "out")


WRITE_AND_WAIT = """
    import sys, time, torch
    from isthmus.checkpoint.folder import Staging
    from isthmus.checkpoint.writer import OutputTensor, ShardWriter
    tensors = [OutputTensor("w", torch.float32, (2, 1000))]
    with Staging(sys.argv[1], overwrite=True) as staging:
        writer = ShardWriter(staging.path / "model.safetensors", tensors)
        writer.write("w", torch.ones(1000), index=0)
        print("writing", flush=True)
        time.sleep(100)
"""


def test_a_killed_run_leaves_the_target_and_does_not_block_the_next(tmp_path):
    target = fill(tmp_path / "out", config="old")
    command = [sys.executable, "-c", textwrap.dedent(WRITE_AND_WAIT), str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "writing\n"
        with Staging(target, overwrite=True) as staging:  # one run does not touch what another is writing
            others = [path for path in tmp_path.glob(".out.staging-*") if path != staging.path]
            assert [path.name for path in others[0].iterdir()] == ["model.safetensors"]
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert content(target) == {"config": "old"}
    assert others[0].exists()
    publish(target, overwrite=True, config="new")
    assert content(target) == {"config": "new"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_dying_process_still_holds_is_cleared_once_it_lets_go(tmp_path):
    target = tmp_path / "out"

    @cleared(target)
    def interrupted():
        staging = Staging(target)  # as a process that a killed rank forked: its lock ends a little later
        threading.Timer(0.5, staging._unlock).start()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="nothing written"):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_what_another_run_is_writing_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "PATIENCE", 1e6)
    with Staging(tmp_path / "out") as other:
        with pytest.raises(KeyboardInterrupt), cleared(tmp_path / "out"):
            raise KeyboardInterrupt
        assert other.path.exists()


def test_a_full_disk_is_one_clear_error_and_leaves_the_target(tmp_path):
    target = fill(tmp_path / "out", config="old")
    tensors = [OutputTensor(f"w.{n}", torch.uint8, (400_000,)) for n in range(4)]
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limit[1]))  # a write beyond it fails, for root too

    def write_all():
        with Staging(target, overwrite=True) as staging, ShardWriter(staging.path / "x", tensors) as writer:
            for tensor in tensors:
                writer.write(tensor.name, torch.zeros(400_000, dtype=torch.uint8))

    try:
        with pytest.raises(OSError, match=r"cannot write w\.2 .*a file of 1,600,") as caught:
            write_all()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert caught.value.errno == errno.EFBIG
    assert content(tmp_path) == {"out/config": "old"}


def test_everything_but_weights_and_caches_is_carried(tmp_path):
    carried = {
        "tokenizer.json": "1",
        "tokenizer.model": "2",
        "generation_config.json": "3",
        "chat_template.jinja": "4",
        "modeling_own.py": "5",
        "README.md": "6",
        ".gitattributes": "7",
        "additional_chat_templates/tool.jinja": "8",
        "processor/config.json": "9",
        "processor/deep/er/vocab.txt": "10",
    }
    left = [
        "config.json",
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "model.safetensors.index.fp16.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "consolidated.00.pth",
        "optimizer.pt",
        "model-Q4.gguf",
        "processor/extra.safetensors",
        "original/consolidated.pth",
        ".cache/huggingface/download/x.json",
        ".git/config",
        "__pycache__/modeling_own.pyc",
    ]
    source = tmp_path / "hf"
    for name, text in (carried | dict.fromkeys(left, "no")).items():
        fill((source / name).parent, **{Path(name).name: text})
    blob = fill(tmp_path / "blobs", abc="linked") / "abc"
    (source / "vocab.json").symlink_to(blob)  # as the hub's cache has it
    (source / "round").symlink_to(source)
    with Staging(source / "out") as staging:
        names = carry_side_files(source, staging)
        staging.publish()
    assert content(source / "out") == carried | {"vocab.json": "linked"}
    assert sorted(names) == sorted([*carried, "vocab.json"])
    assert not (source / "out" / "vocab.json").is_symlink()
    assert not (source / "out" / "original").exists()
    with Staging(source / "out", overwrite=True) as staging:  # the old output is not part of the source
        assert sorted(carry_side_files(source, staging)) == sorted(names)


def test_a_broken_link_among_the_side_files_is_refused(tmp_path):
    source = fill(tmp_path / "hf", a="1")
    (source / "tokenizer.json").symlink_to(tmp_path / "gone")
    with (
        Staging(tmp_path / "out") as staging,
        pytest.raises(ValueError, match=r"tokenizer\.json is a broken link"),
    ):
        carry_side_files(source, staging)
