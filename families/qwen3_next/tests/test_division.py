"""What a layout must divide in Qwen3-Next besides what it must in any model."""

from isthmus.layout import Layout
from isthmus_qwen3_next.family import FAMILY
from isthmus_qwen3_next.layout import problems

FIELDS = {"num_layers": 4, "num_attention_heads": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}


def test_delta_nets_divide_their_heads_unless_they_run_whole() -> None:
    native = FIELDS | {"delta_net": "megatron"}
    assert problems(Layout(tp=2), native) == []
    line = "cannot divide 2 delta-net key heads over tp x cp = 4 x 1"
    assert problems(Layout(tp=4), native) == [line]
    assert line in Layout(tp=4).misfits(FAMILY, native)
    assert line in problems(Layout(tp=4), FIELDS)
    assert Layout(tp=4).misfits(FAMILY, FIELDS | {"hosted_mode": "replicated"}) == []
