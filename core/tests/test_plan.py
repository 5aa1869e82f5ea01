"""Layouts that cannot be: every reason is told, by name and with both numbers."""

import pytest

from isthmus.layout import Layout
from isthmus.pipeline_layout import problems, stages

FIELDS = {
    "num_layers": 4,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "vocab_size": 101,
}
MOE = FIELDS | {
    "num_moe_experts": 6,
    "moe_ffn_hidden_size": 6,
    "moe_shared_expert_intermediate_size": 6,
    "moe_layer_freq": [1, 1, 1, 1],
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Ett|ttL", ["Ett", "ttL"]),
        ("E,t*3|t,mL", ["Ettt", "tmL"]),
        ("E(tt|)*2tL", ["Ett", "tt", "tL"]),
        ("Et||tL", ["Et", "", "tL"]),
    ],
)
def test_repetition_is_written_out(text: str, expected: list[str]) -> None:
    assert stages(text) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Ett|ttmL", []),
        ("Ett|tt|mL", ["3 stages, pp x vp = 2 x 1 needs 2"]),
        ("Ett|tmL", ["3 of t (decoder layer), the model has 4"]),
        ("Ett|ttL", ["0 of m (MTP layer), the model has 1"]),
        ("Ett|mttL", ["a decoder layer after an MTP layer"]),
        ("tEt|tLtm", ["begins with t and ends with m, not with E and L"]),
        ("Ett|ttmX", ["X has no meaning here"]),
    ],
)
def test_a_pipeline_layout_that_is_not_the_models_is_told_apart(text: str, said: list[str]) -> None:
    found = problems(text, pp=2, vp=1, num_layers=4, mtp_layers=1)
    assert bool(found) == bool(said)
    assert all(any(words in line for line in found) for words in said)
    assert Layout(pp=2, pipeline_layout=text).problems(FIELDS | {"mtp_num_layers": 1}) == found


def test_every_axis_that_does_not_divide_is_named_at_once() -> None:
    found = Layout(tp=4, pp=3, ep=4, etp=4, sp=True).problems(MOE | {"delta_net": "megatron"})
    for words in (
        "6 shared-expert rows over tensor_model_parallel_size=4",
        "2 delta-net key heads over tensor_model_parallel_size=4",
        "6 experts over expert_model_parallel_size=4",
        "6 expert rows over expert_tensor_parallel_size=4",
        "4 layers over pp x vp = 3 x 1",
    ):
        assert any(words in line for line in found), words
    assert len(found) == 5


def test_mlp_rows_matter_only_where_a_layer_has_an_mlp() -> None:
    odd = {"ffn_hidden_size": 63}
    assert "63 MLP rows" in str(Layout(tp=2).problems(FIELDS | odd))
    assert "63 MLP rows" in str(Layout(tp=2).problems(MOE | odd | {"moe_layer_freq": [0, 1, 1, 1]}))
    assert Layout(tp=2).problems(MOE | odd) == []


def test_a_vocabulary_divides_where_it_may_not_be_padded() -> None:
    assert Layout(tp=2).problems(FIELDS) == []
    found = Layout(tp=2).problems(FIELDS | {"should_pad_vocab": False})
    assert found == ["cannot divide 101 vocabulary rows over tensor_model_parallel_size=2"]
