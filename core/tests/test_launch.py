"""Starting local workers: results by rank, failures by rank, user errors as themselves, nothing on stdout."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for the workers too: they inherit sys.path

import launch_cases  # noqa: E402

from isthmus import launch  # noqa: E402
from isthmus.launch import WorkerError  # noqa: E402


def test_results_come_by_rank_from_a_process_group():
    results = launch.run(3, launch_cases.total, 1, 2, scale=10)
    assert [int(r) for r in results] == [93] * 3


def test_a_function_is_found_by_name():
    assert [int(r) for r in launch.run(1, "launch_cases:total", 4)] == [4]


def rank_here() -> str:
    """At the top of this module, whose name a worker cannot import."""
    return os.environ["RANK"]


def test_a_function_of_a_test_module_is_found_by_its_file():
    assert launch.run(2, rank_here) == ["0", "1"]


def test_workers_are_fresh_single_threaded_and_have_the_environment_of_now(monkeypatch):
    monkeypatch.setenv("ISTHMUS_TEST", "first")
    first = launch.run(2, launch_cases.settings)
    monkeypatch.setenv("ISTHMUS_TEST", "second")
    second = launch.run(1, launch_cases.settings)
    assert [r["ISTHMUS_TEST"] for r in first + second] == ["first", "first", "second"]
    assert [r["RANK"] for r in first] == ["0", "1"]
    assert all(r["threads"] == 1 and r["OMP_NUM_THREADS"] == "1" and r["backend"] == "gloo" for r in first)
    assert len({r["pid"] for r in first + second}) == 3


def test_the_failing_rank_is_named_with_its_traceback_and_the_rest_is_ended():
    with pytest.raises(WorkerError, match="rank 1 first") as caught:
        launch.run(2, launch_cases.fails_on_rank_1)
    lines = str(caught.value).splitlines()
    assert lines[-1] == "rank 1: RuntimeError: the oil is out"
    assert all(line.startswith("rank 1: ") for line in lines[1:])
    assert "in fails_on_rank_1" in str(caught.value)
    assert "worker.py" not in str(caught.value)
    assert list(caught.value.tracebacks) == [1], "rank 0, which waits for rank 1, was ended"


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (launch_cases.refuses, ValueError, "cannot divide 2 heads over 3 ranks"),
        (launch_cases.refuses_name, LookupError, "no such layer"),
    ],
)
def test_an_error_for_the_user_keeps_its_type_and_message(function, kind, message):
    with pytest.raises(kind) as caught:
        launch.run(2, function)
    assert type(caught.value) is kind
    assert str(caught.value) == message
    assert isinstance(caught.value.__cause__, WorkerError)
    assert re.search("rank [01]: Traceback", str(caught.value.__cause__))


def test_a_missing_key_is_a_bug_and_no_error_for_the_user():
    with pytest.raises(WorkerError, match="KeyError: 'missing'"):
        launch.run(1, launch_cases.has_a_bug)


def test_a_worker_that_dies_is_named():
    with pytest.raises(WorkerError, match="rank 1: the process exited with code 7 without an answer"):
        launch.run(2, launch_cases.dies_on_rank_1)


def test_time_running_out_says_which_rank_hangs_and_where():
    for seconds in (4, 20, 100):  # the first in which rank 0 is done, however slow the machine
        with pytest.raises(
            WorkerError, match=rf"not finished after {seconds} s: ranks [01, ]+ of 2\n"
        ) as caught:
            launch.run(2, launch_cases.sleeps_on_rank_1, timeout=seconds)
        if "ranks 1 of 2" in str(caught.value):
            break
    assert list(caught.value.tracebacks) == [1]
    assert "rank 1:   File" in str(caught.value)
    assert "in sleeps_on_rank_1" in str(caught.value)


def test_a_result_that_cannot_be_sent_is_an_error_with_a_reason():
    with pytest.raises(WorkerError, match="pickle"):
        launch.run(1, launch_cases.cannot_be_sent)


def test_functions_that_a_fresh_process_cannot_find_are_refused():
    with pytest.raises(ValueError, match="pass a function from the top of its module"):
        launch.run(1, lambda: None)
    with pytest.raises(ValueError, match="write 'module:name'"):
        launch.run(1, "launch_cases.total")
    with pytest.raises(LookupError, match="module 'launch_cases' has no 'absent'"):
        launch.run(1, "launch_cases:absent")
    with pytest.raises(ValueError, match="cannot start 0 workers"):
        launch.run(0, launch_cases.total)


def run_script(folder: Path, text: str) -> subprocess.CompletedProcess:
    script = folder / "script.py"
    script.write_text(text)
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)


def test_a_script_without_a_main_guard_keeps_its_stdout_and_its_modules_to_itself(tmp_path):
    run = run_script(
        tmp_path,
        """
import sys
from isthmus import launch

launch.run(1, "launch_cases:chatters")
launch.run(1, "launch_cases:chatters", quiet=False)
launch.run(1, "launch_cases:total", 1)  # a tensor
print("done", *(m for m in sys.modules if m.startswith("megatron")))
""",
    )
    assert run.stdout == "done\n", run.stderr
    for text in ("number of parameters", "written to the descriptor", "UserWarning: a worker's"):
        assert run.stderr.count(text) == 1, "once, from the run that is not quiet"
    assert run.stderr.count("an error message") == 2


def test_a_script_can_run_functions_of_its_own(tmp_path):
    run = run_script(
        tmp_path,
        """
import os
from isthmus import launch

def square():
    return int(os.environ["RANK"]) ** 2

if __name__ == "__main__":
    print(launch.run(3, square))
""",
    )
    assert run.stdout == "[0, 1, 4]\n", run.stderr
