"""Gemma 3's language model passes what every family must."""

from typing import ClassVar

from isthmus.layout import Layout
from isthmus.testing.conformance import FamilyTests
from isthmus_gemma_vl.family import FAMILY
from isthmus_gemma_vl.tiny import PUBLISHED


class TestText(FamilyTests):
    family = FAMILY
    model_type = "gemma3_text"
    published = tuple(PUBLISHED.values())
    layouts = (Layout(), Layout(tp=4), Layout(pp=2, vp=2), Layout(tp=2, cp=2))
    divided = Layout(tp=2)
    builds: ClassVar = {"local": {"transformer_impl": "local"}}
