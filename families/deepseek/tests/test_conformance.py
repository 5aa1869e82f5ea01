"""DeepSeek passes what every family must."""

from typing import ClassVar

from isthmus.testing.conformance import FamilyTests
from isthmus_deepseek.family import FAMILY
from isthmus_deepseek.tiny import V2, V2_LITE, V3, V32

BUILDS = {  # without "local": Megatron's local layers have no latent attention that trains right
    "sequential": {"moe_grouped_gemm": False},
    "hosted": {"attention": "hosted"},
}


class TestDeepseekV2(FamilyTests):
    family = FAMILY
    model_type = "deepseek_v2"
    published = (V2, V2_LITE)
    builds: ClassVar = BUILDS


class TestDeepseekV3(FamilyTests):
    family = FAMILY
    model_type = "deepseek_v3"
    published = (V3,)
    builds: ClassVar = BUILDS


class TestDeepseekV32(FamilyTests):
    family = FAMILY
    model_type = "deepseek_v32"
    published = (V32,)
    builds: ClassVar = {}
