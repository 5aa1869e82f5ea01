"""Layouts that cannot be: every reason is told, by name and with both numbers."""

from types import SimpleNamespace

import pytest

from isthmus.layout import Layout
from isthmus.pipeline_layout import as_text, problems, stages

FIELDS = {
    "num_layers": 4,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 64,
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
        ("|EttttmL", ["nothing on stage 0 of 0..1"]),
        ("Ettttm|L", ["m (MTP layer) on stage 0; put it on the last one, 1"]),
    ],
)
def test_a_pipeline_layout_that_is_not_the_models_is_told_apart(text: str, said: list[str]) -> None:
    found = problems(text, pp=2, vp=1, num_layers=4, mtp_layers=1)
    assert bool(found) == bool(said)
    assert all(any(words in line for line in found) for words in said)
    assert Layout(pp=2, pipeline_layout=text).problems(FIELDS | {"mtp_num_layers": 1}) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Et*99999999999L", "repeats 't' 99999999999 times, more than 100000 letters"),
        (f"E(t|)*{'9' * 5000}L", "repeats 't|' 99999999999999999999... (5000 digits) times"),
        ("E((t*99999)*99999)*99999L", "more than 100000 letters"),
        ("E" + "t*60000" * 2 + "L", "more than 100000 letters"),
    ],
    ids=["count", "digits", "nested", "sum"],
)
def test_repetition_beyond_any_model_is_refused_before_it_is_written_out(text: str, said: str) -> None:
    [found] = problems(text, pp=2, vp=1, num_layers=4, mtp_layers=1)
    assert said in found
    assert len(found) < 200


@pytest.mark.parametrize("text", ["Et|tttm|L", "Et||tttmL", "Ettt|tm|L"])
def test_empty_stages_and_early_mtp_are_refused_where_all_else_fits(text: str) -> None:
    (line,) = Layout(pp=3, pipeline_layout=text).problems(FIELDS | {"mtp_num_layers": 1})
    assert "nothing on stage 1 of 0..2" in line or "m (MTP layer) on stage 1; put it on the last" in line


@pytest.mark.parametrize(
    "form",
    [
        [["embedding", "decoder", "decoder"], ["decoder", "decoder", "mtp", "loss"]],
        [
            [SimpleNamespace(name=name) for name in stage]  # as Megatron's LayerType, an enum
            for stage in (["embedding", "decoder", "decoder"], ["decoder", "decoder", "mtp", "loss"])
        ],
        SimpleNamespace(input_data="Ett|ttmL"),  # as Megatron's PipelineParallelLayerLayout
    ],
    ids=["names", "kinds", "object"],
)
def test_all_of_megatrons_forms_of_a_pipeline_layout_are_read(form: object) -> None:
    assert as_text(form) == "Ett|ttmL"
    fields = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": form}
    layout = Layout.of(FIELDS | fields)
    assert layout == Layout(pp=2, sp=False, pipeline_layout="Ett|ttmL")
    assert layout.problems(FIELDS | {"mtp_num_layers": 1}) == []


def test_a_kind_of_layer_without_a_letter_is_named() -> None:
    with pytest.raises(ValueError, match="encoder has no meaning here; use embedding, decoder, mtp, loss"):
        as_text([["embedding", "encoder"], ["decoder", "loss"]])


@pytest.mark.parametrize(
    "uneven",
    [
        {"num_layers_in_first_pipeline_stage": 2},
        {"num_layers_in_last_pipeline_stage": 2},
        {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
    ],
)
def test_megatrons_own_uneven_splits_are_left_to_megatron(uneven: dict) -> None:
    assert Layout(pp=3).problems(FIELDS) != []
    assert Layout(pp=3).problems(FIELDS | uneven) == []


def test_every_axis_that_does_not_divide_is_named_at_once() -> None:
    found = Layout(tp=4, pp=3, ep=4, etp=4, sp=True).problems(MOE)
    for words in (
        "6 shared-expert rows over tensor_model_parallel_size=4",
        "6 experts over expert_model_parallel_size=4",
        "6 expert rows over expert_tensor_parallel_size=4",
        "4 layers over pp x vp = 3 x 1",
    ):
        assert any(words in line for line in found), words
    assert len(found) == 4


def test_mlp_rows_matter_only_where_a_layer_has_an_mlp() -> None:
    odd = {"ffn_hidden_size": 63}
    assert "63 MLP rows" in str(Layout(tp=2).problems(FIELDS | odd))
    assert "63 MLP rows" in str(Layout(tp=2).problems(MOE | odd | {"moe_layer_freq": [0, 1, 1, 1]}))
    assert Layout(tp=2).problems(MOE | odd) == []


def test_a_vocabulary_divides_where_it_may_not_be_padded() -> None:
    assert Layout(tp=2).problems(FIELDS) == []
    found = Layout(tp=2).problems(FIELDS | {"should_pad_vocab": False})
    assert found == ["cannot divide 101 vocabulary rows over tensor_model_parallel_size=2"]
