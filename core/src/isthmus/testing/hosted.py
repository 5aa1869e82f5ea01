"""A hosted module against the bare Hugging Face module, on this rank's share of one batch.

The bare module runs every sequence by itself, whole, in one process. The hosted one runs in Megatron's DDP
and with Megatron's reductions, as in training. For every rank of initialised process groups alike.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.testing.numerics import rel_rms
from isthmus.zigzag import order

BATCH, TOKENS = 2, 32
KINDS = ("batch", "packed", "padded")

type Call = Callable[[nn.Module, Tensor], Tensor]  # the bare module on (b, s, h), a causal function of s
type Local = Callable[[Mapping[str, Tensor], int, int], Mapping[str, Tensor]]  # (whole, tp rank, size)


@dataclass(frozen=True, slots=True)
class Batch:
    """A row of T tokens over all ranks, in natural order.

    `bounds` are where sequences lie, `real` the tokens of each that are no padding.
    """

    x: Tensor  # (T, B, H)
    upstream: Tensor  # (T, B, H), gradient of the output; 0 for padding
    bounds: tuple[tuple[int, int], ...]
    real: tuple[int, ...]
    packed: Any  # PackedSeqParams, or None
    own: Tensor  # (T / ranks,) the tokens of this rank


def batch(hosted: Any, kind: str, seed: int = 0) -> Batch:
    """Random numbers; no length of "packed" divides more than it must, "padded" ends in empty sequences."""
    from megatron.core.packed_seq_params import PackedSeqParams

    groups, config = hosted.groups, hosted.config
    cp = groups.cp.size()
    unit = 2 * cp if hosted.cp_layout == "zigzag" and cp > 1 else 1
    lengths = [TOKENS] if kind == "batch" else [5 * unit, unit, 2 * unit]
    tail = 4 * unit if kind == "padded" else 0
    starts = [0, *accumulate(lengths)]
    total = starts[-1] + tail
    bounds = list(pairwise(starts)) + ([(starts[-1], total)] if tail else [])
    real = [length - (kind == "padded" and length > 1) for length in lengths] + [0] * bool(tail)
    packed = None
    if kind != "batch":
        empty = [starts[-1]] * (2 if kind == "padded" else 0)
        offsets = torch.tensor([*starts, *empty], dtype=torch.int32)
        counted = offsets
        if kind == "padded":
            counts = [0, *accumulate(real[: len(lengths)])]
            counted = torch.tensor([*counts, *([counts[-1]] * len(empty))], dtype=torch.int32)
        both = (counted, counted) if kind == "packed" else (counted, counted, offsets, offsets)
        names = ("q", "kv", "q_padded", "kv_padded")
        given: Any = {f"cu_seqlens_{name}": starts for name, starts in zip(names, both, strict=False)}
        packed = PackedSeqParams(qkv_format="thd", **given)
    generator = torch.Generator().manual_seed(seed)
    shape = (total, BATCH if packed is None else 1, config.hidden_size)
    x, upstream = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    x, upstream = x.to(config.params_dtype), upstream.to(config.params_dtype)
    for (start, stop), count in zip(bounds, real, strict=True):
        upstream[start + count : stop] = 0
    own = order(bounds, cp, hosted.cp_layout).chunk(cp)[groups.cp.rank()]
    if groups.sequence_parallel:
        own = own.chunk(groups.tp.size())[groups.tp.rank()]
    return Batch(x, upstream, tuple(bounds), tuple(real), packed, own)


def random_values(bare: nn.Module) -> nn.Module:
    """The same module with other numbers in every parameter, of spread 0.3."""
    with torch.no_grad():
        for seed, parameter in enumerate(bare.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.3)
    return bare


def expected(bare: nn.Module, call: Call, given: Batch) -> tuple[Tensor, Tensor]:
    """(output, input gradient) of the bare module, both 0 for padding; its parameters get their gradients."""
    x = given.x.clone().requires_grad_()
    y = torch.zeros_like(given.x)
    for (start, _), count in zip(given.bounds, given.real, strict=True):
        if count:
            inside = slice(start, start + count)
            output = call(bare, x[inside].transpose(0, 1)).transpose(0, 1)
            (output * given.upstream[inside]).sum().backward()
            y[inside] = output.detach()
    assert x.grad is not None
    return y, x.grad


def errors(hosted: Any, bare: nn.Module, call: Call, local: Local, kind: str) -> dict[str, float]:
    """rel_rms of "output", "input" gradient and every parameter's gradient; "grad norm" relative. Collective.

    `hosted` gets the numbers of `bare`. In float64 there is no "grad norm": Megatron's optimizers do not take
    it. `config.calculate_per_token_loss` must be set, or Megatron averages over context parallelism.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads

    tp = hosted.groups.tp
    fill(hosted, local({name: p.detach() for name, p in bare.named_parameters()}, tp.rank(), tp.size()))
    given = batch(hosted, kind)
    bare.zero_grad()
    y_bare, x_grad = expected(bare, call, given)
    layer = _layer(hosted)
    model = DistributedDataParallel(hosted.config, DistributedDataParallelConfig(), layer)
    model.zero_grad_buffer()
    x = given.x[given.own].clone().requires_grad_()
    y = model(x, packed_seq_params=given.packed)
    (y * given.upstream[given.own]).sum().backward()
    model.finish_grad_sync()
    _allreduce_non_tensor_model_parallel_grads([model], hosted.config)
    assert x.grad is not None
    real = given.upstream[given.own] != 0
    found = {
        "output": rel_rms(y.detach() * real, y_bare[given.own]),
        "input": rel_rms(x.grad, x_grad[given.own]),
    }
    grads = {name: p.grad for name, p in bare.named_parameters() if p.grad is not None}
    held = local(grads, tp.rank(), tp.size())
    for name, parameter in hosted.hosted.named_parameters():
        found[name] = rel_rms(parameter.main_grad, held[name])
    if hosted.config.params_dtype == torch.float32:
        whole = torch.cat([grad.flatten() for grad in grads.values()]).norm().item()
        found["grad norm"] = abs(_norm(model) - whole) / whole
    return found


def fill(hosted: Any, values: Mapping[str, Tensor]) -> None:
    """Give the hosted module's parameters the `values` that this rank holds."""
    parameters = dict(hosted.hosted.named_parameters())
    assert parameters.keys() == values.keys(), (parameters.keys(), values.keys())
    with torch.no_grad():
        for name, parameter in parameters.items():
            assert parameter.shape == values[name].shape, (name, parameter.shape, values[name].shape)
            parameter.copy_(values[name])


def copies_apart(hosted: Any) -> float:
    """Largest difference between tensor-parallel copies of one parameter. Collective."""
    group, apart = hosted.groups.tp, 0.0
    for parameter in hosted.parameters():
        if not parameter.tensor_model_parallel:
            copies = [torch.empty_like(parameter.data) for _ in range(group.size())]
            torch.distributed.all_gather(copies, parameter.data.contiguous(), group=group)
            apart = max([apart, *((each - copies[0]).abs().max().item() for each in copies)])
    return apart


def _norm(model: Any) -> float:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.0), [model])
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def _layer(hosted: Any) -> Any:
    """A Megatron module around the hosted one, whose output is a tensor."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import MegatronModule

    class Layer(MegatronModule):
        def __init__(self) -> None:
            super().__init__(hosted.config)
            self.pg_collection = ProcessGroupCollection.use_mpu_process_groups()
            self.self_attention = hosted

        def forward(self, hidden: Tensor, **kwargs: Any) -> Tensor:
            output, bias = self.self_attention(hidden, attention_mask=None, **kwargs)
            assert bias is None
            return output

    return Layer()
