"""Writing an HF folder: each owner its own files, in a staging folder that becomes the target at once."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from isthmus.checkpoint.collector import collector_paused
from isthmus.checkpoint.export import ExportPlan, Output
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


@collector_paused()
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
    outputs = _with_copies(planned, source, copied)
    files = _files(outputs, parse_size(max_shard_size))
    staged: list[Staging] = []  # on the first rank

    def stage() -> Path:
        sources = [source.folder] if source.folder is not None else []
        nbytes = sum(output.nbytes for output in outputs)
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
    files: Mapping[str, list[Output]],
    copied: Mapping[str, torch.dtype],
    folder: Path,
    advance: Callable[[int], None],
) -> Exception | None:
    """This rank's files; the error that stopped it, if any. The collective is run to its end in any case."""
    error: Exception | None = None
    writers: dict[str, ShardWriter] = {}
    try:
        for file, outputs in files.items():
            if outputs[0].owner == planned.rank:
                writer = ShardWriter(folder / file, [OutputTensor(o.name, o.dtype, o.shape) for o in outputs])
                writers |= dict.fromkeys((output.name for output in outputs), writer)
    except OSError as failure:
        error = failure
    for name, index, tensor in planned.pieces():
        if error is None:
            error = _write_one(writers[name], name, tensor, index)
            advance(tensor.nbytes)
    for name in copied:
        if error is None and name in writers:
            tensor = source.reader.slice(name).to(copied[name])
            error = _write_one(writers[name], name, tensor, None)
            advance(tensor.nbytes)
    for writer in dict.fromkeys(writers.values()):
        try:
            writer.close(partial=error is not None)
        except (OSError, ValueError) as failure:
            error = error or failure
    return error


def _write_one(writer: ShardWriter, name: str, tensor: torch.Tensor, index: int | None) -> Exception | None:
    try:
        writer.write(name, tensor, index)
    except (OSError, ValueError) as failure:
        return failure
    return None


def _finish(
    source: Any, files: Mapping[str, list[Output]], staging: Staging, changes: Mapping[str, Any]
) -> Exception | None:
    """Index, config and side files, then the rename; on the first rank only."""
    try:
        write_index(
            staging.path,
            {
                file: [OutputTensor(o.name, o.dtype, o.shape) for o in outputs]
                for file, outputs in files.items()
            },
        )
        if source.folder is not None:
            carry_side_files(source.folder, staging)
        text = write_config(source.config_text, dict(changes))
        (staging.path / "config.json").write_text(text, encoding="utf-8")
        staging.publish()
    except (OSError, ValueError) as failure:
        return failure
    return None


def _check_names(
    outputs: Mapping[str, Output], source: Any, coverage: Coverage, copied: Iterable[str]
) -> None:
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


def _with_copies(planned: ExportPlan, source: Any, copied: Mapping[str, torch.dtype]) -> list[Output]:
    """All tensors to write; those copied from the source go to the ranks with the least to write."""
    outputs = list(planned.outputs.values())
    load = dict.fromkeys(range(planned.world_size), 0)
    for output in outputs:
        load[output.owner] += output.nbytes
    for name, dtype in copied.items():
        owner = min(load, key=load.__getitem__)
        outputs.append(Output(name, source.reader.tensors[name].shape, dtype, owner))
        load[owner] += outputs[-1].nbytes
    return outputs


def _files(outputs: list[Output], max_shard_size: int) -> dict[str, list[Output]]:
    """File name -> its tensors, all of one owner; numbered by owner, alike on every rank."""
    owned: dict[int, list[Output]] = {}
    for output in outputs:
        owned.setdefault(output.owner, []).append(output)
    files = [file for _, mine in sorted(owned.items()) for file in split_files(mine, max_shard_size)]
    return dict(zip(shard_names(len(files)), files, strict=True))


def config_changes(text: str, dtype: torch.dtype | None) -> dict[str, Any]:
    """What an export in another dtype changes in config.json."""
    if dtype is None:
        return {}
    raw = json.loads(text)
    plain = str(dtype).removeprefix("torch.")
    return {key: plain for key in ("torch_dtype", "dtype") if raw.get(key) not in (None, plain)}
