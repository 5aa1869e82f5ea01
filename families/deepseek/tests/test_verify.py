"""`isthmus verify` passes for DeepSeek on the supported layouts, and fails where a model is built otherwise.

A mistake is made in fresh workers before the engine runs. They are symmetric or in the model: the round trip
comes out right.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.bridge import AutoBridge
from isthmus.layout import Layout
from isthmus.names import live_tensors
from isthmus.testing import ranks
from isthmus.testing.proof import prove
from isthmus.testing.verify import Request
from isthmus_deepseek.family import FAMILY

GRADIENTS = Request(grads=True)


def proof(folder: Path, layout: Layout, request: Request, mistake: str = "none") -> dict[str, Any]:
    """The engine's document from workers in which `mistake` is made."""
    layout = layout.resolved()
    return ranks.run(layout.world_size, on_rank, folder, layout, request, mistake)[0]


def on_rank(folder: Path, layout: Layout, request: Request, mistake: str) -> dict[str, Any]:
    return prove(folder, layout, request, MISTAKES[mistake])


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (Layout(tp=2), "v2"),
        (Layout(pp=2), "lite"),
        (Layout(cp=2), "v2"),
        (Layout(), "lite_plain_rope"),
        (Layout(ep=2), "no_groups"),
        (Layout(pp=2), "default"),
        (Layout(tp=2, ep=2), "fused_experts"),
        (Layout(tp=2, etp=2), "odd_vocab"),
        (Layout(tp=2, cp=2), "default"),
        (Layout(pp=2, vp=2), "no_mtp"),
        (Layout(pp=3, pipeline_layout="Et|tt|tmL"), "default"),
        (Layout(), "mscales"),
        (Layout(), "plain_rope"),
        (Layout(ep=2), "three_of_groups"),
        (Layout(tp=2), "moonlight"),
        (Layout(tp=2, ep=2), "v32"),
        (Layout(tp=2, etp=2, pp=2), "v32"),
    ],
    ids=str,
)
def test_outputs_and_gradients_are_hugging_faces_on_every_layout(
    checkpoints: Callable[[str], Path], layout: Layout, name: str
) -> None:
    request = replace(GRADIENTS, overrides={"attention": "megatron"})
    document = proof(checkpoints(name), layout, request)
    assert document["failures"] == []
    assert document["passed"]
    assert document["forward"]["argmax_agreement"] == 1.0
    variant = FAMILY.variant(name)
    predicts = variant.mtp and variant.config["model_type"] == "deepseek_v3"
    assert (document["forward"]["mtp"] is not None) == predicts


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(cp=2)], ids=str)
def test_packed_sequences_are_those_run_one_by_one(
    checkpoints: Callable[[str], Path], layout: Layout
) -> None:
    document = proof(checkpoints("default"), layout, replace(GRADIENTS, packed=True))
    assert document["failures"] == []


@pytest.mark.parametrize(
    ("layout", "name", "packed", "overrides"),
    [
        (Layout(), "v2", False, {}),
        (Layout(tp=2), "lite", False, {}),
        (Layout(tp=2, cp=2), "mscales", True, {}),
        (Layout(cp=2), "no_mtp", False, {"cp_layout": "contiguous"}),
        (Layout(tp=2), "moonlight", False, {"hosted_mode": "replicated"}),
        (Layout(tp=2, ep=2), "v32", False, {}),
        (Layout(tp=2, etp=2), "v32", False, {}),
        (Layout(pp=2, vp=2), "v32", False, {}),
        (Layout(cp=2), "v32", True, {}),
    ],
    ids=str,
)
def test_hugging_faces_own_attention_is_hosted(
    checkpoints: Callable[[str], Path], layout: Layout, name: str, packed: bool, overrides: dict[str, Any]
) -> None:
    overrides = {"attention": "hosted", **overrides}
    document = proof(checkpoints(name), layout, replace(GRADIENTS, packed=packed, overrides=overrides))
    assert document["failures"] == []
    assert document["passed"]


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"sequence_parallel": False}, "sequence_parallel"),
        ({"transformer_impl": "local"}, "transformer_impl"),
    ],
)
def test_what_loses_gradients_is_refused(
    checkpoints: Callable[[str], Path], fields: dict[str, Any], match: str
) -> None:
    ranks.run(2, refused_on_rank, checkpoints("lite"), fields, match)


def refused_on_rank(folder: Path, fields: dict[str, Any], match: str) -> None:
    layout = Layout(tp=2)
    layout.initialize()
    bridge = AutoBridge.from_hf_pretrained(folder)
    with pytest.raises(ValueError, match=match):
        bridge.build_model(bridge.get_model_config(**{**layout.config_overrides(), **fields}))


def test_the_bias_of_the_router_keeps_its_bits(checkpoints: Callable[[str], Path]) -> None:
    ranks.run(2, bias_on_rank, checkpoints("default"))


def bias_on_rank(folder: Path) -> None:
    layout = Layout(ep=2, dp=2)
    layout.initialize()
    bridge = AutoBridge.from_hf_pretrained(folder)
    model = bridge.build_model(bridge.get_model_config(**layout.config_overrides()))
    bridge.load_hf_weights(model)
    held = [live for live in live_tensors(model) if live.canonical.endswith("expert_bias")]
    assert len(held) == 4, "three layers and the prediction layer"
    for live in held:
        (source,) = bridge.weight_map(model[0].module.isthmus_model_config).megatron[live.canonical].hf
        stored = bridge.reader.slice(source.name)
        assert stored.dtype == live.tensor.dtype == torch.float32
        assert torch.equal(stored, live.tensor.cpu())
        assert not torch.equal(stored, stored.bfloat16().float()), "bfloat16 would do"


# Mistakes


def _megatron_groups(bridge: AutoBridge) -> None:
    """Groups by the sum of their best two, as Megatron's router has it for V2."""
    from isthmus_deepseek import spec

    spec.differs = lambda config: False


def _norm_before_q_proj(bridge: AutoBridge) -> None:
    """Megatron's own attention, which without a latent of queries puts a norm before q_proj."""
    from isthmus_deepseek import spec

    spec._attention = lambda config: None


def _set(**fields: Any) -> Callable[[AutoBridge], None]:
    """Other fields of the model config than the checkpoint's."""

    def mistake(bridge: AutoBridge) -> None:
        bridge.megatron_fields = bridge.megatron_fields | fields

    return mistake


MISTAKES: dict[str, Callable[[AutoBridge], None]] = {
    "none": lambda bridge: None,
    "groups": _megatron_groups,
    "norm": _norm_before_q_proj,
    "mscale": _set(mscale=1.0),
    "mscale_all_dim": _set(mscale_all_dim=0.0, mscale=0.0),
    "scaling": _set(moe_router_topk_scaling_factor=1.0),
    "groups_off": _set(moe_router_group_topk=None, moe_router_num_groups=None),
    "epsilon": _set(layernorm_epsilon=1e-3),
    "indexer": _set(dsa_indexer_topk=16),
    "padding": _set(pad=-1),
}


@pytest.mark.parametrize(
    ("mistake", "name"),
    [
        ("groups", "v2"),
        ("groups", "three_of_groups"),
        ("norm", "lite"),
        ("mscale", "mscales"),
        ("mscale_all_dim", "lite"),
        ("scaling", "no_mtp"),
        ("groups_off", "no_mtp"),
        ("epsilon", "no_mtp"),
        ("indexer", "v32"),
        ("padding", "moonlight"),
    ],
)
def test_a_mistake_is_found(checkpoints: Callable[[str], Path], mistake: str, name: str) -> None:
    request = Request(grads=mistake == "padding")  # which is trained, and computes the same
    document = proof(checkpoints(name), Layout(), request, mistake)
    assert document["failures"], mistake
