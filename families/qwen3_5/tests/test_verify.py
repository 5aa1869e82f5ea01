"""`isthmus verify` passes for Qwen3.5, dense and with experts, on each kind of layout."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isthmus.layout import Layout
from isthmus.testing import ranks
from isthmus.testing.proof import proof
from isthmus.testing.rounding import INDEPENDENT, bfloat16
from isthmus.testing.verify import Request

GRADIENTS = Request(grads=True)


@pytest.mark.parametrize(
    ("variant", "layout", "overrides"),
    [
        ("default", Layout(), {"delta_net": "megatron"}),
        ("default", Layout(tp=2), {"attention": "hosted"}),
        ("tied", Layout(tp=2, pp=2), {}),
        ("odd_vocab", Layout(cp=2), {}),
        ("no_mtp", Layout(tp=2, cp=2), {}),
        ("moe+fp8_block", Layout(tp=2), {}),  # the in-projections are others than Qwen3-Next's
        ("moe", Layout(pp=2), {"delta_net": "megatron"}),
        ("moe_fused_experts", Layout(ep=2), {}),
        ("moe", Layout(tp=2, etp=2), {"moe_grouped_gemm": False}),
    ],
    ids=str,
)
def test_outputs_and_gradients_are_hugging_faces(
    checkpoints: Callable[[str], Path],
    variant: str,
    layout: Layout,
    overrides: dict[str, Any],
) -> None:
    document = proof(checkpoints(variant), layout, replace(GRADIENTS, overrides=overrides))
    assert document["failures"] == []
    assert document["passed"]
    assert document["roundtrip"]["bitwise_equal"]
    assert (document["forward"]["mtp"] is None) == (variant == "no_mtp")


def test_packed_sequences_are_those_run_one_by_one(checkpoints: Callable[[str], Path]) -> None:
    document = proof(checkpoints("moe"), Layout(tp=2), replace(GRADIENTS, packed=True))
    assert document["failures"] == []


def test_bfloat16_is_no_further_from_float32_than_hugging_faces(
    checkpoints: Callable[[str], Path],
) -> None:
    folders = [checkpoints(variant) for variant in ("default", "vision")]
    for found in ranks.run(1, bfloat16, folders, Layout().resolved())[0]:
        hugging_faces = max(found["HF against fp32"], found["eager against fp32"])
        assert found["ours against fp32"] <= hugging_faces
        assert found["ours against HF"] <= INDEPENDENT * hugging_faces
