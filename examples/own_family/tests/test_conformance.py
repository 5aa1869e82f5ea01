"""What isthmus asks of every family, of DiffLlama."""

from isthmus import launch
from isthmus.layout import Layout
from isthmus.testing.conformance import FamilyTests
from isthmus_diffllama.family import CONFIG, FAMILY

launch.preload("transformers.modeling_utils", "transformers.models.diffllama.modeling_diffllama")


class TestDiffLlama(FamilyTests):
    family = FAMILY
    published = (CONFIG,)
    layouts = (Layout(tp=4), Layout(pp=2, vp=2), Layout(tp=2, cp=2))
    divided = Layout(tp=2)
    builds = {"local": {"transformer_impl": "local"}}  # noqa: RUF012
