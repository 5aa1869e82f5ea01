"""Ctrl-C and SIGTERM in the middle of writing: nothing stays behind, neither a folder nor a process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from isthmus.registry import family
from isthmus.testing.tiny import write_tiny

PATIENCE = 600.0  # seconds, on a machine that does much else
# An import whose rank stops in mid-write, and has a process of its own, as Megatron's writer has.
SCRIPT = """
import multiprocessing, os, sys, time
from isthmus import cli
from isthmus.cli import import_

def half(layout, hf_dir, megatron_dir, *rest):
    from isthmus.checkpoint.folder import Staging

    staging = Staging(megatron_dir)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    (staging.path / "pids.part").write_text(f"{os.getpid()} {child.pid}")
    (staging.path / "pids.part").rename(staging.path / "pids")
    time.sleep(600)

if __name__ == "__main__":
    import_.on_rank = half
    sys.exit(cli.main(sys.argv[1:]))
"""


def until(found, what: str):
    """What `found` gives once it gives something."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if result := found():
            return result
        time.sleep(0.05)
    raise AssertionError(what)


def ended(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_import_leaves_nothing(tmp_path: Path, number: signal.Signals, code: int) -> None:
    write_tiny(family("qwen3_next"), tmp_path / "hf")
    (tmp_path / "script.py").write_text(SCRIPT)
    before = sorted(tmp_path.iterdir())

    def staged() -> list[Path]:
        return list(tmp_path.glob(".megatron.staging-*/pids"))

    run = subprocess.Popen(
        [sys.executable, "script.py", "import", "hf", "megatron"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a shell's background job ignores it
    )
    try:
        until(lambda: staged() or run.poll() is not None, "nothing was staged")
        [pids] = staged()
        workers = [int(pid) for pid in pids.read_text().split()]
        run.send_signal(number)
        _, stderr = run.communicate(timeout=PATIENCE)
    finally:
        run.kill()
    assert run.returncode == code, stderr
    assert stderr.endswith("isthmus import: interrupted; nothing written\n")
    assert sorted(tmp_path.iterdir()) == before
    until(lambda: all(ended(pid) for pid in workers), f"processes that live on: {workers}")
