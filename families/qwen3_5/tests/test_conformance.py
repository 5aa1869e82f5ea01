"""Qwen3.5, dense and with experts, passes what every family must; Qwen3-Next goes through more layouts."""

from collections.abc import Mapping
from typing import ClassVar

from isthmus.layout import Layout
from isthmus.testing.conformance import FamilyTests
from isthmus.tiny import Variant
from isthmus_qwen3_5.family import FAMILY
from isthmus_qwen3_5.tiny import DENSE, MOE, TOKENS, VISION, vision_language


class TestDense(FamilyTests):
    family = FAMILY
    model_type = "qwen3_5_text"
    published = (DENSE,)
    layouts = (Layout(), Layout(pp=2, vp=2), Layout(tp=2, cp=2))
    divided = Layout(tp=2)
    builds: ClassVar = {
        "local": {"transformer_impl": "local"},
        "native": {"delta_net": "megatron"},
        "hosted-attention": {"attention": "hosted"},
    }


class TestExperts(FamilyTests):
    family = FAMILY
    model_type = "qwen3_5_moe_text"
    published = (MOE,)
    layouts = (Layout(tp=2, etp=2), Layout(tp=2, pp=2, ep=2))
    builds: ClassVar = {"sequential": {"moe_grouped_gemm": False}, "native": {"delta_net": "megatron"}}


class TestVision(FamilyTests):
    """With a tower, dense and with experts; `test_vision.py` compares outputs, and has more layouts."""

    family = FAMILY
    published = tuple(
        vision_language(text, VISION | {"out_hidden_size": text["hidden_size"]}, **TOKENS)
        for text in (DENSE, MOE)
    )
    layouts = ()
    divided = Layout(tp=2)
    builds: ClassVar = {}

    @classmethod
    def variants(cls) -> Mapping[str, Variant]:
        kept = ("vision", "vision_tied", "vision_moe_fused_experts")
        return {name: FAMILY.variants()[name] for name in kept}
