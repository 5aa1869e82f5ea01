"""Ranks of tests: on CPU by default; on GPUs where asked for, or skipped with what is missing."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus import launch
from isthmus.launch.transfer import Task
from isthmus.launch.worker import environment
from isthmus.testing import ranks

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    """Set the device to cuda on a machine that seems to have Transformer Engine and so many GPUs."""

    def pretend(count: int, transformer_engine: bool = True) -> None:
        real = importlib.util.find_spec

        def find_spec(name: str, package: str | None = None) -> object:
            if name == "transformer_engine":
                return object() if transformer_engine else None
            return real(name, package)

        monkeypatch.setenv("ISTHMUS_DEVICE", "cuda")
        monkeypatch.setattr("torch.cuda.device_count", lambda: count)
        monkeypatch.setattr(importlib.util, "find_spec", find_spec)

    return pretend


def backend() -> tuple[str, str]:
    import torch.distributed as dist

    return os.environ["RANK"], dist.get_backend()


def test_ranks_are_cpu_processes_unless_something_else_is_asked_for(monkeypatch) -> None:
    monkeypatch.delenv("ISTHMUS_DEVICE", raising=False)
    assert ranks.run(2, backend) == [("0", "gloo"), ("1", "gloo")]


def test_an_unknown_device_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("ISTHMUS_DEVICE", "tpu")
    with pytest.raises(ValueError, match="ISTHMUS_DEVICE must be cpu or cuda, got 'tpu'"):
        ranks.run(1, backend)
    with pytest.raises(ValueError, match="device must be 'cpu' or 'cuda'"):
        launch.run(1, backend, device="tpu")


def test_a_test_of_more_ranks_than_gpus_is_skipped(gpus, monkeypatch) -> None:
    gpus(1)
    monkeypatch.setattr(launch, "run", lambda *args, **kwargs: kwargs)
    assert ranks.run(1, backend).items() >= {"device": "cuda", "exact": True}.items()
    with pytest.raises(pytest.skip.Exception, match="2 ranks need a GPU each, this machine has 1"):
        ranks.run(2, backend)


@pytest.mark.parametrize(("exact", "tf32"), [(True, "0"), (False, None)])
def test_only_what_is_to_be_exact_gets_the_settings_that_cost_speed(exact: bool, tf32: str | None) -> None:
    given = {
        "module": "m",
        "file": None,
        "name": "f",
        "arguments": b"",
        "world_size": 2,
        "folder": "",
        "timeout": 1,
    }
    task = Task(**given, device="cuda", exact=exact, quiet=True, environment={"MINE": "1"})
    found = environment(1, task)
    assert (found["MINE"], found["RANK"], found["CUDA_DEVICE_MAX_CONNECTIONS"]) == ("1", "1", "1")
    assert found.get("NVIDIA_TF32_OVERRIDE") == tf32


def test_a_test_without_transformer_engine_is_skipped(gpus) -> None:
    gpus(8, transformer_engine=False)
    with pytest.raises(pytest.skip.Exception, match="Transformer Engine's modules, and it is not installed"):
        ranks.run(1, backend)


def test_models_of_local_modules_are_skipped_on_gpus_alone(gpus) -> None:
    ranks.skip_unbuildable({"transformer_impl": "local"})
    gpus(1)
    ranks.skip_unbuildable({"transformer_impl": "transformer_engine"})
    with pytest.raises(pytest.skip.Exception, match="no zero-centred weights"):
        ranks.skip_unbuildable({"transformer_impl": "local"})


def test_the_launcher_itself_refuses_too_few_gpus(gpus) -> None:
    gpus(1)
    with pytest.raises(ValueError, match="cannot start 2 workers on GPUs: 2 ranks need a GPU each"):
        launch.run(2, backend, device="cuda")


def test_ranks_on_gpus_are_started_and_say_by_rank_why_they_failed(gpus, monkeypatch) -> None:
    gpus(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(launch.WorkerError, match="in set_device") as caught:
        ranks.run(2, backend)
    assert caught.value.tracebacks.keys() <= {0, 1}


def test_the_gpu_session_refuses_a_machine_without_gpus(tmp_path: Path) -> None:
    environment = os.environ | {"PATH": str(tmp_path)}
    command = [sys.executable, "-m", "nox", "--no-venv", "-s", "gpu(qwen3_next)"]
    found = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert found.returncode != 0
    assert "no NVIDIA GPU on this machine" in found.stderr
