"""Weight rules against slow, obvious references: tensors fused by loops, rows counted one by one."""

import random
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from isthmus.weights import (
    COLUMNS,
    ROWS,
    SHARED,
    Heads,
    HFTensor,
    Parts,
    Rule,
    WeightMap,
    atomic,
    collapse,
    column,
    fuse,
    hosted,
    ignore,
    passthrough,
    per,
    row,
    rows_by_parts,
    rows_over,
    same,
    scope,
    stacked_swiglu,
    swiglu,
    vocabulary,
)

WIDTH = 3  # columns of every tensor here


def rows(count: int, start: int = 0) -> Tensor:
    """(count, WIDTH), every number its own."""
    return torch.arange(start, start + count * WIDTH).view(count, WIDTH)


def pack(rule: Rule, hf: list[Tensor], rank: int, size: int) -> Tensor:
    """What `rank` of `size` holds, (R / size, WIDTH); -1 where no run writes."""
    local = -(-sum(map(len, hf)) // size)
    found = torch.full((local, WIDTH), -1)
    for run in rule.runs(local, rank, size):
        piece = hf[run.source][run.hf_start : run.hf_start + run.length]
        found[run.start : run.start + run.length] = piece
    return found


def unpack(rule: Rule, shards: list[Tensor], counts: list[int]) -> list[Tensor]:
    """The HF tensors, of `counts` rows, from every rank's shard: inverse of `pack`."""
    found = [torch.full((count, WIDTH), -1) for count in counts]
    for rank, shard in enumerate(shards):
        for run in rule.runs(len(shard), rank, len(shards)):
            piece = shard[run.start : run.start + run.length]
            found[run.source][run.hf_start : run.hf_start + run.length] = piece
    return found


def attention(heads: int, groups: int, head: int, gated: bool) -> Rule:
    q, kv = heads * head, groups * head
    if gated:
        hf = {"q": per(heads, "q gate"), "k": "k", "v": "v"}
        return fuse("qkv", hf, per(groups, "q gate k v"), q=q, gate=q, k=kv, v=kv)
    return fuse("qkv", {"q": "q", "k": "k", "v": "v"}, per(groups, "q k v"), q=q, k=kv, v=kv)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, heads: int, groups: int, head: int) -> Tensor:
    """Megatron's linear_qkv: per group all queries, all gates if there are any, the key, the value."""
    gated = len(q) == 2 * heads * head
    out = []
    for group in range(groups):
        members = range(group * (heads // groups), (group + 1) * (heads // groups))
        for h in members:
            out += [q[(h * 2 if gated else h) * head + i] for i in range(head)]
        for h in members if gated else ():
            out += [q[(h * 2 + 1) * head + i] for i in range(head)]
        out += [k[group * head + i] for i in range(head)]
        out += [v[group * head + i] for i in range(head)]
    return torch.stack(out)


SHAPES = [(4, 2, 8), (8, 8, 4), (6, 3, 2), (16, 2, 1), (4, 1, 4)]  # heads, groups, head


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("heads", "groups", "head"), SHAPES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_attention_is_fused_by_group_and_cut_as_one_run(
    heads: int, groups: int, head: int, gated: bool, size: int
) -> None:
    hf = [rows(heads * head * (1 + gated)), rows(groups * head, 1000), rows(groups * head, 2000)]
    rule = attention(heads, groups, head, gated)
    whole = fused_attention(*hf, heads=heads, groups=groups, head=head)
    if len(whole) % size:
        with pytest.raises(ValueError, match=f"over {size} tensor-parallel ranks"):
            rule.parts.shard(rule.rows, 0, size)
        return
    shards = [pack(rule, hf, rank, size) for rank in range(size)]
    for rank, shard in enumerate(shards):
        assert torch.equal(shard, whole.chunk(size)[rank])
    for found, expected in zip(unpack(rule, shards, list(map(len, hf))), hf, strict=True):
        assert torch.equal(found, expected)


def delta_net(key_heads: int, per_key: int, k: int, v: int) -> Rule:
    """`per_key` value heads to a key head, of `v` rows each."""
    in_proj = {"qkvz": per(key_heads, "q k v z"), "ba": per(key_heads, "b a")}
    heads, values = key_heads * per_key, key_heads * per_key * v
    return fuse(
        "in_proj",
        in_proj,
        "q k v z b a",
        q=key_heads * k,
        k=key_heads * k,
        v=values,
        z=values,
        b=heads,
        a=heads,
    )


def fused_delta_net(qkvz: Tensor, ba: Tensor, key_heads: int, per_key: int, k: int, v: int) -> list[Tensor]:
    """Megatron's parts q, k, v, z, b, a, each of all heads, taken from HF's rows of each key head."""
    parts: list[list[Tensor]] = [[] for _ in range(6)]
    block = 2 * k + 2 * per_key * v
    for head in range(key_heads):
        at = head * block
        for part, count in enumerate((k, k, per_key * v, per_key * v)):
            parts[part] += list(qkvz[at : at + count])
            at += count
        for part in range(2):
            at = head * 2 * per_key + part * per_key
            parts[4 + part] += list(ba[at : at + per_key])
    return [torch.stack(part) for part in parts]


@pytest.mark.parametrize(("key_heads", "per_key", "k", "v"), [(4, 2, 4, 3), (8, 1, 2, 2), (4, 3, 1, 5)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_delta_net_is_concatenated_and_each_part_divided(
    key_heads: int, per_key: int, k: int, v: int, size: int
) -> None:
    hf = [rows(key_heads * (2 * k + 2 * per_key * v)), rows(2 * key_heads * per_key, 5000)]
    rule = delta_net(key_heads, per_key, k, v)
    parts = fused_delta_net(*hf, key_heads=key_heads, per_key=per_key, k=k, v=v)
    shards = [pack(rule, hf, rank, size) for rank in range(size)]
    for rank, shard in enumerate(shards):
        assert torch.equal(shard, torch.cat([part.chunk(size)[rank] for part in parts]))
    for found, expected in zip(unpack(rule, shards, list(map(len, hf))), hf, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gate_and_up_are_each_divided(size: int) -> None:
    gate, up = rows(8), rows(8, 100)
    rule = swiglu("mlp", "mlp", 8)[0]
    assert rule.hf == ("mlp.gate_proj.weight", "mlp.up_proj.weight")
    shards = [pack(rule, [gate, up], rank, size) for rank in range(size)]
    for rank, shard in enumerate(shards):
        assert torch.equal(shard, torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]]))
    stacked = stacked_swiglu("mlp.experts.{e}", "mlp.experts", 8)[0]
    assert stacked.hf == ("mlp.experts.gate_up_proj[{e}]",)
    for rank, shard in enumerate(shards):
        assert torch.equal(shard, pack(stacked, [torch.cat([gate, up])], rank, size))


@pytest.mark.parametrize("seed", range(40))
def test_any_grouping_is_undone_exactly(seed: int) -> None:
    chance = random.Random(seed)
    names = "abcdef"[: chance.randint(1, 6)]
    groups, size = chance.choice([None, 1, 2, 3, 4, 8]), chance.choice([1, 2, 4])
    sizes = {name: 8 * 3 * chance.randint(1, 3) for name in names}  # any of these groups and ranks divides
    shuffled = chance.sample(names, len(names))
    cuts = sorted(chance.sample(range(1, len(names)), chance.randint(0, len(names) - 1)))
    held = [shuffled[a:b] for a, b in zip([0, *cuts], [*cuts, len(names)], strict=True)]
    hf_parts = {str(n): Parts(tuple(part), chance.choice([None, 2, 4, 8])) for n, part in enumerate(held)}
    rule = fuse("x", hf_parts, Parts(tuple(chance.sample(names, len(names))), groups), **sizes)

    hf = [rows(sum(sizes[name] for name in part), 1000 * n) for n, part in enumerate(held)]
    shards = [pack(rule, hf, rank, size) for rank in range(size)]
    whole = torch.cat(shards)
    assert whole.min() >= 0, "a row that no run writes"
    assert torch.equal(whole.flatten().sort().values, torch.cat(hf).flatten().sort().values)
    for found, expected in zip(unpack(rule, shards, list(map(len, hf))), hf, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("seed", range(10))
def test_runs_are_as_long_as_they_can_be(seed: int) -> None:
    chance = random.Random(seed)
    rule = delta_net(chance.choice([2, 4]), 2, chance.choice([2, 4]), 2)
    total = sum(rule.rows.values())
    found = rule.runs(total, 0, 1)
    for a, b in pairwise(found):
        assert b[:3] != (a.source, a.hf_start + a.length, a.start + a.length), f"{a} and {b} are one"


def test_padding_is_at_the_end_and_in_no_file() -> None:
    rule = vocabulary("embedding", "embed", 10)
    counts = [[(run.hf_start, run.start, run.length) for run in rule.runs(4, rank, 4)] for rank in range(4)]
    assert counts == [[(0, 0, 4)], [(4, 0, 4)], [(8, 0, 2)], []]
    assert rule.length(0, local=4, size=4) == 10
    with pytest.raises(ValueError, match="10 rows do not fit into 2 on each of 4 ranks"):
        rule.runs(2, 0, 4)


def test_columns_are_divided_as_rows_are() -> None:
    assert row("w", "w").runs(6, 2, 4) == ((0, 12, 0, 6),)
    assert same("w", "w").runs(6, 2, 4) == ((0, 0, 0, 6),)
    assert row("w", "w").length(0, local=6, size=4) == 24
    assert same("w", "w").length(0, local=6, size=4) == 6


def test_sizes_that_contradict_the_rule_are_refused() -> None:
    rule = fuse("fc1", {"g": "gate", "u": "up"}, "gate up", gate=8, up=8)
    with pytest.raises(ValueError, match="fc1: 16 rows are not 3 on each of 4 ranks"):
        rule.runs(3, 0, 4)
    with pytest.raises(ValueError, match=r"cannot divide rows \{'gate': 6, 'up': 6\} over 4"):
        fuse("fc1", {"g": "gate", "u": "up"}, "gate up", gate=6, up=6).runs(3, 0, 4)


def test_a_rule_has_the_same_parts_on_both_sides() -> None:
    with pytest.raises(ValueError, match="HF holds parts"):
        fuse("w", {"a": "x"}, "x y", x=2, y=2)
    with pytest.raises(ValueError, match="HF holds parts"):
        fuse("w", {"a": "x", "b": "x"}, "x", x=2)
    with pytest.raises(ValueError, match="rows are given for"):
        fuse("w", {"a": "x y"}, "x y", x=2)
    with pytest.raises(ValueError, match=r"cannot divide rows \{'y': 3\} into 2 groups"):
        fuse("w", {"a": "x y"}, per(2, "x y"), x=2, y=3)
    with pytest.raises(ValueError, match="only a rule of one HF tensor can have copies"):
        Rule("w", ("a", "b"), 0, (Parts(("x",)), Parts(("y",))), Parts(("x", "y")), also=("c",))


def test_two_rules_of_equal_rank_are_ambiguous() -> None:
    layers = scope("layers.{i}", "model.{i}", [same("norm", "norm")], i=range(4))
    with pytest.raises(LookupError, match=r"two rules of equal rank claim layers\.\{0\.\.3\}\.norm"):
        WeightMap([*layers, *layers])


def test_no_two_rules_write_one_tensor() -> None:
    copied = scope("layers.{i}", "model.{i}", [same("a", "norm"), same("b", "norm")], i=range(4))
    with pytest.raises(LookupError, match=r"two exported rules write model\.\{0\.\.3\}\.norm"):
        WeightMap(copied)
    stacked = [row("experts.{e}", "stack[{e}]"), row("again.{e}", "stack[{e}]")]
    with pytest.raises(LookupError, match="two exported rules write stack"):
        WeightMap(scope("", "", stacked, e=range(2)))


@pytest.mark.parametrize("reverse", [False, True])
def test_the_specific_rule_wins(reverse: bool) -> None:
    rules = [
        *scope("layers.{i}", "model.{i}", [same("norm", "norm")], i=range(3)),
        same("layers.1.norm", "special"),
    ]
    weights = WeightMap(rules[::-1] if reverse else rules)
    assert [weights.megatron[f"layers.{i}.norm"].hf[0].name for i in range(3)] == [
        "model.0.norm",
        "special",
        "model.2.norm",
    ]
    assert weights.cover(["model.0.norm", "model.1.norm", "model.2.norm"]).missing == ["special"]


def test_indices_are_filled_in_on_both_sides() -> None:
    experts = scope("mlp", "mlp", [row("experts.{e}.fc2", "experts.down[{e}]")], e=range(2))
    weights = WeightMap(scope("layers.{i}", "model.layers.{i}", experts, i=[3]))
    assert weights.megatron["layers.3.mlp.experts.1.fc2"].hf == (
        HFTensor("model.layers.3.mlp.experts.down", 1),
    )
    assert weights.hf == {
        "model.layers.3.mlp.experts.down": ["layers.3.mlp.experts.0.fc2", "layers.3.mlp.experts.1.fc2"]
    }
    with pytest.raises(LookupError, match=r"no values are given for \['i'\]"):
        WeightMap([same("layers.{i}.norm", "model.{i}.norm")])


def test_a_group_is_what_one_rule_holds_and_what_is_declared() -> None:
    experts = [
        fuse("{e}.fc1", {"{e}.gate": "gate", "{e}.up": "up"}, "gate up", gate=2, up=2),
        row("{e}.fc2", "down[{e}]"),
    ]
    latents = [same("q_down", "q_a"), same("norm", "norm"), same("kv_down", "kv_a")]
    weights = WeightMap(
        [
            *scope("mlp", "mlp", experts, e=range(2)),
            *scope("layers.{i}", "model.{i}.attn", latents, i=range(2)),
            atomic("attn.kv_a", "attn.q_a"),
        ]
    )
    groups: dict[str, set[str]] = {}
    for name in weights.hf:
        groups.setdefault(weights.group(name), set()).add(name)
    assert [*groups.values()] == [
        {"mlp.0.gate", "mlp.0.up"},
        {"mlp.1.gate", "mlp.1.up"},
        {"mlp.down"},
        {"model.0.attn.q_a", "model.0.attn.kv_a"},
        {"model.1.attn.q_a", "model.1.attn.kv_a"},
        {"model.0.attn.norm"},
        {"model.1.attn.norm"},
    ]


def test_a_declared_group_is_whole_and_in_no_other() -> None:
    rules = scope("layers.{i}", "model.{i}", [same(name, name) for name in "abc"], i=range(3))
    with pytest.raises(LookupError, match=r"no rule has them: model\.\{0\.\.2\}\.d;"):
        WeightMap([*rules, atomic("a", "d")])
    with pytest.raises(LookupError, match=r"two atomic groups have model\.0\.b"):
        WeightMap([*rules, atomic("a", "b"), atomic("b", "c")])
    assert WeightMap([*rules, atomic("d", "e")]).group("model.1.a") == "model.1.a"


def test_every_tensor_of_a_checkpoint_has_a_fate() -> None:
    weights = WeightMap(
        [
            column("a", "hf.a"),
            *hosted("mod", "hf.mod", ("x", "y")),
            ignore("hf.{i}.inv_freq", because="recomputed"),
            passthrough("mtp.*", because="not built"),
        ]
    )
    coverage = weights.cover(["hf.a", "hf.mod.x", "hf.7.inv_freq", "mtp.fc.weight", "hf.b", "hf.x.inv_freq"])
    assert coverage.loaded == {"hf.a", "hf.mod.x"}
    assert coverage.dropped == {"hf.7.inv_freq": "recomputed"}
    assert coverage.passed_through == {"mtp.fc.weight": "not built"}
    assert coverage.missing == ["hf.mod.y"]
    assert coverage.unknown == ["hf.b", "hf.x.inv_freq"]
    assert coverage.problems() == [
        "missing from the checkpoint (1): hf.mod.y",
        "no rule for checkpoint tensors (2): hf.b, hf.x.inv_freq",
    ]


def test_the_models_side_is_covered_by_the_same_call() -> None:
    second = vocabulary("output_layer", "hf.embedding", 4, exported=False)
    weights = WeightMap([vocabulary("embedding", "hf.embedding", 4), second, column("a", "hf.a")])
    coverage = weights.cover(["hf.embedding", "hf.a"], megatron=["embedding", "new.0.w", "new.1.w"])
    assert coverage.problems() == [
        "no rule for Megatron tensors (2): new.{0..1}.w",
        "no rank holds (1): a",
    ]
    assert weights.cover(megatron=["embedding"], all_ranks=False).problems() == []
    assert weights.cover(megatron=["embedding", "a"]).problems() == [], "a side not given is not looked at"


def test_misfits_are_a_line_for_each_kind() -> None:
    coverage = WeightMap([]).cover()
    coverage.misfit("is (1,), expected (2,)", "layers.0.w")
    coverage.misfit("is (1,), expected (2,)", "layers.1.w")
    coverage.misfit("w: 3 rows do not fit")
    assert coverage.problems() == ["layers.{0..1}.w: is (1,), expected (2,)", "w: 3 rows do not fit"]


def test_a_tied_head_is_written_where_the_source_repeats_it() -> None:
    tied = [
        vocabulary("embedding", "embed", 10, also=("head",)),
        vocabulary("output", "embed", 10, exported=False),
    ]
    assert WeightMap(tied).hf == {"embed": ["embedding"], "head": ["embedding"]}
    with pytest.raises(LookupError, match="no exported rule writes embed"):
        WeightMap(tied[1:])


COLLAPSED = [
    ([], []),
    (["a.b"], ["a.b"]),
    ([f"l.{i}.x" for i in range(48)], ["l.{0..47}.x"]),
    (["l.0.x", "l.2.x", "l.3.x", "l.4.x"], ["l.{0,2..4}.x"]),
    ([f"l.{i}.e.{e}.w" for i in range(3) for e in range(4)], ["l.{0..2}.e.{0..3}.w"]),
    (["l.0.e.0.w", "l.0.e.1.w", "l.1.e.0.w"], ["l.0.e.{0..1}.w", "l.1.e.0.w"]),
    (["l.0.fc1.w", "l.1.fc2.w"], ["l.0.fc1.w", "l.1.fc2.w"]),
    (["m[0]", "m[1]"], ["m[{0..1}]"]),
    (["b", "a.1", "b", "a.0"], ["b", "a.{0..1}"]),
]


@pytest.mark.parametrize(("names", "lines"), COLLAPSED)
def test_long_lists_of_names_are_shortened(names: list[str], lines: list[str]) -> None:
    assert collapse(names) == lines


@pytest.mark.parametrize("seed", range(10))
def test_a_shortened_list_names_what_was_given_and_nothing_else(seed: int) -> None:
    chance = random.Random(seed)
    names = {f"l.{chance.randint(0, 4)}.e.{chance.randint(0, 4)}.w" for _ in range(12)}
    found = []
    for line in collapse(names):
        layer, expert = (_values(piece) for piece in line.removeprefix("l.").removesuffix(".w").split(".e."))
        found += [f"l.{i}.e.{e}.w" for i in layer for e in expert]
    assert sorted(found) == sorted(names)


def _values(text: str) -> list[int]:
    """`{0..2,5}` -> [0, 1, 2, 5]"""
    values: list[int] = []
    for run in text.strip("{}").split(","):
        first, _, last = run.partition("..")
        values += range(int(first), int(last or first) + 1)
    return values


# Heads.

DIVIDED = Heads(
    counts={"num_attention_heads": 8, "num_query_groups": 2},
    parameters={
        "q.weight": ROWS,
        "k.weight": rows_over("num_query_groups"),
        "conv.weight": rows_by_parts(query=8, key=16),
        "norm.weight": SHARED,
        "o.weight": COLUMNS,
    },
)


def whole_rows(rule: Rule, name: str, length: int, tp: tuple[int, int], cp: tuple[int, int]) -> list[int]:
    """The rows of the whole HF tensor that a rank runs: those of its shard, by the rule, that are its own."""
    held = [0] * (length if rule.dim is None else length // tp[1])
    for run in rule.runs(len(held), *tp):
        held[run.start : run.start + run.length] = range(run.hf_start, run.hf_start + run.length)
    own = DIVIDED.own(name, len(held), tp, cp)
    return [row for piece in own for row in held[piece.start : piece.start + piece.length]]


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2), (2, 4)])
def test_ranks_run_their_heads_in_order_of_tensor_then_context_parallel_rank(tp: int, cp: int) -> None:
    model = SimpleNamespace(tensor_model_parallel_size=tp)
    rules = {rule.megatron: rule for rule in hosted("m", "h", split=DIVIDED, model=model)}
    for rank in range(tp * cp):
        place = (rank // cp, tp), (rank % cp, cp)
        heads = range(rank * 8 // (tp * cp), (rank + 1) * 8 // (tp * cp))
        group = rank * 2 // (tp * cp)
        groups = range(group, max(group + 1, (rank + 1) * 2 // (tp * cp)))

        def run(name: str, length: int, place: tuple = place) -> list[int]:
            return whole_rows(rules[f"m.{name}"], name, length, *place)

        assert run("q.weight", 24) == [row for head in heads for row in range(3 * head, 3 * head + 3)]
        assert run("o.weight", 24) == run("q.weight", 24)
        assert run("k.weight", 6) == [row for group in groups for row in range(3 * group, 3 * group + 3)]
        query, key = list(heads), [8 + row for head in heads for row in (2 * head, 2 * head + 1)]
        assert run("conv.weight", 24) == query + key
        assert run("norm.weight", 3) == []


def test_heads_without_a_division_have_a_reason() -> None:
    assert DIVIDED.problems(4, 2) == []
    assert DIVIDED.problems(3, 1) == [
        "cannot divide 8 num_attention_heads over tp x cp = 3 x 1 ranks",
        "cannot divide 2 num_query_groups over tp x cp = 3 x 1 ranks",
    ]


def test_heads_that_go_together_stay_together() -> None:
    paired = replace(DIVIDED, together=2)
    assert DIVIDED.problems(8, 1) == paired.problems(4, 1) == []
    assert paired.problems(8, 1) == [
        "cannot divide 8 num_attention_heads, 2 together, over tp x cp = 8 x 1 ranks"
    ]


def test_a_replicated_module_is_whole_on_every_rank() -> None:
    model = SimpleNamespace(tensor_model_parallel_size=2, hosted_mode="replicated")
    assert {rule.dim for rule in hosted("m", "h", split=DIVIDED, model=model)} == {None}
