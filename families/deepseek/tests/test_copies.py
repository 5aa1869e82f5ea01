"""What is whole on every tensor-parallel rank stays the same on all of them while a model trains (KF 69).

Latents, norms, routers, V3.2's indexer: each rank computes a gradient of its own heads or tokens, and only
their sum is the parameter's. test_verify.py compares that sum with Hugging Face's gradient.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus import launch
from isthmus.layout import Layout
from isthmus.testing.ranks import cpu_only
from isthmus.testing.trainer import Trainer

pytestmark = cpu_only
STEPS = 5


def copies_after(hf: Path, partial: str, fields: dict[str, Any]) -> dict[str, tuple[Tensor, bool]]:
    """This rank's values of what is not divided, and whether they moved; `partial` is not reduced."""
    trainer = Trainer.build(hf, Layout(tp=2), **fields)
    parameters = {
        name: parameter
        for name, parameter in trainer.chunks[0].named_parameters()
        if not getattr(parameter, "tensor_model_parallel", False) and ".experts." not in name
    }
    for name, parameter in parameters.items():
        if partial and partial in name:
            parameter.sequence_parallel = False  # type: ignore
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for seed in range(STEPS):
        trainer.step(seed)
    return {
        name: (parameter.detach().clone(), not torch.equal(parameter, before[name]))
        for name, parameter in parameters.items()
    }


SPARSE = {"attention": "megatron", "dsa_indexer_loss_coeff": 0.5}


@pytest.mark.parametrize(
    ("name", "fields", "shared"),
    [
        ("v2", {}, ("q_down_proj", "kv_down_proj", "up_proj.layer_norm_weight", "router")),
        ("default", {}, ("q_down_proj", "kv_down_proj", "enorm", "router")),
        ("default", {"attention": "hosted"}, ("q_a_proj", "kv_a_proj", "q_a_layernorm", "kv_a_layernorm")),
        ("v32", SPARSE, ("indexer.linear_wk", "indexer.linear_wq_b", "indexer.k_norm")),
    ],
    ids=["v2", "v3", "v3-hosted", "v32"],
)
def test_copies_stay_equal(
    checkpoints: Callable[[str], Path], name: str, fields: dict[str, Any], shared: tuple[str, ...]
) -> None:
    first, second = launch.run(2, copies_after, checkpoints(name), "", fields)
    for part in shared:
        assert any(part in parameter for parameter in first), part
    for parameter, (value, moved) in first.items():
        assert moved, parameter
        assert torch.equal(value, second[parameter][0]), parameter


def test_a_gradient_that_is_not_reduced_is_seen(checkpoints: Callable[[str], Path]) -> None:
    first, second = launch.run(2, copies_after, checkpoints("v2"), "input_layernorm", {})
    drifted = {name for name, (value, _) in first.items() if not torch.equal(value, second[name][0])}
    assert {name for name in first if "input_layernorm" in name} <= drifted
