"""What Qwen3.5's config.json says that Megatron does not have is refused by name."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from isthmus.config import HFConfig
from isthmus.layout import Layout
from isthmus_qwen3_5.config import megatron_config, overruled
from isthmus_qwen3_5.family import FAMILY
from isthmus_qwen3_5.layout import problems
from isthmus_qwen3_5.tensors import tensors
from isthmus_qwen3_5.tiny import tiny_config, tiny_moe_config, vision_language

YARN = {"rope_type": "yarn", "factor": 4.0}
ROPE = tiny_config()["rope_parameters"]


def fields(raw: dict[str, Any]) -> dict[str, Any]:
    return megatron_config(HFConfig(raw), frozenset())


@pytest.mark.parametrize("vision", [False, True], ids=["text", "vision"])
@pytest.mark.parametrize("make", [tiny_config, tiny_moe_config])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate=False, expected True: no Qwen3.5 has another"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings=True, expected False"),
        ({"mtp_num_hidden_layers": 2}, "2 MTP layers share one mtp.fc"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu', expected 'silu'"),
        ({"rope_parameters": ROPE | YARN}, "yarn"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_megatron_does_not_have_is_refused(
    make: Callable[..., dict[str, Any]], vision: bool, changed: dict[str, Any], message: str
) -> None:
    text = make()
    fields(vision_language(text) if vision else text)
    text = make(**changed)
    with pytest.raises(ValueError, match=message):
        fields(vision_language(text) if vision else text)


def test_hosted_attention_knows_no_positions_of_images() -> None:
    found = fields(vision_language(tiny_config()))
    assert problems(Layout(), found) == []
    (said,) = problems(Layout(), found | {"attention": "hosted"})
    assert said.startswith("attention='hosted' counts positions as on text, and images have others")
    assert problems(Layout(), found | {"attention": "hosted", "part": "text"}) == []


def test_a_stated_prediction_layer_of_which_there_is_no_tensor_is_reported() -> None:
    shapes = {"lm_head.weight": (160, 64)}
    whole = HFConfig(vision_language(tiny_config()))
    assert overruled(HFConfig(tiny_config()), shapes) == {"mtp_num_hidden_layers": 0}
    assert overruled(whole, shapes) == {"text_config.mtp_num_hidden_layers": 0}
    assert overruled(whole, {"mtp.fc.weight": (64, 128)}) == {}


def test_decoder_and_prediction_block_may_store_their_experts_in_two_ways() -> None:
    hf = HFConfig(tiny_moe_config())
    names = frozenset(
        re.sub(r"(mtp\..*experts)\.\d+\.(?:(gate|up)|(down))_proj\.weight", stacked, name)
        for name in tensors(hf)
    )
    assert "mtp.layers.0.mlp.experts.gate_up_proj" in names
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in names
    found = FAMILY.weights(hf, names, SimpleNamespace(**megatron_config(hf, names))).cover(names)
    assert found.loaded == names
    assert not found.missing


def stacked(name: re.Match[str]) -> str:
    return f"{name[1]}.{'down_proj' if name[3] else 'gate_up_proj'}"
