"""The parts of `isthmus verify` that need no model: measures, tokens, options, the page."""

import argparse
import math
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
import torch

from isthmus.cli import config_options
from isthmus.cli.verify import merged, rows
from isthmus.layout import Layout
from isthmus.testing import comparison, gradients
from isthmus.testing.batch import random_batch
from isthmus.testing.numerics import (
    FLOAT32,
    Difference,
    argmax_agreement,
    difference,
    kl,
    rel_rms,
    rounded_bounds,
    within,
)
from isthmus.testing.reference import Outputs
from isthmus.testing.report import page
from isthmus.testing.training_step import Recorded
from isthmus.testing.verify import Request


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Measures.


@pytest.mark.parametrize(("found", "worst"), [(-3e-9, "small"), (1e-3, "bias")], ids=["rounding", "not"])
def test_a_gradient_that_rounding_alone_makes_is_not_measured_against_itself(
    found: float, worst: str
) -> None:
    expected = {"big": torch.ones(9), "small": torch.full((3,), 1e-4), "bias": torch.full((3,), 2e-9)}
    megatrons = expected | {"small": torch.full((3,), 1.1e-4), "bias": torch.full((3,), found)}
    differences = {name: difference(megatrons[name], expected[name]) for name in expected}
    section = gradients._section(differences, expected, 3.0)
    assert section["worst"] == worst  # which has a tenth of itself to explain
    assert section["zero"] == ([] if worst == "bias" else ["bias"])


def test_rel_rms_is_the_ratio_of_root_mean_squares() -> None:
    found, expected = numbers(7, 5, seed=1), numbers(7, 5, seed=2)
    a, b = found.double().numpy(), expected.double().numpy()
    reference = np.sqrt(np.mean((a - b) ** 2)) / np.sqrt(np.mean(b**2))
    assert rel_rms(found, expected) == pytest.approx(reference, rel=1e-6)
    assert difference(found, expected).max_abs == pytest.approx(np.abs(a - b).max(), rel=1e-6)


def test_pieces_add_up_to_the_whole() -> None:
    found, expected = numbers(12, 3, seed=1), numbers(12, 3, seed=2)
    whole, pieces, joined = difference(found, expected), Difference(), Difference()
    for mine, theirs in zip(found.split(5), expected.split(5), strict=True):
        pieces.add(mine, theirs)
        joined.join(difference(mine, theirs))
    assert pieces.rel_rms == pytest.approx(whole.rel_rms, rel=1e-12)
    assert joined.rel_rms == pytest.approx(whole.rel_rms, rel=1e-12)
    assert pieces.max_abs == joined.max_abs == whole.max_abs


@pytest.mark.parametrize("shape", [(4, 1), (1, 3), (3, 4), (4,)])
def test_other_shapes_are_an_error_and_never_broadcast(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"cannot compare shape .* with \(4, 3\)"):
        rel_rms(torch.zeros(shape), torch.zeros(4, 3))


@pytest.mark.parametrize("where", [0, 1])
def test_a_nan_is_never_within_a_bound(where: int) -> None:
    found = numbers(2, 3)
    result = Difference()
    for row in range(2):
        piece = found[row].clone()
        if row == where:
            piece[1] = math.nan
        result.add(piece, found[row])
    assert math.isnan(result.max_abs)
    assert not within(result.rel_rms, 1e9)


def test_something_where_there_should_be_nothing_is_infinitely_off() -> None:
    assert rel_rms(torch.ones(3), torch.zeros(3)) == math.inf
    assert rel_rms(torch.zeros(3), torch.zeros(3)) == 0.0


def test_kl_is_the_expectation_under_the_reference() -> None:
    found, expected = numbers(130, 11, seed=1), numbers(130, 11, seed=2)
    p = np.exp(expected.double().numpy())
    q = np.exp(found.double().numpy())
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    assert kl(found, expected) == pytest.approx((p * np.log(p / q)).sum(1).mean(), rel=1e-9)
    assert kl(expected, expected) == 0.0


def test_argmax_agreement_is_a_share_of_the_tokens() -> None:
    expected = torch.eye(4)
    found = expected.clone()
    found[3] = found[2]
    assert argmax_agreement(found, expected) == 0.75


def test_the_contracts_bounds_in_float32() -> None:
    assert (FLOAT32.forward, FLOAT32.gradients, FLOAT32.worst_gradient) == (1e-5, 1e-5, 1e-3)


def test_bounds_of_a_rounding_dtype_follow_what_it_does_to_the_reference() -> None:
    bounds = rounded_bounds(0.01, 0.02, 0.1)
    assert bounds.forward == pytest.approx(0.02, abs=0.003)
    assert bounds.gradients == pytest.approx(0.04, abs=0.003)
    assert bounds.worst_gradient == pytest.approx(0.2, abs=0.003)


# Tokens.


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 2), (3, 4)])
def test_ranks_share_the_sequences_out(packed: bool, ranks: int, microbatches: int) -> None:
    batch = random_batch(100, tokens=16, seed=3, ranks=ranks, microbatches=microbatches, packed=packed)
    shares = [batch.microbatches(rank, ranks) for rank in range(ranks)]
    assert all(len(share) == microbatches for share in shares)
    flat = [sequence for share in shares for microbatch in share for sequence in microbatch]
    assert all(a is b for a, b in zip(flat, batch.sequences, strict=True))
    rows = {sum(len(s) - 1 for s in mb) if packed else len(mb[0]) - 1 for share in shares for mb in share}
    assert rows == {batch.row} == {32 if packed else 16}
    assert batch.tokens == sum(len(sequence) - 1 for sequence in flat)


def test_packed_sequences_have_lengths_of_their_own() -> None:
    batch = random_batch(100, tokens=32, seed=0, ranks=1, microbatches=1, packed=True)
    lengths = [len(sequence) - 1 for sequence in batch.sequences]
    assert len(set(lengths)) == 3
    assert sum(lengths) == 64


def test_tokens_depend_on_the_seed_alone() -> None:
    def batch(seed: int) -> list[int]:
        made = random_batch(50, tokens=8, seed=seed, ranks=1, microbatches=2, packed=False)
        return torch.cat(made.sequences).tolist()

    assert batch(1) == batch(1)
    assert batch(1) != batch(2)


@pytest.mark.parametrize(
    ("request_", "layout", "message"),
    [
        (Request(tokens=33), Layout(tp=2), "cannot divide rows of 33 tokens over tp=2"),
        (Request(tokens=1), Layout(), "use at least 2"),
        (Request(packed=True, tokens=33), Layout(tp=4), "rows of 66 tokens over tp=4"),
        (Request(tokens=34), Layout(cp=2), "cannot divide rows of 34 tokens over tp=1 and cp=2"),
        (Request(tokens=1026), Layout(), "1026 tokens: config.json has max_position_embeddings=1024"),
        (Request(tokens=36), Layout(tp=4, cp=2), "use a multiple of 8 for tokens"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(request_: Request, layout: Layout, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        request_.check(layout, positions=1024)


# Options.


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("f=true", True),
        ("f=False", False),
        ("f=none", None),
        ("f=3", 3),
        ("f=1e-5", 1e-5),
        ("f=megatron", "megatron"),
        ("f=[1, 0]", [1, 0]),
        ("f=a=b", "a=b"),
    ],
)
def test_fields_are_read_as_python_writes_them(text: str, value: Any) -> None:
    assert config_options.fields(argparse.Namespace(fields=[text])) == {"f": value}


@pytest.mark.parametrize("text", ["f", "=1", "a b=1"])
def test_what_is_not_a_field_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected FIELD=VALUE"):
        config_options.fields(argparse.Namespace(fields=[text]))


# The verdict.


@pytest.mark.parametrize("absent", ["Megatron", "Hugging Face"])
def test_a_prediction_block_on_one_side_alone_fails(absent: str) -> None:
    batch = random_batch(9, tokens=4, seed=0, ranks=1, microbatches=1, packed=False)
    logits = numbers(batch.tokens, 9)
    found = Recorded(layers={0: logits}, logits=logits, mtp_logits=logits, loss=1.0)
    outputs = Outputs(logits=logits, layers=[logits], mtp_logits=logits, loss=1.0, mtp_loss=1.0)
    (found if absent == "Megatron" else outputs).mtp_logits = None
    section = comparison.forward(found, outputs, batch, FLOAT32)
    assert comparison.failures(FLOAT32, section, None) == [f"no logits of the prediction block from {absent}"]
    assert page(document(forward=section, passed=False))


# What people read.


def document(**changes: Any) -> dict[str, Any]:
    """A document with every section."""
    logits = {"rel_rms": 4e-7, "max_abs": 1e-6, "kl": 1e-13, "argmax_agreement": 1.0}
    layers = [{"layer": number, "rel_rms": 1e-7 * (number + 1)} for number in range(3)]
    names = ["a.0.weight", "a.1.weight"]
    result = {
        "model_type": "toy",
        "checkpoint": "a <folder> & more",
        "layout": Layout(tp=2, pp=2).as_dict(),
        "dtype": "float32",
        "request": {"tokens": 32, "seed": 0, "packed": False, "overrides": {"delta_net": "megatron"}},
        "passed": True,
        "failures": [],
        "coverage": {
            "hf_tensors": 9,
            "megatron_params": 6,
            "loaded": 7,
            "passed_through": ["mtp.fc.weight"],
            "dropped": {"rotary.inv_freq": "recomputed from the config"},
            "missing_hf": [],
            "wrong_shapes": {},
            "unmapped_hf": [],
            "unmapped_megatron": [],
            "unheld_megatron": [],
        },
        "roundtrip": {"tensors": 7, "bitwise_equal": True, "mismatched": []},
        "dtypes": {"fp32_params": names, "rounded": []},
        "forward": {
            **logits,
            "layers": layers,
            "first_diverging_layer": None,
            "mtp": logits,
            "tokens": 128,
            "loss": 5.0,
            "hf_loss": 5.0,
        },
        "gradients": {
            "rel_rms": 1e-6,
            "rel_rms_max": 2e-5,
            "worst": "a.0.weight",
            "params": 2,
            "missing": [],
            "grad_norm": 4.0,
            "hf_grad_norm": 4.0,
            "grad_norm_rel_err": 1e-8,
            "worst_params": [{"name": name, "rel_rms": 2e-5, "hf_rms": 1e-3} for name in names],
        },
        "bounds": FLOAT32.as_dict(),
        "peak_rss_mb_per_rank": [100.0] * 4,
        "seconds": {"build": 0.1, "load": 0.2},
        "versions": {"isthmus-core": "0.1"},
    }
    return result | changes


class Tags(HTMLParser):
    """Tags that are opened and not closed, and all text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(html: str) -> Tags:
    tags = Tags()
    tags.feed(html)
    assert tags.open == []
    return tags


def test_the_page_is_whole_and_fetches_nothing() -> None:
    html = page(document())
    text = parsed(html).text
    assert not re.search(r"https?:|//|<script|<link|@import|url\(", html)
    for expected in (
        "PASSED",
        "a <folder> & more",
        "7 / 7",
        "7 / 9",
        "after layer 2, the worst",
        "a.{0..1}.weight",
        "delta_net",
        "What the numbers mean",
    ):
        assert expected in text
    assert "recomputed from the config" in text


def test_the_page_marks_what_exceeds_its_bound() -> None:
    forward = document()["forward"]
    forward["layers"][1]["rel_rms"] = 0.3
    html = page(
        document(passed=False, failures=["layer <1> is off"], forward=forward | {"first_diverging_layer": 1})
    )
    text = parsed(html).text
    assert "FAILED" in text
    assert "layer <1> is off" in text
    assert "The first layer above the bound is layer 1." in text
    assert html.count('class="dot over"') == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_the_page_can_be_drawn_with_any_number(value: float) -> None:
    forward = document()["forward"] | {"rel_rms": value}
    forward["layers"][2]["rel_rms"] = value
    section = document()["gradients"] | {"rel_rms": value, "grad_norm_rel_err": value}
    section["worst_params"][0]["rel_rms"] = value
    parsed(page(document(forward=forward, gradients=section)))


def test_the_page_of_a_run_that_stopped_early() -> None:
    unreached = dict.fromkeys(("roundtrip", "dtypes", "forward", "gradients", "bounds"))
    coverage = document()["coverage"] | {"unmapped_hf": ["x.0.weight", "x.1.weight"]}
    text = parsed(page(document(passed=False, failures=["no rule"], coverage=coverage, **unreached))).text
    assert "x.{0..1}.weight" in text
    assert "Error from layer to layer" not in text


def test_a_tensor_of_another_shape_is_in_the_page_and_in_the_table() -> None:
    what = "is (4, 4), the config makes it (8, 4)"
    broken = document(passed=False, failures=[what], **dict.fromkeys(("roundtrip", "forward", "gradients")))
    broken["coverage"] |= {"loaded": 6, "wrong_shapes": {"a.weight": what}}
    text = parsed(page(broken)).text
    assert f"a.weight{what}" in text
    assert "6 / 9" in text
    assert rows(broken)[0][1].startswith("6 of 9 tensors have their place, 2 not loaded on purpose")


def test_every_section_has_a_line_and_absent_ones_have_none() -> None:
    assert [row[0] for row in rows(document())] == [
        "coverage",
        "round trip",
        "dtypes",
        "logits",
        "hidden states",
        "prediction block (MTP)",
        "gradients",
        "worst gradient",
        "gradient norm",
    ]
    assert [row[0] for row in rows(document(dtypes=None, forward=None, gradients=None))] == [
        "coverage",
        "round trip",
    ]


def test_the_first_ranks_document_gets_every_ranks_memory_and_the_slowest_seconds() -> None:
    ranks = [
        {"document": {"passed": True}, "peak_rss_mb": 1.0, "seconds": {"build": 1.0, "reference": 3.0}},
        {"document": {"passed": False}, "peak_rss_mb": 2.0, "seconds": {"build": 2.0}},
    ]
    assert merged(ranks) == {
        "passed": True,
        "peak_rss_mb_per_rank": [1.0, 2.0],
        "seconds": {"build": 2.0, "reference": 3.0},
    }
