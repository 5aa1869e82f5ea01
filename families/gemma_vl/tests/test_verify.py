"""`isthmus verify` passes for Gemma 3 on each kind of layout, and for nothing that is nearly Gemma 3."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.bridge import AutoBridge
from isthmus.layout import Layout
from isthmus.testing import ranks, reference
from isthmus.testing.batch import random_batch
from isthmus.testing.numerics import rel_rms
from isthmus.testing.tiny import write_tiny
from isthmus.testing.verify import Request, verify
from isthmus_gemma_vl.family import FAMILY

GRADIENTS = Request(grads=True)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny checkpoint by the variant's name."""
    root = tmp_path_factory.mktemp("tiny")

    def folder(variant: str) -> Path:
        if not (root / variant).exists():
            write_tiny(FAMILY, root / variant, variant, seed=1)
        return root / variant

    return folder


def proof(folder: Path, layout: Layout, request: Request) -> dict[str, Any]:
    layout = layout.resolved()
    return ranks.run(layout.world_size, on_rank, folder, layout, request, timeout=120)[0]


def on_rank(folder: Path, layout: Layout, request: Request) -> dict[str, Any]:
    layout.initialize()
    return _verify(AutoBridge.from_hf_pretrained(folder), layout, request)


def _verify(bridge: AutoBridge, layout: Layout, request: Request) -> dict[str, Any]:
    return verify(bridge, layout, request, lambda stage: contextlib.nullcontext())


@pytest.mark.parametrize(
    ("variant", "layout", "packed"),
    [
        ("gqa", Layout(tp=2), False),
        ("odd_vocab", Layout(tp=2), True),  # more ranks than key/value heads
        ("untied", Layout(tp=2, sp=False), False),
        ("with_head", Layout(pp=2), False),
        ("gqa", Layout(pp=2, vp=2), False),
        ("gqa", Layout(cp=2), True),
        ("default", Layout(tp=2, cp=2), False),
    ],
    ids=str,
)
def test_outputs_and_gradients_are_hugging_faces(
    checkpoints: Callable[[str], Path], variant: str, layout: Layout, packed: bool
) -> None:
    document = proof(checkpoints(variant), layout, replace(GRADIENTS, packed=packed))
    assert document["failures"] == []
    assert document["passed"]
    assert document["roundtrip"]["bitwise_equal"]


# What each is in Gemma 3 and not in a model that is nearly one: fields that verify must find changed.
MUTATIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "a window one longer": {"window_size": (9, 0)},
    "a window one shorter": {"window_size": (7, 0)},
    "sliding and full swapped": {"window_attn_skip_freq": [0, 0, 0, 1]},
    "ropes swapped": {"rotary_base": 10_000, "rope_local_base": 1e6},
    "one rope": {"rope_local_base": 1e6},
    "no rope scaling": {"seq_len_interpolation_factor": None},
    "norms around 0": {"layernorm_zero_centered_gamma": False},
    "softmax scale of the head": {"mup_base_head_dim": 32.0},
    "exact GELU": {"activation_func": torch.nn.functional.gelu},
    "padding trained": {"pad": -1},
}


def mutated(folder: Path, layout: Layout) -> dict[str, list[str]]:
    layout.initialize()
    found = {}
    for name, fields in MUTATIONS.items():
        bridge = AutoBridge.from_hf_pretrained(folder)
        bridge.megatron_fields.update(fields)
        found[name] = _verify(bridge, layout, GRADIENTS)["failures"]
    from isthmus_gemma_vl import spec

    spec.embedding_scale = lambda config: 1.0
    found["embeddings not scaled"] = _verify(AutoBridge.from_hf_pretrained(folder), layout, GRADIENTS)[
        "failures"
    ]
    return found


def test_a_model_that_differs_in_one_point_is_found_out(checkpoints: Callable[[str], Path]) -> None:
    found = ranks.run(1, mutated, checkpoints("gqa"), Layout().resolved(), timeout=300)[0]
    assert found.pop("as it is") == []
    assert [name for name, failures in found.items() if not failures] == []


def bfloat16(folder: Path, layout: Layout) -> tuple[float, float]:
    """Relative RMS of our bf16 logits against HF's, and of HF's against its own in fp32."""
    document = on_rank(folder, layout, Request(dtype=torch.bfloat16))
    vocabulary = AutoBridge.from_hf_pretrained(folder).megatron_fields["vocab_size"]
    batch = random_batch(vocabulary, tokens=32, seed=0, ranks=1, microbatches=2, packed=False)
    narrow, wide = (
        reference.run(reference.load(folder, dtype), batch, gradients=False).logits
        for dtype in (torch.bfloat16, torch.float32)
    )
    return document["forward"]["rel_rms"], rel_rms(narrow, wide)


def test_bfloat16_is_no_further_from_hugging_faces_than_that_from_float32(
    checkpoints: Callable[[str], Path],
) -> None:
    ours, rounding = ranks.run(1, bfloat16, checkpoints("gqa"), Layout().resolved(), timeout=120)[0]
    assert 0 < ours <= rounding
