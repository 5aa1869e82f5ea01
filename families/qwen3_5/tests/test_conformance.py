"""Qwen3.5, dense and with experts, passes what every family must; Qwen3-Next goes through more layouts."""

from typing import ClassVar

from isthmus.layout import Layout
from isthmus.testing.conformance import FamilyTests
from isthmus_qwen3_5.family import FAMILY
from isthmus_qwen3_5.tiny import DENSE, MOE


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
