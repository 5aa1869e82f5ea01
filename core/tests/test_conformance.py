"""The conformance suite fails where it must: for each kind of mistake in a family, the test that sees it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from isthmus.config import HFConfig
from isthmus.family import Family
from isthmus.layout import Layout
from isthmus.registry import family
from isthmus.testing.conformance import FamilyTests, _disagreements
from isthmus.testing.trip import LiveParameter
from isthmus.weights import Rule, WeightMap

GOOD = LiveParameter(
    canonical="decoder.layers.0.mlp.experts.0.linear_fc1.weight",
    live="decoder.layers.0.mlp.experts.linear_fc1.weight0",
    shape=(4, 4),
    built=torch.bfloat16,
    loaded=torch.bfloat16,
    source=(torch.bfloat16, torch.bfloat16),
    divided=True,
    partition_dim=0,
    partition_stride=2,
    allreduce=False,
    rule="decoder.layers.{i}.mlp.experts.{e}.linear_fc1.weight",
    rule_dim=0,
    rule_parts=2,
    rule_expert=True,
    ranks=2,
)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, []),
        ({"rule": None}, ["no rule"]),
        ({"rule_dim": None}, ["whole in the rule"]),
        ({"divided": False}, ["whole in Megatron"]),
        ({"partition_dim": 1}, ["along 1 in Megatron, 0 in the rule"]),
        ({"rule_parts": 1}, ["2 strides in Megatron, 1 parts"]),
        ({"allreduce": True}, ["allreduce True"]),
    ],
)
def test_a_parameter_that_disagrees_with_its_rule_is_told(change: dict[str, Any], words: list[str]) -> None:
    found = list(_disagreements(GOOD._replace(**change), Layout(tp=2, etp=2, ep=2, dp=2)))
    assert len(found) == len(words)
    assert all(word in line for word, line in zip(words, found, strict=True))


def test_rounding_is_told() -> None:
    assert GOOD.kept
    assert not GOOD._replace(source=(torch.float32,)).kept
    assert not GOOD._replace(source=(torch.float32,), loaded=torch.float32).kept, "rounded, then widened"
    assert GOOD._replace(source=(torch.float32,), built=torch.float32, loaded=torch.float32).kept


def suite(changed: Family) -> FamilyTests:
    class Tests(FamilyTests):
        family = changed
        published = ()

    return Tests()


def published() -> dict[str, Any]:
    """The default tiny config in place of a real one."""
    tiny = family("qwen3_next").tiny
    assert tiny is not None
    return dict(tiny.variants["default"].config)


def with_rules(change: Callable[[Rule], Rule | None]) -> Family:
    """The family, each of its rules changed, or left out where `change` returns None."""
    good = family("qwen3_next")

    def weights(hf: HFConfig, names: frozenset[str], model: Any) -> WeightMap:
        rules = {id(bound.rule): bound.rule for bound in good.weights(hf, names, model).megatron.values()}
        return WeightMap([kept for rule in rules.values() if (kept := change(rule)) is not None])

    return replace(good, weights=weights)


def test_the_family_as_it_is_passes() -> None:
    tests = suite(with_rules(lambda rule: rule))
    tests.test_every_tensor_of_the_published_checkpoint_has_a_rule(published())
    tests.test_every_row_of_the_published_checkpoint_goes_to_one_place(published(), 2)
    tests.test_published_names_and_shapes_are_those_of_transformers(published())


def test_a_rule_left_out_is_noticed() -> None:
    tests = suite(with_rules(lambda rule: None if rule.megatron.endswith("k_layernorm.weight") else rule))
    with pytest.raises(AssertionError, match=r"k_norm\.weight"):
        tests.test_every_tensor_of_the_published_checkpoint_has_a_rule(published())


def test_rows_that_are_too_few_are_noticed() -> None:
    def halve(rule: Rule) -> Rule:
        if not rule.megatron.endswith("shared_experts.linear_fc1.weight"):
            return rule
        assert rule.rows is not None
        return replace(rule, rows={name: count // 2 for name, count in rule.rows.items()})

    tests = suite(with_rules(halve))
    with pytest.raises((AssertionError, ValueError), match="shared_experts"):
        tests.test_every_row_of_the_published_checkpoint_goes_to_one_place(published(), 2)


def test_a_shape_that_transformers_does_not_have_is_noticed() -> None:
    good = family("qwen3_next")
    assert good.tiny is not None
    shapes = good.tiny.tensors

    def other(hf: HFConfig, mtp: bool) -> dict[str, tuple[int, ...]]:
        return shapes(hf, mtp) | {"model.layers.0.linear_attn.dt_bias": (1,)}

    tests = suite(replace(good, tiny=replace(good.tiny, tensors=other)))
    with pytest.raises(AssertionError, match="dt_bias"):
        tests.test_published_names_and_shapes_are_those_of_transformers(published())
