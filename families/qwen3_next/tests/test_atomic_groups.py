"""What an inference engine fuses is one group of a stream, in Megatron's own modules and in hosted ones."""

from types import SimpleNamespace

import pytest

from isthmus.config import HFConfig
from isthmus_qwen3_next.family import FAMILY


@pytest.mark.parametrize(
    "built", [("hosted", "hosted"), ("megatron", "megatron")], ids=lambda built: built[0]
)
def test_projections_of_one_mixer_are_one_group(built: tuple[str, str]) -> None:
    assert FAMILY.tiny is not None
    variant = FAMILY.variant("default")
    hf, names = HFConfig(variant.config), frozenset(FAMILY.tiny.shapes(variant))
    fields = FAMILY.model_config(hf, names)
    delta_net, attention = built
    model = SimpleNamespace(**{**fields, "delta_net": delta_net, "attention": attention})
    weights = FAMILY.weights(hf, names, model)
    for members in (
        {f"model.layers.0.linear_attn.in_proj_{name}.weight" for name in ("qkvz", "ba")},
        {f"model.layers.3.self_attn.{name}_proj.weight" for name in "qkv"},
    ):
        (group,) = {weights.group(name) for name in members}
        assert {name for name in names if weights.group(name) == group} == members
