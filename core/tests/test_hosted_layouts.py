"""Hosted modules over tensor and context parallelism against the bare module, in float64, and what breaks it.

The module here has what makes real ones hard to divide: rows in two parts, query heads that share a key head,
a parameter shared by all heads, and a sum over all earlier tokens, so that a gradient lost or doubled shows.
"""

import itertools
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from isthmus.launch import run
from isthmus.testing.hosted import KINDS, batch, copies_apart, errors, fill

HIDDEN, HEADS, GROUPS, DIM = 12, 8, 2, 3
EXACT = 1e-10  # relative RMS in float64: sums over tokens and ranks in another order
NORM = 1e-6  # relative: a norm in float32 of gradients summed in another order
WRONG = 1e-2  # what a broken gradient exceeds by far
LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2)]  # (tp, cp)


class CausalHeads(nn.Module):
    """(b, s, h) -> (b, s, h): of each head, a gated, normed sum over itself and earlier tokens."""

    def __init__(self, hidden: int, heads: int, groups: int):
        super().__init__()
        self.heads, self.groups = heads, groups
        self.value_gate = nn.Linear(hidden, 2 * heads * DIM, bias=False)  # all values, then all gates
        self.key = nn.Linear(hidden, groups * DIM, bias=False)
        self.decay = nn.Parameter(torch.empty(heads))
        self.norm = nn.Parameter(torch.empty(DIM))
        self.out = nn.Linear(heads * DIM, hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        shape = (*hidden.shape[:2], -1, DIM)
        value, gate = (half.view(shape) for half in self.value_gate(hidden).chunk(2, dim=-1))
        key = self.key(hidden).view(shape).repeat_interleave(self.heads // self.groups, 2)
        mixed = (value * key * self.decay[:, None]).cumsum(1)
        normed = mixed * (mixed.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * self.norm
        return self.out((normed * gate.sigmoid()).flatten(2))


def bare_module() -> CausalHeads:
    module = CausalHeads(HIDDEN, HEADS, GROUPS).double()
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            numbers = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.copy_(numbers * 0.5)
    return module


def call(module: nn.Module, hidden: Tensor) -> Tensor:
    return module(hidden)


def whole(values: Mapping[str, Tensor], rank: int, size: int) -> Mapping[str, Tensor]:
    return values


def shards(values: Mapping[str, Tensor], rank: int, size: int) -> Mapping[str, Tensor]:
    """What a tensor-parallel rank holds, head by head; both of the two key heads where ranks are four."""
    heads = range(rank * HEADS // size, (rank + 1) * HEADS // size)
    groups = range(rank * GROUPS // size, (rank + 1) * GROUPS // size) if size <= GROUPS else range(GROUPS)
    values_gates = values["value_gate.weight"].view(2, HEADS, DIM, HIDDEN)
    return {
        "value_gate.weight": torch.cat([values_gates[part, head] for part in (0, 1) for head in heads]),
        "key.weight": torch.cat([values["key.weight"][g * DIM : (g + 1) * DIM] for g in groups]),
        "decay": torch.stack([values["decay"][head] for head in heads]),
        "norm": values["norm"],
        "out.weight": torch.cat([values["out.weight"][:, h * DIM : (h + 1) * DIM] for h in heads], dim=1),
    }


def hosted_module(tp: int, cp: int, sp: bool, mode: str = "heads", cp_layout: str = "zigzag", **config):
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    from isthmus.hosting.module import HostedModule
    from isthmus.weights import COLUMNS, ROWS, SHARED, Heads, rows_by_parts, rows_over

    class HostedHeads(HostedModule):
        def heads(self, config):
            rows = config.num_attention_heads * DIM
            return Heads(
                {
                    "num_attention_heads": config.num_attention_heads,
                    "num_query_groups": config.num_query_groups,
                },
                {
                    "value_gate.weight": rows_by_parts(value=rows, gate=rows),
                    "key.weight": rows_over("num_query_groups"),
                    "decay": ROWS,
                    "norm": SHARED,
                    "out.weight": COLUMNS,
                },
            )

        def build_hf_module(self, config):
            return CausalHeads(config.hidden_size, config.num_attention_heads, config.num_query_groups)

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(tp, context_parallel_size=cp)
        model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        sequence_parallel=sp,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        **{
            "num_attention_heads": HEADS,
            "num_query_groups": GROUPS,
            "params_dtype": torch.float64,
            "perform_initialization": False,
            **config,
        },
    )
    return HostedHeads(config, mode=mode, cp_layout=cp_layout)


def all_errors(tp: int, cp: int) -> dict[tuple, dict[str, float]]:
    """Of every mode, kind of batch, layout of sequences, and with sequence parallelism on and off."""
    found = {}
    for sp, mode, cp_layout, kind in itertools.product(
        (False, True) if tp > 1 else (False,),
        ("heads", "replicated"),
        ("zigzag", "contiguous") if cp > 1 else ("zigzag",),
        KINDS,
    ):
        hosted = hosted_module(tp, cp, sp, mode, cp_layout)
        local = shards if mode == "heads" else whole
        found[sp, mode, cp_layout, kind] = errors(hosted, bare_module(), call, local, kind)
    return found


@pytest.mark.parametrize(("tp", "cp"), LAYOUTS)
def test_output_and_every_gradient_equal_the_bare_module(tp, cp):
    for rank in run(tp * cp, all_errors, tp, cp):
        for case, found in rank.items():
            assert len(found) == 7
            assert max(found.values()) < EXACT, (case, found)


def broken(mutation: str, tp: int, cp: int, sp: bool, mode: str) -> dict[str, float]:
    import isthmus.hosting.division as division
    import isthmus.hosting.regions as regions
    from isthmus.hosting import sequence

    gather = regions.gather_from_sequence_parallel_region
    match mutation:
        case "context entry slices":
            regions.gather_over_context = lambda local, group, row: (
                gather(local, tensor_parallel_output_grad=False, group=group)
                if row.natural is None
                else gather(local, tensor_parallel_output_grad=False, group=group)[row.natural]
            )
        case "entry of repeated work sums":
            regions.gather_over_repeated_work = lambda local, group: gather(local, group=group)
        case "exit of repeated work drops the backward":
            regions.scatter_over_repeated_work = lambda full, group: full.chunk(group.size())[group.rank()]
        case "entry of divided work slices":
            regions.gather_from_sequence_parallel_region = lambda local, group: gather(
                local, tensor_parallel_output_grad=False, group=group
            )
        case "shared parameter is not summed":
            division.scale_gradient = lambda parameter, factor: parameter
        case "parameters are not marked as divided":
            division.set_tensor_model_parallel_attributes = lambda parameter, **kwargs: setattr(
                parameter, "tensor_model_parallel", False
            )
        case "boundaries are dropped":
            sequence.sequence_bounds = lambda packed, tokens, batch: [(0, tokens)]
    single = mutation == "parameters are not marked as divided"  # seen in the norm, which needs float32
    dtype = torch.float32 if single else torch.float64
    hosted = hosted_module(tp, cp, sp, mode, params_dtype=dtype)
    local = shards if mode == "heads" else whole
    return errors(hosted, bare_module().to(dtype), call, local, "packed")


@pytest.mark.parametrize(
    ("mutation", "layout", "wrong"),
    [
        ("context entry slices", (1, 2, False, "heads"), "input"),
        ("context entry slices", (1, 2, False, "replicated"), "input"),
        ("entry of repeated work sums", (2, 1, True, "replicated"), "input"),
        ("exit of repeated work drops the backward", (2, 1, True, "replicated"), "input"),
        ("entry of divided work slices", (2, 1, True, "heads"), "input"),
        ("shared parameter is not summed", (2, 1, True, "heads"), "norm"),
        ("shared parameter is not summed", (2, 1, False, "heads"), "norm"),
        ("parameters are not marked as divided", (2, 1, True, "heads"), "grad norm"),
        ("boundaries are dropped", (1, 2, False, "heads"), "output"),
    ],
)
def test_what_would_break_a_gradient_is_seen(mutation, layout, wrong):
    tp, cp, *_ = layout
    ranks = run(tp * cp, broken, mutation, *layout)
    # Not on all of them: the last tokens have no later ones from which a gradient could be lost.
    assert max(found[wrong] for found in ranks) > WRONG, ranks


def grad_norms(tp: int, cp: int) -> list[float]:
    return [
        errors(
            hosted_module(tp, cp, tp > 1, mode, params_dtype=torch.float32),
            bare_module().float(),
            call,
            shards if mode == "heads" else whole,
            "batch",
        )["grad norm"]
        for mode in ("heads", "replicated")
    ]


@pytest.mark.parametrize(("tp", "cp"), [(4, 1), (2, 2)])
def test_the_gradient_norm_counts_every_parameter_once(tp, cp):
    for rank in run(tp * cp, grad_norms, tp, cp):
        assert max(rank) < NORM


def drift(tp: int, cp: int, sp: bool, mode: str) -> float:
    """Differences of copies after 50 steps of Adam, and of the hosted module from initial values."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from isthmus.testing.hosted import _layer

    hosted = hosted_module(tp, cp, sp, mode, params_dtype=torch.float32)
    local = shards if mode == "heads" else whole
    fill(hosted, local(dict(bare_module().float().named_parameters()), hosted.tp_group.rank(), tp))
    model = DistributedDataParallel(hosted.config, DistributedDataParallelConfig(), _layer(hosted))
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2), [model])
    before = [parameter.detach().clone() for parameter in hosted.parameters()]
    for step in range(50):
        given = batch(hosted, "batch", seed=step)
        model.zero_grad_buffer()
        y = model(given.x[given.own])
        (y * given.upstream[given.own]).sum().backward()
        model.finish_grad_sync()
        _allreduce_non_tensor_model_parallel_grads([model], hosted.config)
        optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, hosted.parameters(), strict=True))
    return copies_apart(hosted)


@pytest.mark.parametrize("mode", ["heads", "replicated"])
@pytest.mark.parametrize("sp", [True, False])
def test_copies_stay_bitwise_equal(mode, sp):
    assert run(4, drift, 2, 2, sp, mode) == [0.0] * 4


def flops(tp: int, cp: int, mode: str) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    hosted = hosted_module(tp, cp, tp > 1, mode)
    given = batch(hosted, "batch")
    with FlopCounterMode(display=False) as counter:
        y, _ = hosted(given.x[given.own].requires_grad_())
        y.sum().backward()
    return counter.get_total_flops()


def test_heads_divide_the_work_and_replicas_repeat_it():
    (single,) = run(1, flops, 1, 1, "heads")
    divided = run(4, flops, 2, 2, "heads")
    key = 2 * GROUPS * DIM * HIDDEN * 64 * 3  # its two heads are not four: each rank computes one
    assert divided == [(single - key) // 4 + key // 2] * 4
    assert run(4, flops, 2, 2, "replicated") == [single] * 4


def initial_values(mode: str) -> dict[str, Tensor]:
    from isthmus.hosting.module import HostedModule

    def initialise(self, hf_module: nn.Module) -> None:
        for parameter in hf_module.parameters():
            nn.init.normal_(parameter)

    HostedModule.initialise = initialise
    torch.manual_seed(3)
    hosted = hosted_module(2, 1, True, mode, perform_initialization=True, params_dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in hosted.hosted.named_parameters()}


@pytest.mark.parametrize(("mode", "alike"), [("heads", {"norm"}), ("replicated", None)])
def test_shards_start_apart_and_copies_alike(mode, alike):
    first, second = run(2, initial_values, mode)
    equal = {name for name, value in first.items() if torch.equal(value, second[name])}
    assert equal == (first.keys() if alike is None else alike)


def sharded(tp: int, cp: int, mode: str) -> dict[str, list]:
    """Key -> (shape over all ranks, offset of this rank's part, whether it is the one to save)."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import apply_factories, is_main_replica

    hosted = hosted_module(tp, cp, tp > 1, mode)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = hosted.sharded_state_dict("layers.0.", (), {"dp_cp_group": group})
    apply_factories(state)
    found: dict[str, list] = {}
    for tensor in nested_values(state):
        place = (tensor.global_shape, tensor.global_offset, is_main_replica(tensor.replica_id))
        found.setdefault(tensor.key, []).append((*place, tensor.local_shape))
    return found


@pytest.mark.parametrize("mode", ["heads", "replicated"])
def test_a_checkpoint_has_the_same_keys_everywhere_and_every_number_once(mode):
    (single,) = run(1, sharded, 1, 1, "heads")
    ranks = run(4, sharded, 2, 2, mode)
    for rank in ranks:
        assert rank.keys() == single.keys()
    for key, [(shape, _, _, _)] in single.items():
        written = torch.zeros(shape, dtype=torch.int64)
        for rank in ranks:
            for whole_shape, offset, main, local in rank[key]:
                assert whole_shape == shape
                if main:
                    written[tuple(slice(o, o + n) for o, n in zip(offset, local, strict=True))] += 1
        assert bool((written == 1).all()), key


def build(cp: int, mode: str | None, **config) -> None:
    hosted_module(1, cp, False, mode, **config)


@pytest.mark.parametrize(
    ("mode", "config", "message"),
    [
        ("heads", {"num_attention_heads": 9, "num_query_groups": 9}, "9 num_attention_heads.*mode='replicat"),
        (None, {"num_attention_heads": 9, "num_query_groups": 9}, "9 num_attention_heads"),
        ("heads", {"num_attention_heads": 6, "num_query_groups": 3}, "3 num_query_groups"),
        ("divided", {}, "mode must be one of"),
    ],
)
def test_heads_that_do_not_divide_are_refused_and_never_replicated_silently(mode, config, message):
    with pytest.raises(ValueError, match=message):
        run(2, build, 2, mode, **config)
