"""What isthmus asks of every family, of DiffLlama."""

from isthmus import launch
from isthmus.config import HFConfig
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


def test_a_layout_that_would_part_a_pair_of_heads_is_refused() -> None:
    fields = FAMILY.model_config(HFConfig(CONFIG), frozenset())
    line = "cannot divide 8 num_query_groups, 2 together, over tp x cp = 4 x 2 ranks"
    assert Layout(tp=4, cp=2).misfits(FAMILY, fields) == [line]
    assert Layout(tp=4, cp=2).misfits(FAMILY, fields | {"hosted_mode": "replicated"}) == []
