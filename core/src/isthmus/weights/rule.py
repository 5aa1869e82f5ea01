"""Weight rules: what a Megatron tensor is made of, as data.

A rule names one Megatron tensor (or, with `{i}` and `{e}`, one for each layer and expert), the HF tensors
that hold the same numbers, and the order of their parts. Loading, exporting, planning and coverage all read
this one table. The vocabulary: `same`, `column`, `row`, `fuse`, `swiglu`, `embeddings`, `hosted`, put
into place by `scope`.

Names are templates: `{i}` a layer, `{e}` an expert; an HF name that ends in `[{e}]` is row `e` of a stacked
tensor.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from isthmus.weights.heads import Heads
from isthmus.weights.parts import Interval, Parts, concatenated

_WHOLE = Parts(("rows",))


class Run(NamedTuple):
    """`length` rows (columns where the rule's `dim` is 1) that HF and Megatron hold in the same order."""

    source: int  # which of the rule's HF tensors
    hf_start: int
    start: int  # in the rank's Megatron tensor
    length: int


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron tensor and the HF tensors it is made of.

    `dim` is the dim that tensor parallelism divides, None where every rank holds the whole. `rows` is the
    size of each part along dim 0 over all ranks; a rule of a single HF tensor may leave it out, then the
    tensors' own shapes say.
    """

    megatron: str
    hf: tuple[str, ...]
    dim: int | None
    hf_parts: tuple[Parts, ...] = (_WHOLE,)
    parts: Parts = _WHOLE
    rows: Mapping[str, int] | None = None
    padded: bool = False
    """Megatron may hold more rows at the end (vocabulary padding): zeros, never in a file."""
    also: tuple[str, ...] = ()
    """Further HF tensors with the very same content (a tied head that the source repeats)."""
    exported: bool = True
    """False: a second Megatron copy of what another rule exports."""
    indices: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The values that `{i}` and `{e}` take."""

    def __post_init__(self) -> None:
        held = [name for parts in self.hf_parts for name in parts.names]
        if sorted(held) != sorted(self.parts.names) or len(set(held)) != len(held):
            raise ValueError(f"{self.megatron}: HF holds parts {held}, Megatron {list(self.parts.names)}")
        if self.also and len(self.hf) != 1:
            raise ValueError(
                f"{self.megatron}: only a rule of one HF tensor can have copies, not {len(self.hf)}"
            )
        if self.rows is None:
            return
        if set(self.rows) != set(held):
            raise ValueError(f"{self.megatron}: rows are given for {list(self.rows)}, the parts are {held}")
        for parts in (self.parts, *self.hf_parts):
            uneven = {name: self.rows[name] for name in parts.names if self.rows[name] % (parts.groups or 1)}
            if uneven:
                raise ValueError(f"{self.megatron}: cannot divide rows {uneven} into {parts.groups} groups")

    @property
    def expert(self) -> bool:
        """Whether the tensor belongs to one routed expert: divided over ETP, where others are over TP."""
        return "{e}" in self.megatron

    def length(self, source: int, local: int, size: int) -> int:
        """Size of HF tensor `source` along the divided dim, where each of `size` ranks holds `local`."""
        if self.rows is not None:
            return sum(self.rows[name] for name in self.hf_parts[source].names)
        return local if self.dim is None else local * size

    def hf_shape(self, source: int, local: tuple[int, ...], size: int) -> tuple[int, ...]:
        """Shape of HF tensor `source` (of a row where stacked) where each of `size` ranks holds `local`."""
        if not local:
            return local
        dim = self.dim or 0
        return (*local[:dim], self.length(source, local[dim], size), *local[dim + 1 :])

    def runs(self, local: int, rank: int, size: int) -> tuple[Run, ...]:
        """Where the rows of `rank`'s shard stand in the HF tensors; `local` is the shard's size along `dim`.

        Packing (HF to Megatron) copies along the runs, unpacking copies back: each is the inverse of the
        other. ValueError where the sizes contradict each other.
        """
        if self.dim is None:
            rank, size = 0, 1
        rows = self.rows or {"rows": local * size}
        total = sum(rows.values())
        if self.padded:
            if total > local * size:
                raise ValueError(
                    f"{self.megatron}: {total} rows do not fit into {local} on each of {size} ranks"
                )
            (part,) = self.parts.names
            start = rank * local
            shard = [Interval(part, start, max(0, min(local, total - start)))]
        elif total != local * size:
            raise ValueError(f"{self.megatron}: {total} rows are not {local} on each of {size} ranks")
        else:
            shard = self.parts.shard(rows, rank, size)
        return tuple(_merged(_runs(shard, self.hf_parts, rows)))


def _runs(shard: Iterable[Interval], hf_parts: Sequence[Parts], rows: Mapping[str, int]) -> Iterator[Run]:
    """Each interval of the shard, cut where the HF tensors interleave its part."""
    # part -> (source, row in it, first row of the part, length)
    places: dict[str, list[tuple[int, int, int, int]]] = {}
    for source, parts in enumerate(hf_parts):
        position = 0
        for part, first, length in parts.intervals(rows):
            places.setdefault(part, []).append((source, position, first, length))
            position += length
    start = 0
    for part, first, length in shard:
        for source, position, place_first, place_length in places[part]:
            begin, end = max(first, place_first), min(first + length, place_first + place_length)
            if begin < end:
                yield Run(source, position + begin - place_first, start + begin - first, end - begin)
        start += length


def _merged(runs: Iterable[Run]) -> Iterator[Run]:
    """The same runs, neighbours that continue each other on both sides made one."""
    last: Run | None = None
    for run in runs:
        if last and run[:3] == (last.source, last.hf_start + last.length, last.start + last.length):
            last = last._replace(length=last.length + run.length)
            continue
        if last:
            yield last
        last = run
    if last:
        yield last


def same(megatron: str, hf: str) -> Rule:
    """Whole on every tensor-parallel rank."""
    return Rule(megatron, (hf,), dim=None)


def column(megatron: str, hf: str) -> Rule:
    """Rows (dim 0) divided over the tensor-parallel ranks."""
    return Rule(megatron, (hf,), dim=0)


def row(megatron: str, hf: str) -> Rule:
    """Columns (dim 1) divided over the tensor-parallel ranks, as in a row-parallel linear."""
    return Rule(megatron, (hf,), dim=1)


def vocabulary(
    megatron: str, hf: str, rows: int, *, also: tuple[str, ...] = (), exported: bool = True
) -> Rule:
    """`rows` token rows divided over the ranks, where Megatron may pad at the end."""
    return Rule(megatron, (hf,), dim=0, rows={"rows": rows}, padded=True, also=also, exported=exported)


def fuse(megatron: str, hf: Mapping[str, Parts | str], parts: Parts | str, **rows: int) -> Rule:
    """A fused weight: the parts that each HF tensor holds, Megatron's order, each part's rows over all ranks.

    Parts are written as ``per(groups, "q gate k v")``, or as plain ``"gate up"`` for one after the other.
    """
    return Rule(
        megatron,
        tuple(hf),
        dim=0,
        hf_parts=tuple(_as_parts(value) for value in hf.values()),
        parts=_as_parts(parts),
        rows=rows,
    )


def swiglu(megatron: str, hf: str, rows: int) -> list[Rule]:
    """A gated MLP of `rows` intermediate rows: gate and up fused in `linear_fc1`, down in `linear_fc2`."""
    gate_up = {f"{hf}.gate_proj.weight": "gate", f"{hf}.up_proj.weight": "up"}
    return [
        fuse(f"{megatron}.linear_fc1.weight", gate_up, "gate up", gate=rows, up=rows),
        row(f"{megatron}.linear_fc2.weight", f"{hf}.down_proj.weight"),
    ]


def stacked_swiglu(megatron: str, hf: str, rows: int) -> list[Rule]:
    """`swiglu` of an expert, where HF stacks them: `gate_up_proj` (E, 2F, H), `down_proj` (E, H, F)."""
    return [
        fuse(
            f"{megatron}.linear_fc1.weight",
            {f"{hf}.gate_up_proj[{{e}}]": "gate up"},
            "gate up",
            gate=rows,
            up=rows,
        ),
        row(f"{megatron}.linear_fc2.weight", f"{hf}.down_proj[{{e}}]"),
    ]


def hosted(
    megatron: str, hf: str, names: Iterable[str] = (), *, split: Heads | None = None, model: object = None
) -> list[Rule]:
    """An HF module run as it is: its parameters `names` whole on every rank, or those of `split` divided.

    Args:
        model: the Megatron model config, of which `hosted_mode` may say that `split` is not used, and
            `tensor_model_parallel_size` how many ranks there are: more than heads of a kind, and each holds
            all of that kind. None: 1 rank.
    """
    if split is None:
        return [same(f"{megatron}.{name}", f"{hf}.{name}") for name in names]
    if getattr(model, "hosted_mode", "heads") == "replicated":
        return hosted(megatron, hf, split.parameters)
    rules, tp = [], getattr(model, "tensor_model_parallel_size", 1)
    for name, division in split.parameters.items():
        dim = split.dim(name, tp)
        rows = None if dim is None else division.rows
        parts = _WHOLE if rows is None else division.parts
        rules.append(
            Rule(f"{megatron}.{name}", (f"{hf}.{name}",), dim, hf_parts=(parts,), parts=parts, rows=rows)
        )
    return rules


def embeddings(
    hf: Mapping[str, Any],
    keys: Collection[str],
    prefix: str = "model.",
    tied: bool | None = None,
    *,
    head: str = "lm_head.weight",
    copies: tuple[str, ...] = (),
    head_copies: tuple[str, ...] = (),
) -> list[Rule]:
    """`{prefix}embed_tokens` and the head, tied or not, for a config.json and the tensor names of its files.

    Args:
        tied: for a config with more than one `tie_word_embeddings`.
        head: the head's name.
        copies, head_copies: further names of the embedding and of the head; those in the files are loaded and
            exported. The files of a tied head may repeat it, too.
    """

    def repeated(*names: str) -> tuple[str, ...]:
        return tuple(name for name in names if name in keys)

    rows, embedding = hf["vocab_size"], f"{prefix}embed_tokens.weight"
    words, output = "embedding.word_embeddings.weight", "output_layer.weight"
    if not (hf["tie_word_embeddings"] if tied is None else tied):
        return [
            vocabulary(words, embedding, rows, also=repeated(*copies)),
            vocabulary(output, head, rows, also=repeated(*head_copies)),
        ]
    return [
        vocabulary(words, embedding, rows, also=repeated(head, *copies, *head_copies)),
        vocabulary(output, embedding, rows, exported=False),  # the last stage's own copy
    ]


def scope(megatron: str, hf: str, rules: Iterable[Rule], **indices: Sequence[int]) -> list[Rule]:
    """The rules below these two prefixes (empty: as they are); `i=range(48)` gives the values of `{i}`."""
    below = f"{hf}." if hf else ""
    return [
        replace(
            rule,
            megatron=f"{megatron}.{rule.megatron}" if megatron else rule.megatron,
            hf=tuple(below + name for name in rule.hf),
            also=tuple(below + name for name in rule.also),
            indices={**rule.indices, **indices},
        )
        for rule in rules
    ]


def _as_parts(value: Parts | str) -> Parts:
    return value if isinstance(value, Parts) else concatenated(value)
