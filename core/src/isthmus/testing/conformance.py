"""What every family must pass: subclass `FamilyTests` in the family's tests and name the family.

    class TestQwen3Next(FamilyTests):
        family = FAMILY
        published = (PUBLISHED,)

and have conftest.py call ``pytest.register_assert_rewrite("isthmus.testing.conformance")``.

All of it runs on a CPU (or on GPUs: `isthmus.testing.ranks`), from tiny checkpoints that are written here. A
tiny checkpoint goes through Megatron once for each case; several tests look at the same trip.
"""

import filecmp
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from isthmus.checkpoint.compare import compare
from isthmus.checkpoint.reader import CheckpointReader
from isthmus.config import HFConfig
from isthmus.family import Family
from isthmus.layout import Layout
from isthmus.testing import ranks, reference
from isthmus.testing.tiny import write_tiny
from isthmus.testing.trip import Case, LiveParameter, Trip, export, go, import_
from isthmus.tiny import Tiny, Variant, transformers_tensors
from isthmus.weights import WeightMap, collapse

# The first variant goes through each of these, where the family supports it.
LAYOUTS = (
    Layout(),
    Layout(tp=2),
    Layout(tp=4),
    Layout(pp=2),
    Layout(ep=2, dp=2),
    Layout(ep=2, dp=4),  # experts have replicas too
    Layout(tp=2, etp=2),
    Layout(tp=2, pp=2, ep=2),
    Layout(pp=2, vp=2),
    Layout(cp=2),
    Layout(tp=2, cp=2),
)
# Every variant goes through these two: one divides all tensors, the other all layers.
DIVIDED, STAGED = Layout(tp=2, ep=2), Layout(pp=2)
# Tied variants also go through one with a stage that has neither the embedding nor its copy.
MIDDLE = Layout(pp=3)

type Trips = Callable[[Case], tuple[Path, list[Trip]]]

# Megatron's other ways to build the same model, by name: fields of the model config.
BUILDS: Mapping[str, Mapping[str, Any]] = {
    "local": {"transformer_impl": "local"},
    "sequential": {"moe_grouped_gemm": False},
}


class FamilyTests:
    """The tests of a family; a subclass gives `family` and `published`, and may add to the rest."""

    family: ClassVar[Family]
    published: ClassVar[tuple[Mapping[str, Any], ...]]
    """config.json of released checkpoints."""
    model_type: ClassVar[str | None] = None
    """Only the variants of this model_type, where the family has several; the first variant counts most."""
    stored: ClassVar[Mapping[str, str]] = {}
    """How names begin in transformers' model -> in published files, where these differ."""
    layouts: ClassVar[Sequence[Layout]] = LAYOUTS
    """The first variant goes through each of these."""
    divided: ClassVar[Layout] = DIVIDED
    """Every variant goes through this one, which divides all tensors, and through two pipeline stages."""
    builds: ClassVar[Mapping[str, Mapping[str, Any]]] = BUILDS
    """Ways to build, by name: each goes through a layout that divides tensors, and one with two stages."""

    @classmethod
    def cases(cls) -> dict[str, Case]:
        """All trips to make, by test id."""
        first, divided = next(iter(cls.variants())), cls.divided
        cases = [Case(first, layout, {}) for layout in cls.layouts]
        cases.append(Case(first, Layout(dp=2), {}, ddp=True))
        for name, variant in cls.variants().items():
            cases += [Case(name, divided, {}), Case(name, STAGED, {})]
            if variant.config["tie_word_embeddings"]:
                cases.append(Case(name, MIDDLE, {}))
        for overrides in cls.builds.values():
            cases += [Case(first, divided, overrides), Case(first, STAGED, overrides)]
        found = {}
        for case in cases:
            variant = cls.variants()[case.variant]
            layout = _uneven(case.layout.resolved(), variant)
            if not layout.misfits(cls.family, {**cls.fields(variant), **case.overrides}):
                case = replace(case, layout=layout)
                found[_name(case, cls.builds)] = case
        return found

    @classmethod
    def fields(cls, variant: Variant) -> dict[str, Any]:
        """Megatron's config fields of a variant."""
        names = frozenset(cls._tiny().shapes(variant))
        return cls.family.model_config(HFConfig(variant.config), names)

    @classmethod
    def variants(cls) -> Mapping[str, Variant]:
        """The tiny variants under test."""
        return cls.family.variants(cls.model_type)

    @classmethod
    def _tiny(cls) -> Tiny:
        assert cls.family.tiny is not None, f"family {cls.family.name} has no tiny checkpoints"
        return cls.family.tiny

    @classmethod
    def _reloads(cls, cases: Mapping[str, Case]) -> Mapping[str, Case]:
        """One trip of each variant that is to be reloaded: one that divides all, where the family has it."""
        chosen: dict[str, str] = {}
        for name, case in cases.items():
            if not cls.variants()[case.variant].reloaded or case.overrides or case.ddp:
                continue
            if case.variant not in chosen or case.layout == cls.divided.resolved():
                chosen[case.variant] = name
        return {name: cases[name] for name in chosen.values()}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Fill in `case`, `reload_case`, `variant` and `config`."""
        cases = self.cases()
        values: dict[str, Mapping[str, Any]] = {
            "case": cases,
            "reload_case": self._reloads(cases),
            "variant": {name: name for name in self.variants()},
            "config": {str(number): config for number, config in enumerate(self.published)},
        }
        for name in values.keys() & set(metafunc.fixturenames):
            metafunc.parametrize(name, values[name].values(), ids=values[name].keys())

    @pytest.fixture(scope="class")
    @classmethod
    def checkpoint(cls, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
        """The folder of a tiny variant, written once."""
        root = tmp_path_factory.mktemp(cls.family.name)

        def folder(variant: str) -> Path:
            if not (root / variant).exists():
                write_tiny(cls.family, root / variant, variant)
            return root / variant

        return folder

    @pytest.fixture(scope="class")
    @classmethod
    def trips(
        cls, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
    ) -> Callable[[Case], tuple[Path, list[Trip]]]:
        """The folder that a case's trip wrote, and each rank's account; made once."""
        root, made = tmp_path_factory.mktemp("exported"), {}

        def trip(case: Case) -> tuple[Path, list[Trip]]:
            target = root / _name(case, cls.builds)
            if target not in made:
                ranks.skip_unbuildable(case.overrides)
                source, size = checkpoint(case.variant), case.layout.world_size
                made[target] = ranks.run(size, go, source, target, case)
            return target, made[target]

        return trip

    def weights(self, config: Mapping[str, Any], names: frozenset[str]) -> WeightMap:
        """The family's map, without any model."""
        hf = HFConfig(config)
        fields = self.family.model_config(hf, names)
        return self.family.weights(HFConfig(config), names, SimpleNamespace(**fields))

    # Names

    def test_every_tensor_of_a_variant_has_a_rule(
        self, variant: str, checkpoint: Callable[[str], Path]
    ) -> None:
        with CheckpointReader(checkpoint(variant)) as reader:
            names = frozenset(reader.tensors)
        coverage = self.weights(self.variants()[variant].config, names).cover(names)
        assert coverage.problems() == []
        assert coverage.loaded == names, "a tiny checkpoint holds nothing that Megatron leaves out"

    def test_every_tensor_of_the_published_checkpoint_has_a_rule(self, config: Mapping[str, Any]) -> None:
        for mtp in (True, False):
            shapes = self._shapes(Variant(config, mtp=mtp))
            coverage = self.weights(config, frozenset(shapes)).cover(shapes)
            assert coverage.problems() == []
            assert coverage.loaded == shapes.keys()

    def test_a_config_value_of_any_kind_is_read_or_refused_by_name(self, config: Mapping[str, Any]) -> None:
        hf = HFConfig(config)
        self.family.model_config(hf, frozenset())
        refused = set()
        for key in hf.read & config.keys():
            for wrong in ([[]], {"a": []}, "no such", [], {}, -1, 0, 0.5, True, 10**400, None):
                try:
                    self.family.model_config(HFConfig({**config, key: wrong}), frozenset())
                except (ValueError, LookupError) as error:
                    refused |= {key} if wrong == [[]] and key in str(error) else set()
        assert hf.read & config.keys() == refused, "fields that are read and may be anything"

    @pytest.mark.parametrize("size", [1, 2, 4, 8])
    def test_every_row_of_the_published_checkpoint_goes_to_one_place(
        self, config: Mapping[str, Any], size: int
    ) -> None:
        shapes = self._shapes(Variant(config))
        weights = self.weights(config, frozenset(shapes))
        for bound in {id(bound.rule): bound for bound in weights.megatron.values()}.values():
            rule, dim = bound.rule, bound.rule.dim
            if dim is None:
                continue
            taken = [torch.zeros(shapes[hf.name][dim], dtype=torch.int64) for hf in bound.hf]
            total = sum(map(len, taken))
            local = -(-total // size)
            held = 0
            for rank in range(size):
                for run in rule.runs(local, rank, size):
                    taken[run.source][run.hf_start : run.hf_start + run.length] += 1
                    held += run.length
            assert all(bool((rows == 1).all()) for rows in taken), rule.megatron
            assert held == total, rule.megatron

    def test_published_names_and_shapes_are_those_of_transformers(self, config: Mapping[str, Any]) -> None:
        found = {self._stored(name): s for name, s in transformers_tensors(HFConfig(config), False).items()}
        stacked = any(name.endswith(".experts.gate_up_proj") for name in found)
        assert found == self._shapes(Variant(config, mtp=False, fused_experts=stacked))

    def _stored(self, name: str) -> str:
        """What published files call the tensor `name` of transformers' model."""
        start = next((start for start in self.stored if name.startswith(start)), "")
        return self.stored.get(start, "") + name.removeprefix(start)

    def _prediction(self, variant: Variant) -> set[str]:
        """Names of the MTP block's tensors, which transformers leaves out, experts one by one and stacked."""
        both = [replace(variant, fused_experts=stacked) for stacked in (True, False)]
        return {name for each in both for name in self._shapes(each)} - {
            name for each in both for name in self._shapes(replace(each, mtp=False))
        }

    def _shapes(self, variant: Variant) -> dict[str, tuple[int, ...]]:
        return self._tiny().shapes(variant)

    # Through Megatron and back

    def test_round_trip_is_bitwise(self, case: Case, trips: Trips, checkpoint: Callable[[str], Path]) -> None:
        source, (exported, _) = checkpoint(case.variant), trips(case)
        with CheckpointReader(source) as before, CheckpointReader(exported) as after:
            result = compare(before, after)
            assert not result.missing, collapse(result.missing)
            assert not result.added, collapse(result.added)
            assert not result.differing
            assert result.equal == len(before.tensors)
        sides = sorted(path.name for path in source.iterdir() if ".safetensors" not in path.name)
        assert sides == sorted(path.name for path in exported.iterdir() if ".safetensors" not in path.name)
        assert filecmp.cmpfiles(source, exported, sides, shallow=False)[0] == sides

    def test_live_parameters_agree_with_their_rules(self, case: Case, trips: Trips) -> None:
        problems = []
        for rank, account in enumerate(trips(case)[1]):
            assert account.moved == [], "DDP and the optimizer keep views of the storage that was there"
            problems += [
                f"rank {rank}: {parameter.canonical} {what}"
                for parameter in account.parameters
                for what in _disagreements(parameter, case.layout)
            ]
        assert problems == []

    def test_no_parameter_is_narrower_than_its_source(self, case: Case, trips: Trips) -> None:
        narrow = {
            p.canonical: (p.source, p.built, p.loaded)
            for account in trips(case)[1]
            for p in account.parameters
            if not p.kept
        }
        assert narrow == {}

    def test_no_rank_reads_more_than_it_holds(
        self, case: Case, trips: Trips, checkpoint: Callable[[str], Path]
    ) -> None:
        with CheckpointReader(checkpoint(case.variant)) as reader:
            tensors = dict(reader.tensors)
        weights = self.weights(self.variants()[case.variant].config, frozenset(tensors))
        # What the files repeat, as a tied head, is read too, to be compared.
        copies = {copy.name for bound in weights.megatron.values() for copy in bound.also}
        repeated = sum(tensors[name].nbytes for name in copies)
        for account in trips(case)[1]:
            held = sum(parameter.source_bytes for parameter in account.parameters)
            assert 0 < account.bytes_read <= held + repeated

    def test_a_megatron_checkpoint_is_exported_at_another_layout(
        self, checkpoint: Callable[[str], Path], tmp_path: Path
    ) -> None:
        name, variant = next(iter(self.variants().items()))
        source, megatron, out = checkpoint(name), tmp_path / "megatron", tmp_path / "out"
        wide, deep = self.divided.resolved(), _uneven(STAGED.resolved(), variant)
        ranks.run(wide.world_size, import_, source, wide, megatron, {})
        ranks.run(deep.world_size, export, megatron, deep, out)
        with CheckpointReader(source) as before, CheckpointReader(out) as after:
            result = compare(before, after)
            assert result.equal == len(before.tensors), collapse([*result.missing, *result.differing])
            assert not result.added, collapse(result.added)

    # What transformers makes of it

    def test_transformers_loads_the_export(
        self, reload_case: Case, trips: Trips, checkpoint: Callable[[str], Path]
    ) -> None:
        source, (exported, _) = checkpoint(reload_case.variant), trips(reload_case)
        vision = "vision_config" in self.variants()[reload_case.variant].config
        model = reference.load(exported, torch.float32, vision=vision).hf
        _, info = type(model).from_pretrained(exported, output_loading_info=True)
        known = self._prediction(self.variants()[reload_case.variant])
        strange = info["unexpected_keys"] - known
        assert not strange | info["missing_keys"] | info["mismatched_keys"]
        tokens = torch.arange(2, 42, device=model.device)[None]
        with torch.no_grad():
            expected = reference.load(source, torch.float32, vision=vision).hf(tokens).logits
            assert torch.equal(model(tokens).logits, expected)


def _disagreements(p: LiveParameter, layout: Layout) -> Iterator[str]:
    """What Megatron's marks on a live parameter say otherwise than its rule."""
    if p.rule is None:
        yield "has no rule"
    if p.rule_dim is None and p.divided:
        yield f"is divided along {p.partition_dim} in Megatron, whole in the rule"
    if p.rule_dim is not None and p.ranks > 1 and not p.divided:
        yield f"is divided along {p.rule_dim} in the rule, whole in Megatron"
    if p.rule_dim is not None and p.divided and p.partition_dim != p.rule_dim:
        yield f"is divided along {p.partition_dim} in Megatron, {p.rule_dim} in the rule"
    if p.partition_stride > 1 and p.partition_stride != p.rule_parts:
        yield f"has {p.partition_stride} strides in Megatron, {p.rule_parts} parts in the rule"
    # Experts' gradients have a group of their own where experts are divided otherwise than the rest.
    own_group = p.rule_expert and (layout.ep > 1 or layout.etp != layout.tp)
    if p.allreduce == own_group:
        yield f"has allreduce {p.allreduce} under tp={layout.tp} ep={layout.ep} etp={layout.etp}"


def _uneven(layout: Layout, variant: Variant) -> Layout:
    """The layout, with a pipeline layout of its own where the variant's layers do not divide evenly."""
    text = variant.config.get("text_config", variant.config)
    layers, stages = text["num_hidden_layers"], layout.pp * layout.vp
    if layers % stages == 0:
        return layout
    counts = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    decoder = "|".join("t" * count for count in counts)
    return replace(layout, pipeline_layout=f"E{decoder}{'m' if variant.mtp else ''}L")


def _name(case: Case, builds: Mapping[str, Mapping[str, Any]]) -> str:
    """`tied-tp2-ep2`, `default-pp2-local`: the test id of a case."""
    sizes = {k: v for k, v in case.layout.as_dict().items() if k not in ("sp", "pipeline_layout") and v > 1}
    words = [case.variant, *(f"{axis}{size}" for axis, size in sizes.items())]
    words += ["uneven"] if case.layout.pipeline_layout else []
    words += [name for name, overrides in builds.items() if overrides == case.overrides]
    return "-".join(words + ["ddp"] * case.ddp)
