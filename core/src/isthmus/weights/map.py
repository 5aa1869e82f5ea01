"""The weight map: a family's rules, looked up from either side, and what they cover.

A map enumerates every Megatron tensor and every HF tensor of one checkpoint, so that what is missing and what
is unknown is set arithmetic. Besides rules it holds the source tensors that are left out on purpose, each
with a reason, and the groups that a stream keeps together.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import NamedTuple

from isthmus.weights.atomic import Atomic, groups
from isthmus.weights.names import collapse
from isthmus.weights.rule import Rule


class HFTensor(NamedTuple):
    """An HF tensor, or row `index` of a stacked one."""

    name: str
    index: int | None = None


class Bound(NamedTuple):
    """A rule with its `{i}` and `{e}` filled in."""

    megatron: str
    rule: Rule
    hf: tuple[HFTensor, ...]
    also: tuple[HFTensor, ...]


@dataclass(frozen=True, slots=True)
class Ignored:
    """HF tensors that no Megatron tensor holds: copied through an export, or dropped, and why.

    In `pattern`, `{i}` stands for a number and `*` for anything.
    """

    pattern: str
    because: str
    copied: bool
    counted_by: tuple[str, ...] = ()
    """Config fields that say how many there are: 0 in an export that leaves them out."""


def ignore(pattern: str, because: str) -> Ignored:
    """Source tensors that are neither loaded nor exported."""
    return Ignored(pattern, because, copied=False)


def passthrough(pattern: str, because: str, counted_by: tuple[str, ...] = ()) -> Ignored:
    """Source tensors that are not loaded, and exported with the source's own bytes."""
    return Ignored(pattern, because, copied=True, counted_by=counted_by)


@dataclass(slots=True)
class Coverage:
    """What becomes of every tensor of a checkpoint and of a model, and what does not fit."""

    # By HF name
    loaded: set[str] = field(default_factory=set)
    passed_through: dict[str, str] = field(default_factory=dict)  # name -> reason
    counts: set[str] = field(default_factory=set)  # config fields that count the tensors passed through
    dropped: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)  # a rule wants it, the checkpoint lacks it
    unknown: list[str] = field(default_factory=list)  # the checkpoint has it, no rule wants it
    # By Megatron's name
    unmapped: list[str] = field(default_factory=list)  # the model has it, no rule fills it
    unheld: list[str] = field(default_factory=list)  # a rule fills it and exports it, no rank holds it
    misfits: dict[str, list[str]] = field(default_factory=dict)
    """What does not fit -> the tensors that it is said of, by either name; none where the text names them."""

    def misfit(self, what: str, *names: str) -> None:
        """Note what does not fit, of these tensors."""
        self.misfits.setdefault(what, []).extend(names)

    def problems(self) -> list[str]:
        """One line for each kind of gap, names collapsed; empty where every tensor is accounted for."""
        gaps = {
            "missing from the checkpoint": self.missing,
            "no rule for checkpoint tensors": self.unknown,
            "no rule for Megatron tensors": self.unmapped,
            "no rank holds": self.unheld,
        }
        lines = [
            f"{what} ({len(names)}): {', '.join(collapse(names))}" for what, names in gaps.items() if names
        ]
        for what, names in self.misfits.items():
            lines.append(f"{', '.join(collapse(dict.fromkeys(names)))}: {what}" if names else what)
        return lines


class WeightMap:
    """All rules of one checkpoint.

    LookupError where two rules of equal rank claim one Megatron tensor, or two would write one HF tensor, or
    where atomic groups are not whole or overlap. A rule with fewer free indices is more specific and wins
    over a general one.
    """

    def __init__(self, rules: Iterable[Rule | Ignored | Atomic]) -> None:
        self.megatron: dict[str, Bound] = {}
        self.ignored: list[Ignored] = []
        declared: list[Atomic] = []
        ranks: dict[str, int] = {}
        contested: list[str] = []
        for rule in rules:
            if isinstance(rule, Ignored):
                self.ignored.append(rule)
                continue
            if isinstance(rule, Atomic):
                declared.append(rule)
                continue
            rank = len(_fields(rule.megatron))
            for bound in _bind(rule):
                held = ranks.get(bound.megatron)
                if held == rank:
                    contested.append(bound.megatron)
                elif held is None or rank < held:
                    self.megatron[bound.megatron] = bound
                    ranks[bound.megatron] = rank
        if contested:
            raise LookupError("two rules of equal rank claim " + ", ".join(collapse(contested)))
        self.hf: dict[str, list[str]] = {}  # HF tensor -> the Megatron tensors that export it
        self._first: dict[str, str] = {}  # HF tensor -> the first one of the rule that exports it
        written: set[HFTensor] = set()
        twice: list[str] = []
        for bound in self.megatron.values():
            for tensor in (*bound.hf, *bound.also):
                names = self.hf.setdefault(tensor.name, [])
                if bound.rule.exported:
                    names.append(bound.megatron)
                    if tensor in written:
                        twice.append(tensor.name)
                    written.add(tensor)
                    self._first.setdefault(tensor.name, bound.hf[0].name)
        if twice:
            raise LookupError("two exported rules write " + ", ".join(collapse(twice)))
        unowned = [name for name, owners in self.hf.items() if not owners]
        if unowned:
            raise LookupError("no exported rule writes " + ", ".join(collapse(unowned)))
        self._groups: dict[str, str] = {}  # the first HF tensor of a rule -> that of its group
        for names in groups(declared, self.hf):
            firsts = dict.fromkeys(self._first[name] for name in names)
            if overlap := [name for name in firsts if name in self._groups]:
                raise LookupError("two atomic groups have " + ", ".join(collapse(overlap)))
            self._groups.update(dict.fromkeys(firsts, next(iter(firsts))))

    def group(self, name: str) -> str:
        """The HF tensor that stands for all those that a stream keeps together with HF tensor `name`."""
        return self._groups.get(self._first[name], self._first[name])

    def cover(
        self,
        hf: Iterable[str] | None = None,
        *,
        megatron: Iterable[str] | None = None,
        all_ranks: bool = True,
    ) -> Coverage:
        """What becomes of the checkpoint's tensors `hf` and of the model's, `megatron` by canonical name.

        A side that is not given is not looked at. Where `all_ranks` is False, `megatron` are the tensors of
        one rank only, and what that does not hold another may. A rule that is not exported is for a second
        copy, which only some layouts have.
        """
        coverage = Coverage()
        if hf is not None:
            self._cover_hf(hf, coverage)
        if megatron is not None:
            held = dict.fromkeys(megatron)
            coverage.unmapped = [name for name in held if name not in self.megatron]
            if all_ranks:
                exported = (name for name, bound in self.megatron.items() if bound.rule.exported)
                coverage.unheld = [name for name in exported if name not in held]
        return coverage

    def _cover_hf(self, names: Iterable[str], coverage: Coverage) -> None:
        patterns = [(re.compile(_pattern(entry.pattern)), entry) for entry in self.ignored]
        seen = set()
        for name in names:
            seen.add(name)
            if name in self.hf:
                coverage.loaded.add(name)
                continue
            entry = next((entry for pattern, entry in patterns if pattern.fullmatch(name)), None)
            if entry is None:
                coverage.unknown.append(name)
            elif entry.copied:
                coverage.passed_through[name] = entry.because
                coverage.counts.update(entry.counted_by)
            else:
                coverage.dropped[name] = entry.because
        coverage.missing = [name for name in self.hf if name not in seen]


def _bind(rule: Rule) -> Iterator[Bound]:
    """The rule for each combination of its indices."""
    fields = _fields(rule.megatron)
    unbound = [name for name in fields if name not in rule.indices]
    if unbound:
        raise LookupError(f"{rule.megatron}: no values are given for {unbound}")
    for values in itertools.product(*(rule.indices[name] for name in fields)):
        index = dict(zip(fields, values, strict=True))
        yield Bound(
            rule.megatron.format_map(index),
            rule,
            tuple(_hf_tensor(name, index) for name in rule.hf),
            tuple(_hf_tensor(name, index) for name in rule.also),
        )


def _hf_tensor(template: str, index: Mapping[str, int]) -> HFTensor:
    name, bracket, row = template.partition("[")
    return HFTensor(name.format_map(index), int(row.rstrip("]").format_map(index)) if bracket else None)


def _fields(template: str) -> Sequence[str]:
    """The names in braces, each once, in order."""
    return list(dict.fromkeys(name for _, name, _, _ in Formatter().parse(template) if name))


def _pattern(template: str) -> str:
    """The regular expression of an `Ignored` pattern."""
    pieces = re.split(r"(\{\w+\}|\*)", template)
    return "".join(r"\d+" if p.startswith("{") else ".*" if p == "*" else re.escape(p) for p in pieces)
