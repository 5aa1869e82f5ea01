"""DeepSeek passes what every family must."""

from typing import ClassVar

from isthmus.testing.conformance import FamilyTests
from isthmus_deepseek.family import DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V32
from isthmus_deepseek.tiny import V2, V2_LITE, V3, V32

BUILDS = {  # without "local": Megatron's local layers have no latent attention that trains right
    "sequential": {"moe_grouped_gemm": False},
    "hosted": {"attention": "hosted"},
}


class TestDeepseekV2(FamilyTests):
    family = DEEPSEEK_V2
    published = (V2, V2_LITE)
    builds: ClassVar = BUILDS


class TestDeepseekV3(FamilyTests):
    family = DEEPSEEK_V3
    published = (V3,)
    builds: ClassVar = BUILDS


class TestDeepseekV32(FamilyTests):
    family = DEEPSEEK_V32
    published = (V32,)
    builds: ClassVar = {}
