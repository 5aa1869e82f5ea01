"""Qwen3-Next passes what every family must."""

from typing import ClassVar

from isthmus.testing.conformance import BUILDS, FamilyTests
from isthmus_qwen3_next.family import FAMILY
from isthmus_qwen3_next.tiny import PUBLISHED


class TestQwen3Next(FamilyTests):
    family = FAMILY
    published = (PUBLISHED,)
    builds: ClassVar = {
        **BUILDS,
        "native": {"delta_net": "megatron"},
        "hosted-attention": {"attention": "hosted"},
        "replicated": {"attention": "hosted", "hosted_mode": "replicated"},
        "local-native": {"delta_net": "megatron", "transformer_impl": "local"},
    }
