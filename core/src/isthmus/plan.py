"""What each rank of a layout will hold, and whether every tensor of the checkpoint has its place there.

Megatron's own builder runs on the meta device, for one rank of each pipeline stage; the stage's other ranks
hold tensors of the same shapes. No weights are read and no memory is taken. torch's "fake" process group lets
one process be any rank. Megatron keeps groups in globals: call :func:`plan` in a process of its own, with
`isthmus.cpu` installed (a worker of `isthmus.launch`).
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from isthmus.bridge import AutoBridge
from isthmus.built import model_config_of
from isthmus.checkpoint.dtypes import other_kind
from isthmus.checkpoint.header import TensorInfo
from isthmus.layout import Layout
from isthmus.names import live_tensors
from isthmus.weights import Bound, Coverage, WeightMap

# (kind, pattern of canonical names); the first that matches counts.
KINDS = (
    ("vision", r"vision_model\."),
    ("MTP", r"mtp\."),
    ("embedding", r"embedding\."),
    ("head", r"output_layer\."),
    ("experts", r".*\.mlp\.experts\."),
    ("shared experts", r".*\.mlp\.shared_experts\."),
    ("router", r".*\.mlp\.router\."),
    ("MLP", r".*\.mlp\."),
    ("delta net", r".*\.self_attention\.(linear_attn|in_proj|conv1d|A_log|dt_bias|out_norm|out_proj)\b"),
    ("attention", r".*\.self_attention\."),
    ("norms", ""),
)
ADAM = 8  # bytes of Adam's two moments in float32, for each parameter


class Held(NamedTuple):
    """A tensor of one rank."""

    canonical: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return prod(self.shape)


def plan(bridge: AutoBridge, layout: Layout, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The document of `isthmus plan`. Replaces this process' groups.

    ValueError where the layout cannot divide the model; what is wrong with coverage is in `problems`.
    """
    stages, weights = [], None
    for stage in range(layout.pp):
        with _as_rank(layout, stage * (layout.world_size // layout.pp)):
            fields = {**layout.config_overrides(), **overrides, "perform_initialization": False}
            config = bridge.get_model_config(**fields)
            chunks = _build(bridge, config)
            weights = weights or bridge.weight_map(model_config_of(chunks))
            stages.append(
                [Held(t.canonical, tuple(t.tensor.shape), t.tensor.dtype) for t in live_tensors(chunks)]
            )
    assert weights is not None  # pp >= 1
    known = bridge.reader.tensors if bridge.folder is not None else None
    shapes, coverage = _cover(stages, weights, layout, known)
    loaded = [name for name in shapes if known is None or name in known]
    return {
        "model_type": bridge.hf_config.model_type,
        "layout": layout.as_dict(),
        "world_size": layout.world_size,
        "parameters": sum(prod(shapes[name]) for name in loaded),
        "checkpoint_parameters": None
        if known is None
        else sum(prod(known[n].shape) for n in loaded if n in known),
        "stages": [_describe(number, held, weights, layout) for number, held in enumerate(stages)],
        "problems": coverage.problems(),
    }


@contextmanager
def _as_rank(layout: Layout, rank: int) -> Iterator[None]:
    """Megatron's groups as `rank` of the layout sees them; nothing is ever sent through them."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        layout.initialize(gloo=False)
        yield
    finally:
        parallel_state.destroy_model_parallel()


def _build(bridge: AutoBridge, config: Any) -> list[Any]:
    """The rank's model chunks without storage. ValueError where Megatron refuses.

    Megatron's modules ask CUDA where to be; `isthmus.cpu` has it answer torch's default device.
    """
    try:
        with torch.device("meta"):
            return bridge.build_model(config)
    except AssertionError as error:
        raise ValueError(f"Megatron refuses this model on this layout: {error}") from error


def _cover(
    stages: list[list[Held]], weights: WeightMap, layout: Layout, known: Mapping[str, TensorInfo] | None
) -> tuple[dict[str, tuple[int, ...]], Coverage]:
    """The shape of every HF tensor that the stages' tensors make up, and the coverage of both sides.

    `known` are the checkpoint's tensors, None where there is only a config.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    names: set[str] = set()
    wrong: list[str] = []
    for held in {tensor.canonical: tensor for stage in stages for tensor in stage}.values():
        names.add(held.canonical)
        if held.canonical not in weights.megatron:
            continue
        everywhere = list(_on_all_expert_ranks(weights.megatron[held.canonical], weights, layout.ep))
        names.update(bound.megatron for bound in everywhere)
        rule = everywhere[0].rule
        size = 1 if rule.dim is None else layout.etp if rule.expert else layout.tp
        try:
            parts = [rule.hf_shape(number, held.shape, size) for number in range(len(rule.hf))]
            for rank in range(size):
                rule.runs(held.shape[rule.dim or 0] if held.shape else 1, rank, size)
        except ValueError as error:
            wrong.append(str(error))
            continue
        for bound in everywhere:
            for hf, shape in (*zip(bound.hf, parts, strict=True), *((copy, parts[0]) for copy in bound.also)):
                stacked = shapes.get(hf.name, (0,))[0]
                shapes[hf.name] = shape if hf.index is None else (max(stacked, hf.index + 1), *shape)
                dtypes[hf.name] = held.dtype
    coverage = weights.cover(known, megatron=names)
    for what in wrong:
        coverage.misfit(what)
    for name, shape in shapes.items():
        if known is not None and name in known and known[name].shape != shape:
            coverage.misfit(f"is {known[name].shape}, the config makes it {shape}", name)
    for name, dtype in dtypes.items():
        if known is not None and name in known and (strange := other_kind(known[name].dtype, dtype)):
            coverage.misfit(strange, name)
    return shapes, coverage


def _on_all_expert_ranks(bound: Bound, weights: WeightMap, ep: int) -> Iterator[Bound]:
    """The tensor; for an expert of the first of `ep` ranks, also those in its place on the others."""
    match = re.search(r"\.experts\.(\d+)\.", bound.megatron)
    if match is None or not bound.rule.expert:
        yield bound
        return
    each = len(bound.rule.indices["e"]) // ep
    for rank in range(ep):
        expert = f".experts.{int(match[1]) + rank * each}."
        yield weights.megatron[bound.megatron.replace(match[0], expert)]


def _describe(number: int, held: list[Held], weights: WeightMap, layout: Layout) -> dict[str, Any]:
    """What one rank of stage `number` holds. Optimizer: a distributed Adam with float32 main parameters."""
    kinds: Counter[str] = Counter()
    weight_bytes = optimizer = 0
    for tensor in held:
        kinds[next(kind for kind, pattern in KINDS if re.match(pattern, tensor.canonical))] += tensor.numel
        bound = weights.megatron.get(tensor.canonical)
        shared = layout.dp * layout.cp  # ranks that divide the optimizer's state among them
        if bound is not None and bound.rule.expert:
            shared = shared * layout.tp // (layout.ep * layout.etp)
        main = 0 if tensor.dtype == torch.float32 else 4
        weight_bytes += tensor.numel * tensor.dtype.itemsize
        optimizer += tensor.numel * (main + ADAM) // shared
    total = sum(kinds.values())
    layers = {int(m[1]) for t in held if (m := re.match(r"decoder\.layers\.(\d+)\.", t.canonical))}
    return {
        "stage": number,
        "layers": sorted(layers),
        "tensors": len(held),
        "parameters": total,
        "by_kind": {kind: kinds[kind] for kind, _ in KINDS if kinds[kind]},
        "bytes": weight_bytes,
        "gradient_bytes": 4 * total,
        "optimizer_bytes": optimizer,
        "total_bytes": weight_bytes + 4 * total + optimizer,
    }
