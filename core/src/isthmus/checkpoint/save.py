"""Writing an HF folder: each owner its own files, in a staging folder that becomes the target at once."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from isthmus.checkpoint.dtypes import name_of
from isthmus.checkpoint.export import ExportPlan
from isthmus.checkpoint.folder import Staging, carry_side_files
from isthmus.checkpoint.gather import agree, from_first
from isthmus.checkpoint.writer import (
    OutputTensor,
    ShardWriter,
    parse_size,
    shard_names,
    split_files,
    write_index,
)
from isthmus.config_text import write_config
from isthmus.weights import Coverage, collapse

# What stops one rank. The others are told before it is raised: none may wait for one that has given up.
_FAILURES = (OSError, ValueError, LookupError)


class _File(NamedTuple):
    """A file to come: the rank that writes it, and its tensors."""

    name: str
    owner: int
    tensors: list[OutputTensor]


def save(
    source: Any,
    planned: ExportPlan,
    target: Path,
    *,
    coverage: Coverage,
    config_changes: Mapping[str, Any],
    max_shard_size: int | str,
    overwrite: bool,
    passthrough: bool,
    copied_dtype: torch.dtype | None,
    advance: Callable[[int], None],
) -> None:
    """Write the planned tensors and everything else of `source` (a bridge) to `target`. Collective.

    `copied_dtype` is that of the tensors passed through, None for the source's own.

    ValueError or OSError on every rank alike; then the target is as it was.
    """
    names = coverage.passed_through if passthrough else ()
    copied = {name: copied_dtype or source.reader.tensors[name].dtype for name in names}
    _check_names(planned.outputs, source, coverage, copied)
    files = _files(_owned(planned, source, copied), parse_size(max_shard_size))
    staged: list[Staging] = []  # on the first rank

    def stage() -> Path:
        sources = [source.folder] if source.folder is not None else []
        nbytes = sum(tensor.nbytes for file in files for tensor in file.tensors)
        staged.append(Staging(target, overwrite, nbytes=nbytes, sources=sources))
        return staged[0].path

    folder = from_first(stage)
    try:
        agree(_write(planned, source, files, copied, folder, advance))
        agree(_finish(source, files, staged[0], config_changes) if staged else None)
    except BaseException:
        for staging in staged:
            staging.discard()
        raise


def _write(
    planned: ExportPlan,
    source: Any,
    files: Sequence[_File],
    copied: Mapping[str, torch.dtype],
    folder: Path,
    advance: Callable[[int], None],
) -> Exception | None:
    """This rank's files; the error that stopped it, if any. The collective is run to its end in any case."""
    error: Exception | None = None
    writers: dict[str, ShardWriter] = {}
    try:
        for file in files:
            if file.owner == planned.rank:
                writer = ShardWriter(folder / file.name, file.tensors)
                writers |= dict.fromkeys((tensor.name for tensor in file.tensors), writer)
    except _FAILURES as failure:
        error = failure
    for name, index, parts in planned.pieces():
        if error is None:
            error = _write_one(writers[name], name, parts, index)
            advance(sum(part.nbytes for part in parts))
    for name in copied:
        if error is None and name in writers:
            try:
                tensor = source.reader.slice(name).to(copied[name])
            except _FAILURES as failure:
                error = failure
                continue
            error = _write_one(writers[name], name, [tensor], None)
            advance(tensor.nbytes)
    for writer in dict.fromkeys(writers.values()):
        try:
            writer.close(partial=error is not None)
        except _FAILURES as failure:
            error = error or failure
    return error


def _write_one(
    writer: ShardWriter, name: str, parts: Sequence[torch.Tensor], index: int | None
) -> Exception | None:
    try:
        writer.write(name, *parts, index=index)
    except _FAILURES as failure:
        return failure
    return None


def _finish(
    source: Any, files: Sequence[_File], staging: Staging, changes: Mapping[str, Any]
) -> Exception | None:
    """Index, config and side files, then the rename; on the first rank only."""
    try:
        write_index(staging.path, {file.name: file.tensors for file in files})
        if source.folder is not None:
            carry_side_files(source.folder, staging)
        text = write_config(source.config_text, changes, only_stated=True)
        (staging.path / "config.json").write_text(text, encoding="utf-8")
        staging.publish()
    except _FAILURES as failure:
        return failure
    return None


def _check_names(outputs: Iterable[str], source: Any, coverage: Coverage, copied: Iterable[str]) -> None:
    """ValueError where the files to come would not hold exactly the source's tensors, less those dropped."""
    if source.folder is None:
        return
    expected = coverage.loaded | set(copied)
    found = set(outputs) | set(copied)
    problems = coverage.problems()
    if expected - found:
        problems.append("in the source, not exported: " + ", ".join(collapse(sorted(expected - found))))
    if found - expected:
        problems.append("exported, not in the source: " + ", ".join(collapse(sorted(found - expected))))
    if problems:
        raise ValueError(f"the export would not match {source.folder}:\n  " + "\n  ".join(problems))


def _owned(
    planned: ExportPlan, source: Any, copied: Mapping[str, torch.dtype]
) -> dict[int, list[OutputTensor]]:
    """All tensors to write, by owner; those copied from the source go to who has the least to write."""
    owned: dict[int, list[OutputTensor]] = {rank: [] for rank in range(planned.world_size)}
    for name, tensor in planned.outputs.items():
        owned[planned.owners[name]].append(tensor)
    load = {rank: sum(tensor.nbytes for tensor in tensors) for rank, tensors in owned.items()}
    for name, dtype in copied.items():
        owner = min(load, key=load.__getitem__)
        owned[owner].append(OutputTensor(name, dtype, source.reader.tensors[name].shape))
        load[owner] += owned[owner][-1].nbytes
    return owned


def _files(owned: Mapping[int, list[OutputTensor]], max_shard_size: int) -> list[_File]:
    """The files to write, each of one owner; numbered by owner, alike on every rank."""
    cut = [(owner, file) for owner, mine in owned.items() for file in split_files(mine, max_shard_size)]
    names = shard_names(len(cut))
    return [_File(name, owner, tensors) for name, (owner, tensors) in zip(names, cut, strict=True)]


def config_changes(dtype: torch.dtype | None, coverage: Coverage, passthrough: bool) -> dict[str, Any]:
    """What an export changes where config.json states it: its dtype, and the counts of what it leaves out."""
    changes: dict[str, Any] = {} if dtype is None else {"dtype": name_of(dtype)}
    return changes if passthrough else changes | dict.fromkeys(coverage.counts, 0)
