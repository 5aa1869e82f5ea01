"""HF -> Megatron: each rank reads just the slices that its parameters are made of, without any collective."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from isthmus.checkpoint.collector import collector_paused
from isthmus.checkpoint.dtypes import main_dtype, name_of, rounds, same_bits
from isthmus.checkpoint.place import Place
from isthmus.checkpoint.reader import CheckpointReader
from isthmus.names import LiveTensor, live_tensors, unwrapped
from isthmus.weights import Bound, Coverage, HFTensor, Rule, Run, WeightMap, collapse


@dataclass(slots=True)
class LoadReport:
    """What a load did on this rank; the names are HF names unless said otherwise."""

    parameters: int = 0  # Megatron tensors filled
    hf_tensors: int = 0  # tensors of the checkpoint that a rule loads, over all ranks
    bytes_read: int = 0
    dtypes: dict[str, int] = field(default_factory=dict)  # dtype of the Megatron tensors -> how many
    passed_through: dict[str, str] = field(default_factory=dict)  # name -> reason
    dropped: dict[str, str] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)  # name -> the tensor that has the same content


@collector_paused()
def load(
    chunks: Sequence[nn.Module],
    weights: WeightMap,
    reader: CheckpointReader,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> LoadReport:
    """Fill the model `chunks` of this rank from the checkpoint; `advance` is told the bytes as they are read.

    Everything is checked first: ValueError lists all missing, unknown and misshapen tensors, and all
    roundings that nobody asked for, before a parameter is touched.
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
    begin = reader.bytes_read
    copy = _Copier(reader, place)
    with torch.no_grad():
        for bound, live in pairs:
            before = reader.bytes_read
            copy(bound, live.tensor)
            advance(reader.bytes_read - before)

    return LoadReport(
        parameters=len(held),
        hf_tensors=len(coverage.loaded),
        bytes_read=reader.bytes_read - begin,
        dtypes=dict(Counter(name_of(live.tensor.dtype) for live in held)),
        passed_through=coverage.passed_through,
        dropped=coverage.dropped,
        shared={copy.name: bound.hf[0].name for bound in weights.megatron.values() for copy in bound.also},
    )


class _Copier:
    """Copies HF slices along a rule's runs, which are worked out once a rule."""

    def __init__(self, reader: CheckpointReader, place: Place) -> None:
        self.reader = reader
        self.place = place
        self.runs: dict[tuple[int, int], tuple[Run, ...]] = {}

    def __call__(self, bound: Bound, tensor: torch.Tensor) -> None:
        rule = bound.rule
        dim = rule.dim or 0
        length = tensor.size(dim) if tensor.dim() else 1
        runs = self.runs.get((id(rule), length))
        if runs is None:
            runs = self.runs[id(rule), length] = rule.runs(length, *self.place.shard(rule))
        filled = 0
        for run in runs:
            source = self._slice(bound.hf[run.source], dim, run)
            target = tensor if run.length == length else tensor.narrow(dim, run.start, run.length)
            target.copy_(source)
            filled += run.length
            for copy in bound.also:
                self._check_same(bound.hf[run.source], copy, source, dim, run)
        if filled < length:
            tensor.narrow(dim, filled, length - filled).zero_()  # vocabulary padding

    def _slice(self, hf: HFTensor, dim: int, run: Run) -> torch.Tensor:
        part = slice(run.hf_start, run.hf_start + run.length)
        if dim == 0:
            return self.reader.slice(hf.name, rows=part, index=hf.index)
        return self.reader.slice(hf.name, cols=part, index=hf.index)

    def _check_same(self, hf: HFTensor, copy: HFTensor, source: torch.Tensor, dim: int, run: Run) -> None:
        if not same_bits(source, self._slice(copy, dim, run)):
            raise ValueError(
                f"{copy.name} differs from {hf.name}, but the config says that they are one"
                f" (tie_word_embeddings). Set tie_word_embeddings to false in config.json to keep both"
            )


def check(held: Sequence[LiveTensor], weights: WeightMap, reader: CheckpointReader, place: Place) -> Coverage:
    """What becomes of the checkpoint's tensors; ValueError lists why they cannot fill the tensors `held`."""
    coverage = weights.cover(reader.tensors)
    problems = coverage.problems()
    unmapped = [live.canonical for live in held if live.canonical not in weights.megatron]
    if unmapped:
        problems.append(
            f"no rule for these Megatron tensors ({len(unmapped)}): " + ", ".join(collapse(unmapped))
        )
    wanted = main_dtype(reader.tensors.values())
    shapes: dict[str, list[str]] = {}
    rounded: dict[str, list[str]] = {}
    right: set[tuple[Any, ...]] = set()  # experts are alike: one of a kind is looked at
    for live in held:
        bound = weights.megatron.get(live.canonical)
        if bound is None:
            continue
        rank, size = place.shard(bound.rule)
        for number, hf in enumerate(bound.hf):
            info = reader.tensors.get(hf.name)
            if info is None:
                continue
            found = info.shape if hf.index is None else info.shape[1:]
            kind = (id(bound.rule), number, live.tensor.shape, live.tensor.dtype, found, info.dtype)
            if kind in right:
                continue
            try:
                expected = hf_shape(bound.rule, number, tuple(live.tensor.shape), size)
                bound.rule.runs(live.tensor.size(bound.rule.dim or 0) if live.tensor.dim() else 1, rank, size)
            except ValueError as error:
                problems.append(str(error))
                continue
            if expected != found:
                shapes.setdefault(f"is {found}, the model's config makes it {expected}", []).append(hf.name)
            elif rounds(info.dtype, live.tensor.dtype) and info.dtype != wanted:
                dtypes = f"source is {name_of(info.dtype)}, parameter is {name_of(live.tensor.dtype)}"
                rounded.setdefault(f"{dtypes}, and no rule allows the rounding", []).append(live.canonical)
            else:
                right.add(kind)
    for found_problems in (shapes, rounded):
        problems += [f"{', '.join(collapse(names))}: {what}" for what, names in found_problems.items()]
    if problems:
        raise ValueError(f"cannot load {reader.folder}:\n  " + "\n  ".join(dict.fromkeys(problems)))
    return coverage


def hf_shape(rule: Rule, source: int, local: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Shape of HF tensor `source` (one row of it where stacked), where each of `size` ranks holds `local`."""
    if not local:
        return local
    dim = rule.dim or 0
    return (*local[:dim], rule.length(source, local[dim], size), *local[dim + 1 :])
