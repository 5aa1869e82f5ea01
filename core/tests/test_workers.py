"""Commands on several ranks: results by rank, errors as the user's, unfit layouts refused at once."""

import argparse
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from isthmus import launch
from isthmus.checkpoint.compare import Comparison
from isthmus.checkpoint.load import LoadReport
from isthmus.cli import model, roundtrip, workers
from isthmus.layout import Layout

# Evaluated by workers, which can import no test module: a rank's place in Megatron's groups.
PLACE = (
    "(lambda state: (state.get_tensor_model_parallel_rank(), state.get_pipeline_model_parallel_rank()))"
    "(__import__('megatron.core.parallel_state', fromlist=['core']))"
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_a_function_runs_on_every_rank_inside_the_layouts_groups() -> None:
    assert workers.run(Layout(tp=2, pp=2), eval, PLACE) == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_one_rank_is_a_worker_too() -> None:
    assert workers.run(Layout(), os.getpid) != [os.getpid()]


def test_an_error_of_a_rank_is_the_commands_error() -> None:
    with pytest.raises(ValueError, match="invalid literal for int"):
        workers.run(Layout(tp=2), int, "two")


def test_more_processes_than_the_machine_bears_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "run", lambda world_size, *args, **options: world_size)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.delenv(workers.LIMIT, raising=False)
    assert workers.run(Layout(tp=16), eval, "0") == 16
    with pytest.raises(ValueError, match=r"needs 64 processes, more than 16 .*torchrun.*MAX_WORKERS=64"):
        workers.run(Layout(tp=64), eval, "0")
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert workers.run(Layout(tp=64), eval, "0") == 64
    monkeypatch.setenv(workers.LIMIT, "4")
    with pytest.raises(ValueError, match="more than 4 on this machine"):
        workers.run(Layout(tp=8), eval, "0")
    monkeypatch.setenv(workers.LIMIT, "many")
    with pytest.raises(ValueError, match="ISTHMUS_MAX_WORKERS='many'"):
        workers.run(Layout(), eval, "0")


def test_dp_is_raised_to_the_least_that_holds_the_experts() -> None:
    for tp, cp, dp, ep, etp in itertools.product((1, 2, 3), (1, 2), (1, 2, 3, 5), (1, 4, 6), (1, 2, 3)):
        least = next(n for n in itertools.count(dp) if tp * cp * n % (ep * etp) == 0)
        assert Layout(tp=tp, cp=cp, dp=dp, ep=ep, etp=etp).resolved().dp == least
    assert Layout(ep=10**12 + 39).resolved().dp == 10**12 + 39, "at once"


def test_torchruns_ranks_get_all_results_and_are_quiet(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, warnings\n"
        "from isthmus.cli import workers\n"
        "from isthmus.layout import Layout\n"
        "def rank():\n"
        "    print('printed')\n"
        "    warnings.warn('warned')\n"
        "    return int(os.environ['RANK'])\n"
        "if __name__ == '__main__':\n"
        "    results = workers.run(Layout(tp=2), rank)\n"
        "    os.write(1, f'{results}\\n'.encode())\n"  # whole lines, whichever rank is first
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(program),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    assert done.stdout == "[0, 1]\n[0, 1]\n"
    assert "Warning" not in done.stderr


def bridge(**fields: object) -> SimpleNamespace:
    family = SimpleNamespace(
        hosted=None,
        axes=frozenset({"tp", "sp", "pp"}),
        problems=lambda layout, fields: [f"{layout.tp} is odd"] if layout.tp % 2 and layout.tp > 1 else [],
    )
    return SimpleNamespace(
        family=family, choices={}, megatron_fields={"num_layers": 4, "num_attention_heads": 4, **fields}
    )


def test_a_layout_that_fits_passes() -> None:
    model.check(bridge(), Layout(tp=2, pp=2))


def test_all_reasons_against_a_layout_come_at_once() -> None:
    with pytest.raises(ValueError, match="does not fit") as caught:
        model.check(bridge(), Layout(tp=3, cp=2, pp=3))
    message = str(caught.value)
    assert "does not support cp=2 (it supports: tp sp pp)" in message
    assert "3 is odd" in message
    assert "cannot divide 4 attention heads over tensor_model_parallel_size=3" in message
    assert "cannot divide 4 layers" in message


def test_an_uneven_split_by_megatrons_own_fields_fits() -> None:
    with pytest.raises(ValueError, match="cannot divide 4 layers"):
        model.check(bridge(), Layout(pp=3))
    model.check(bridge(), Layout(pp=3), {"num_layers_in_first_pipeline_stage": 2})


def rank_result(**outcome: object) -> dict:
    return {
        "model_type": "sample",
        "source_tensors": 5,
        "report": LoadReport(
            hf_tensors=3, passed_through={"vision": "not trained"}, dropped={"freq": "recomputed"}
        ),
        "outcome": Comparison(**outcome),
        "peak_rss_mb": 100.0,
        "seconds": {"load": float(outcome["equal"])},
    }


@pytest.mark.parametrize(
    ("second", "mismatches"),
    [
        ({"equal": 2}, {}),
        ({"equal": 1, "differing": {"a": "bits"}}, {"a": "bits"}),
        ({"equal": 1, "missing": ["b"]}, {"b": "missing"}),
    ],
    ids=["equal", "bits", "missing"],
)
def test_a_round_trip_passes_only_where_every_rank_found_equality(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], second: dict, mismatches: dict
) -> None:
    ranks = [rank_result(equal=2, missing=["freq"]), rank_result(**second)]
    monkeypatch.setattr(workers, "run", lambda *args: ranks)
    monkeypatch.setattr(model, "check", lambda *args: None)
    monkeypatch.setattr(
        "isthmus.bridge.AutoBridge.from_hf_pretrained", lambda path: SimpleNamespace(folder=Path("in"))
    )
    documents = []
    monkeypatch.setattr(roundtrip.output, "write_json", lambda args, document: documents.append(document))
    sizes = dict.fromkeys(("tp", "pp", "vp", "ep", "etp", "cp", "dp"), 1)
    args = argparse.Namespace(
        command="roundtrip", hf_dir="in", out_dir="out", overwrite=False, json=None, sp=None,
        pipeline_layout=None, **sizes,
    )  # fmt: skip
    assert roundtrip.run(args) == (1 if mismatches else 0)
    (document,) = documents
    assert document["passed"] is not bool(mismatches)
    assert document["mismatches"] == mismatches
    assert document["roundtrip"]["bitwise_equal"] is not bool(mismatches)
    assert document["roundtrip"]["mismatched"] == sorted(mismatches)
    assert document["seconds"] == {"load": 2.0}
    assert f"{2 + second['equal']} of 4 tensors" in capsys.readouterr().out
