"""Gemma 3's language model passes what every family must."""

from typing import ClassVar

from isthmus.layout import Layout
from isthmus.testing.conformance import FamilyTests
from isthmus_gemma_vl.family import FAMILY
from isthmus_gemma_vl.tiny import LARGE, PUBLISHED, VISION, vision_language


class TestText(FamilyTests):
    family = FAMILY
    model_type = "gemma3_text"
    published = tuple(PUBLISHED.values())
    layouts = (Layout(), Layout(tp=4), Layout(pp=2, vp=2), Layout(tp=2, cp=2))
    divided = Layout(tp=2)
    builds: ClassVar = {"local": {"transformer_impl": "local"}}


class TestVision(FamilyTests):
    """With a tower; `test_vision.py` compares outputs, and has more layouts."""

    family = FAMILY
    model_type = "gemma3"
    published = (vision_language(LARGE, mm_tokens_per_image=256, vision_config=VISION),)
    stored: ClassVar = {
        "model.language_model.": "language_model.model.",
        "model.vision_tower.": "vision_tower.vision_model.",
        "model.": "",
    }
    layouts = ()
    divided = Layout(tp=2)
    builds: ClassVar = {}
