"""The `isthmus` command as a user and a script meet it: exit codes, messages, JSON, import cost."""

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from isthmus import cli, registry
from isthmus.cli import config_options, layout_options, workers
from isthmus.cli.model import Stopwatch
from isthmus.cli.output import console, write_json
from isthmus.cli.progress import announce, progress
from isthmus.launch import WorkerError
from isthmus.layout import Layout

Run = Callable[[argparse.Namespace], int]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], None]:
    """Makes `isthmus sample` a command that runs the given function."""

    def install(run: Run) -> None:
        module = ModuleType("isthmus.cli.sample", "A sample.\n\nMore about it.")
        module.add_arguments = layout_options.add_layout_arguments
        module.run = run
        monkeypatch.setitem(sys.modules, "isthmus.cli.sample", module)
        monkeypatch.setattr(cli, "COMMANDS", ("sample",))

    return install


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes the given (model_type, value) pairs the installed families."""

    def install(*pairs: tuple[str, str]) -> None:
        points = [importlib.metadata.EntryPoint(name, value, registry.GROUP) for name, value in pairs]
        monkeypatch.setattr(registry, "entry_points", lambda group: points)
        registry.families.cache_clear()

    yield install
    registry.families.cache_clear()


def raising(error: Exception) -> Run:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


@pytest.mark.parametrize("code", [0, 1])
def test_exit_code_is_what_the_command_returns(command: Callable[[Run], None], code: int) -> None:
    command(lambda args: code)
    assert cli.main(["sample"]) == code


@pytest.mark.parametrize(
    "error",
    [
        ValueError("tp is 3, expected a divisor of 8"),
        LookupError("no installed family handles model_type 'x'"),
        FileNotFoundError(2, "No such file or directory", "nowhere/config.json"),
        OSError(28, "No space left on device", "out/model.safetensors"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_wrong_request_is_a_message_without_traceback(
    command: Callable[[Run], None], capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    command(raising(error))
    assert cli.main(["sample"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"isthmus sample: {error}\n"


def test_message_of_a_bare_key_error_says_that_a_key_was_missing(
    command: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(raising(KeyError("hidden_size")))
    assert cli.main(["sample"]) == 2
    assert capsys.readouterr().err.startswith("isthmus sample: KeyError: 'hidden_size'")


def test_traceback_is_shown_on_request(
    command: Callable[[Run], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISTHMUS_TRACEBACK", "1")
    command(raising(ValueError("broken")))
    assert cli.main(["sample"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_programming_errors_are_neither_wrong_requests_nor_failed_checks(
    command: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(raising(TypeError("a bug")))
    assert cli.main(["sample"]) == 3
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "TypeError: a bug" in err


def test_a_worker_that_died_is_not_a_failed_check(
    command: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(raising(WorkerError("1 of the workers failed\nrank 1: killed by SIGKILL")))
    assert cli.main(["sample"]) == 3
    assert capsys.readouterr().err == ("isthmus sample: 1 of the workers failed\nrank 1: killed by SIGKILL\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tensor_model_parallel_size=2", "use --tp"),
        ("pipeline_model_parallel_layout=Et|tL", "use --pipeline-layout"),
        ("params_dtype=bfloat16", "use --dtype"),
        ("calculate_per_token_loss=false", "the command sets this field itself"),
    ],
)
def test_a_field_that_has_an_option_is_not_set_a_second_way(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=rf"--set {re.escape(text)[:20]}.*: {said}"):
        config_options.fields(argparse.Namespace(fields=[text]))
    fine = argparse.Namespace(fields=["moe_grouped_gemm=false", "delta_net=megatron"])
    assert config_options.fields(fine) == {"moe_grouped_gemm": False, "delta_net": "megatron"}


def test_every_layout_field_has_an_option() -> None:
    assert Layout().config_overrides().keys() <= config_options.OWN.keys()


@pytest.mark.parametrize("argv", [["nonsense"], [], ["families", "--nonsense"], ["sample", "--tp", "two"]])
def test_unknown_commands_and_options_exit_with_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "usage: isthmus" in err


def test_options_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["families", "--js", "-"]) == 2


def test_help_lists_every_command_with_its_first_docstring_line(
    command: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(lambda args: 0)
    assert cli.main(["--help"]) == 0
    assert re.search(r"sample +A sample\n", capsys.readouterr().out)


def reporting(args: argparse.Namespace) -> int:
    console(args).print("experts.[{e}] are [red]not[/red] markup")
    write_json(args, {"answer": 42})
    return 0


def test_json_dash_has_stdout_for_itself(
    command: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(reporting)
    assert cli.main(["sample", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"answer": 42}
    assert err == "experts.[{e}] are [red]not[/red] markup\n"


def test_json_file_leaves_stdout_to_people(
    command: Callable[[Run], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command(reporting)
    assert cli.main(["sample", "--json", str(tmp_path / "report.json")]) == 0
    assert json.loads((tmp_path / "report.json").read_text()) == {"answer": 42}
    assert "not markup" not in capsys.readouterr().err


def test_json_is_standard_whatever_the_numbers(
    command: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"a": [float("nan"), 1.5], "b": {"c": float("inf"), "d": -float("inf")}}
    command(lambda args: write_json(args, found) or 0)
    assert cli.main(["sample", "--json", "-"]) == 0

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    document = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert document == {"a": ["nan", 1.5], "b": {"c": "inf", "d": "-inf"}}


def test_json_that_cannot_be_written_is_refused_before_the_command_runs(
    command: Callable[[Run], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ran = []
    command(lambda args: ran.append(args) or 0)
    assert cli.main(["sample", "--json", str(tmp_path / "absent" / "report.json")]) == 2
    assert cli.main(["sample", "--json", str(tmp_path)]) == 2
    assert not ran
    assert "there is no folder" in capsys.readouterr().err


def test_only_rank_0_reports(
    command: Callable[[Run], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    command(reporting)
    assert cli.main(["sample", "--json", "-"]) == 0
    assert capsys.readouterr() == ("", "")


def test_an_error_under_torchrun_names_its_rank(
    command: Callable[[Run], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(cli, "PATIENCE", 0.0)
    command(raising(ValueError("broken")))
    assert cli.main(["sample"]) == 2
    assert capsys.readouterr().err == "isthmus sample: rank 3: broken\n"


@pytest.mark.parametrize(("rank", "waits"), [("0", []), ("1", [cli.PATIENCE])])
def test_ranks_leave_the_message_to_rank_0_for_a_while(
    command: Callable[[Run], None], monkeypatch: pytest.MonkeyPatch, rank: str, waits: list[float]
) -> None:
    waited: list[float] = []
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("time.sleep", waited.append)
    command(raising(ValueError("broken")))
    assert cli.main(["sample"]) == 2
    assert waited == waits


def test_layout_options_become_a_layout(command: Callable[[Run], None]) -> None:
    seen = []
    command(lambda args: seen.append(layout_options.layout(args)) or 0)
    sizes = {"tp": 2, "pp": 2, "vp": 3, "ep": 4, "etp": 1, "cp": 2, "dp": 2}
    options = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    assert cli.main(["sample", *options, "--no-sp", "--pipeline-layout", "Et|tL"]) == 0
    layout = seen[0]
    assert {name: getattr(layout, name) for name in sizes} == sizes
    assert layout.sequence_parallel is False
    assert layout.pipeline_layout == "Et|tL"


def test_sequence_parallelism_follows_tp_by_default(command: Callable[[Run], None]) -> None:
    seen = []
    command(lambda args: seen.append(layout_options.layout(args).sequence_parallel) or 0)
    assert cli.main(["sample", "--tp", "2"]) == 0
    assert cli.main(["sample"]) == 0
    assert seen == [True, False]


def test_raised_dp_is_said(command: Callable[[Run], None], capsys: pytest.CaptureFixture[str]) -> None:
    command(lambda args: layout_options.layout(args).world_size)
    assert cli.main(["sample", "--tp", "2", "--ep", "4"]) == 4
    assert "dp raised from 1 to 2" in capsys.readouterr().err


def test_size_zero_is_a_wrong_request(
    command: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(lambda args: layout_options.layout(args).world_size)
    assert cli.main(["sample", "--pp", "0"]) == 2
    assert "pp" in capsys.readouterr().err


def test_torchrun_with_another_world_size_is_refused_with_both_numbers(
    command: Callable[[Run], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    command(lambda args: len(workers.run(layout_options.layout(args), print)))
    assert cli.main(["sample", "--tp", "2"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("isthmus sample: tp=2 needs 2 ranks, torchrun started 3. Try: --nproc-per-node 2")


def test_gpus_without_torchrun_get_the_command_to_type(
    command: Callable[[Run], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(sys, "argv", ["isthmus", "sample", "a folder", "--tp", "2"])
    command(lambda args: len(workers.run(layout_options.layout(args), print)))
    assert cli.main(["sample", "--tp", "2"]) == 2
    assert "torchrun --nproc-per-node 2 -m isthmus sample 'a folder' --tp 2\n" in capsys.readouterr().err


def test_torchrun_command_counts_nodes() -> None:
    assert workers.torchrun_command(16, 8, ["verify"]) == (
        "torchrun --nnodes 2 --nproc-per-node 8 -m isthmus verify"
    )


def test_a_line_now_and_then_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    every, line = 0.05, "reading, rank 0 of 4: 2.0 MB of 4.0 MB, 50%"
    monkeypatch.setattr("isthmus.cli.progress.EVERY", every)
    monkeypatch.setattr("isthmus.cli.progress.silent", False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    begin, told = time.monotonic(), ""
    with progress("reading", 4_000_000) as advance:
        advance(1_000_000)
        advance(1_000_000)
        while told.count(line) < 3:
            assert time.monotonic() - begin < 600
            time.sleep(every)
            out, err = capsys.readouterr()
            assert out == ""
            told += err
    first, *lines = (told + capsys.readouterr().err).splitlines()
    assert first == "reading ..."
    assert set(lines[-3:]) == {line}, "what has come meanwhile; lines before may have less"
    assert len(lines) <= (time.monotonic() - begin) / every


@pytest.mark.parametrize("rank", ["0", "1"])
def test_scripts_and_other_ranks_are_told_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    monkeypatch.setattr("isthmus.cli.progress.EVERY", 0.02)
    monkeypatch.setattr("isthmus.cli.progress.silent", rank == "0")
    monkeypatch.setenv("RANK", rank)
    with progress("reading", 100) as advance:
        advance(60)
        time.sleep(0.1)
    announce("reading more")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("options", "err"), [([], "working ...\n"), (["--json", "-"], "")])
def test_stages_are_told_unless_a_script_listens(
    command: Callable[[Run], None], capsys: pytest.CaptureFixture[str], options: list[str], err: str
) -> None:
    def run(args: argparse.Namespace) -> int:
        with Stopwatch({"work": "working"})("work"):
            return 0

    command(run)
    assert cli.main(["sample", *options]) == 0
    assert capsys.readouterr().err == err


def test_a_bar_counts_bytes_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with progress("reading", 3_000_000) as advance:
        advance(3_000_000)
    out, err = capsys.readouterr()
    assert out == ""
    assert "reading, rank 0 of 2" in err
    assert "3.0/3.0 MB" in err


def test_a_broken_family_is_one_line_and_the_others_are_listed(
    entry_points: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = ModuleType("sound_family")
    package.FAMILY = _family("sound", "sound_moe", "sound_dense")
    monkeypatch.setitem(sys.modules, "sound_family", package)
    entry_points(
        ("broken", "no_such_package.family:FAMILY"),
        ("sound_dense", "sound_family:FAMILY"),
        ("sound_moe", "sound_family:FAMILY"),
    )
    assert cli.main(["families", "--json", "-"]) == 1
    out, err = capsys.readouterr()
    broken, sound = json.loads(out)["families"]
    assert broken["name"] == "broken"
    assert "no_such_package" in broken["error"]
    assert sound["model_types"] == ["sound_dense", "sound_moe"]
    assert sound["layout_axes"] == ["tp", "pp"]
    assert sound["error"] is None
    assert "no_such_package" in err


def test_no_family_names_what_to_install(
    entry_points: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    entry_points()
    assert cli.main(["families"]) == 0
    assert "pip install isthmus-" in capsys.readouterr().out


def _family(name: str, *model_types: str) -> registry.Family:
    return registry.Family(
        name=name,
        model_types=model_types,
        model_config=lambda hf, keys: {},
        weights=lambda hf, keys, config: None,
        config_class="nowhere:Nothing",
        axes=frozenset({"tp", "pp"}),
    )


@pytest.mark.parametrize(
    "statement",
    [
        "import isthmus",
        "import isthmus.cli; isthmus.cli.main(['--help'])",
        "import isthmus.cli; isthmus.cli.main(['families'])",
    ],
)
def test_cheap_answers_import_neither_torch_nor_megatron(statement: str) -> None:
    program = (
        "import sys, contextlib, io\n"
        f"with contextlib.redirect_stdout(io.StringIO()):\n    {statement}\n"
        "print(sorted({'torch', 'megatron', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_module_and_script_are_the_same_command() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "isthmus", "--version"], capture_output=True, text=True, check=True
    )
    assert run.stdout == f"isthmus {importlib.metadata.version('isthmus-core')}\n"
