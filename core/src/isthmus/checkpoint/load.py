"""HF -> Megatron: each rank reads just the slices that its parameters are made of, without any collective."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from isthmus.checkpoint.dtypes import main_dtype, name_of, narrower, other_kind, overflows, rounds, same_bits
from isthmus.checkpoint.place import Place
from isthmus.checkpoint.reader import CheckpointReader
from isthmus.names import LiveTensor, live_tensors, unwrapped
from isthmus.weights import Bound, Coverage, HFTensor, Rule, Run, WeightMap, collapse


@dataclass(slots=True)
class LoadReport:
    """What a load did on this rank; the names are HF names unless said otherwise."""

    parameters: int = 0  # Megatron tensors filled
    hf_tensors: int = 0  # tensors of the checkpoint that a rule loads, over all ranks
    bytes_read: int = 0  # to fill them; copies are compared before
    dtypes: dict[str, int] = field(default_factory=dict)  # dtype of the Megatron tensors -> how many
    passed_through: dict[str, str] = field(default_factory=dict)  # name -> reason
    dropped: dict[str, str] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)  # see :func:`shared`


def load(
    chunks: Sequence[nn.Module],
    weights: WeightMap,
    reader: CheckpointReader,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> LoadReport:
    """Fill the model `chunks` of this rank from the checkpoint; `advance` is told the bytes as they are read.

    Everything is checked first: ValueError lists all missing, unknown and misshapen tensors, all roundings
    that nobody asked for, and all copies that differ, before a parameter is touched; and at the end all
    tensors of which finite values became infinite in the model's dtype.
    """
    place = Place.of(unwrapped(chunks[0]))
    held = list(live_tensors(chunks))
    coverage = check(held, weights, reader, place)

    order = {name: position for position, name in enumerate(reader.tensors)}
    pairs = sorted(
        ((weights.megatron[live.canonical], live) for live in held),
        key=lambda pair: order[pair[0].hf[0].name],
    )
    reader.will_need((tensor.name, tensor.index) for bound, _ in pairs for tensor in bound.hf)
    copy = _Copier(reader, place)
    copy.check_copies(pairs)
    begin = reader.bytes_read
    with torch.no_grad():
        for bound, live in pairs:
            before = reader.bytes_read
            copy(bound, live.tensor)
            advance(reader.bytes_read - before)
    copy.check_range()

    return LoadReport(
        parameters=len(held),
        hf_tensors=len(coverage.loaded),
        bytes_read=reader.bytes_read - begin,
        dtypes=dict(Counter(name_of(live.tensor.dtype) for live in held)),
        passed_through=coverage.passed_through,
        dropped=coverage.dropped,
        shared=shared(weights),
    )


def shared(weights: WeightMap) -> dict[str, str]:
    """Name -> the HF tensor that has the same content: a tied head, by its HF name where the files repeat it.

    Where they do not, by Megatron's name: only some layouts hold it, and it is not exported.
    """
    bounds = weights.megatron.values()
    repeated = {copy.name: bound.hf[0].name for bound in bounds for copy in bound.also}
    own = {name: bound.hf[0].name for name, bound in weights.megatron.items() if not bound.rule.exported}
    return repeated or own


class _Copier:
    """Copies HF slices along a rule's runs, which are worked out once a rule."""

    def __init__(self, reader: CheckpointReader, place: Place) -> None:
        self.reader = reader
        self.place = place
        self.runs: dict[tuple[int, int], tuple[Run, ...]] = {}
        self.infinite: dict[str, torch.dtype] = {}  # HF tensors that this dtype was too narrow for

    def __call__(self, bound: Bound, tensor: torch.Tensor) -> None:
        dim = bound.rule.dim or 0
        length = tensor.size(dim) if tensor.dim() else 1
        filled = 0
        for run in self._runs(bound.rule, tensor):
            target = tensor if run.length == length else tensor.narrow(dim, run.start, run.length)
            hf = bound.hf[run.source]
            self._slice(hf, tensor, dim, run, into=target)
            filled += run.length
            narrows = narrower(self.reader.tensors[hf.name].dtype, target.dtype)
            if narrows and target.isinf().any():
                source = self._slice(hf, tensor, dim, run)
                if overflows(source, target.to(source.device)):
                    self.infinite[hf.name] = target.dtype
        if filled < length:
            assert bound.rule.padded, f"{bound.megatron}: {filled} of {length} rows have a source"
            tensor.narrow(dim, filled, length - filled).zero_()

    def check_range(self) -> None:
        """ValueError where finite values have become infinite."""
        if self.infinite:
            dtypes = ", ".join(sorted({name_of(dtype) for dtype in self.infinite.values()}))
            raise ValueError(
                f"{self.reader.folder}: finite values become infinite in {dtypes} ({len(self.infinite)}"
                f" tensors): {', '.join(collapse(sorted(self.infinite)))}; choose a params_dtype of a larger"
                " range (--dtype)"
            )

    def check_copies(self, pairs: Sequence[tuple[Bound, LiveTensor]]) -> None:
        """ValueError where a tensor that the checkpoint repeats is not the same in both places."""
        different = {
            (copy.name, bound.hf[0].name)
            for bound, live in pairs
            for copy in bound.also
            for run in self._runs(bound.rule, live.tensor)
            if not same_bits(
                *(self._slice(hf, live.tensor, bound.rule.dim or 0, run) for hf in (bound.hf[0], copy))
            )
        }
        if different:
            raise ValueError(
                ", ".join(f"{copy} differs from {name}" for copy, name in sorted(different))
                + ", and both are of one Megatron tensor. If one is the head and the other the embedding, set"
                " tie_word_embeddings to false in config.json; of two heads, remove the one not meant"
            )

    def _runs(self, rule: Rule, tensor: torch.Tensor) -> tuple[Run, ...]:
        length = tensor.size(rule.dim or 0) if tensor.dim() else 1
        runs = self.runs.get((id(rule), length))
        if runs is None:
            runs = self.runs[id(rule), length] = rule.runs(length, *self.place.shard(rule))
        return runs

    def _slice(
        self, hf: HFTensor, target: torch.Tensor, dim: int, run: Run, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The run's rows (or columns) of an HF tensor, or all of one that is a single number."""
        if target.dim() == 0:
            return self.reader.slice(hf.name, index=hf.index, into=into)
        part = slice(run.hf_start, run.hf_start + run.length)
        if dim == 0:
            return self.reader.slice(hf.name, rows=part, index=hf.index, into=into)
        return self.reader.slice(hf.name, cols=part, index=hf.index, into=into)


def check(held: Sequence[LiveTensor], weights: WeightMap, reader: CheckpointReader, place: Place) -> Coverage:
    """What becomes of the checkpoint's tensors; ValueError lists why they cannot fill the tensors `held`."""
    names = [live.canonical for live in held]
    coverage = weights.cover(reader.tensors, megatron=names, all_ranks=False)
    wanted = main_dtype(reader.tensors.values())
    right: set[tuple[Any, ...]] = set()  # experts are alike: one of a kind is looked at
    for live in held:
        bound = weights.megatron.get(live.canonical)
        if bound is None:
            continue
        rank, size = place.shard(bound.rule)
        for number, hf in enumerate((*bound.hf, *bound.also)):
            info = reader.tensors.get(hf.name)
            if info is None:
                continue
            source = number if number < len(bound.hf) else 0  # a copy is of a rule's only HF tensor
            original = reader.tensors.get(bound.hf[source].name, info)
            rows = () if hf.index is None else (len(weights.hf[hf.name]),)
            stored = (info.shape, info.dtype, original.dtype)
            kind = (id(bound.rule), number, live.tensor.shape, live.tensor.dtype, rows, stored)
            if kind in right:
                continue
            try:
                expected = (*rows, *bound.rule.hf_shape(source, tuple(live.tensor.shape), size))
                bound.rule.runs(live.tensor.size(bound.rule.dim or 0) if live.tensor.dim() else 1, rank, size)
            except ValueError as error:
                coverage.misfit(str(error))
                continue
            dtypes = f"source is {name_of(info.dtype)}, parameter is {name_of(live.tensor.dtype)}"
            if expected != info.shape:
                coverage.misfit(f"is {info.shape}, the model's config makes it {expected}", hf.name)
            elif original.dtype != info.dtype:
                other = f"{original.name}, which it repeats, is {name_of(original.dtype)}"
                coverage.misfit(f"is {name_of(info.dtype)}, {other}", hf.name)
            elif strange := other_kind(info.dtype, live.tensor.dtype):
                coverage.misfit(strange, hf.name)
            elif rounds(info.dtype, live.tensor.dtype) and info.dtype != wanted:
                coverage.misfit(f"{dtypes}, and no rule allows the rounding", live.canonical)
            else:
                right.add(kind)
    if problems := coverage.problems():
        raise ValueError(f"cannot load {reader.folder}:\n  " + "\n  ".join(problems))
    return coverage
