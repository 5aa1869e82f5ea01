"""Writing an HF folder: each owner its files, in a staging folder that becomes the target at once."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from isthmus.checkpoint.dtypes import name_of
from isthmus.checkpoint.export import ExportPlan
from isthmus.checkpoint.folder import Staging, carry_side_files
from isthmus.checkpoint.gather import agree, attempt, from_first
from isthmus.checkpoint.manifest import SOURCE, Manifest
from isthmus.checkpoint.rank_files import OutputFile, RankFiles, cut_files
from isthmus.checkpoint.requantise import Requantiser
from isthmus.checkpoint.unpack import Piece
from isthmus.checkpoint.writer import OutputTensor, parse_size, write_index
from isthmus.config_text import remove_config, state_field, write_config
from isthmus.quant.settings import KEYS
from isthmus.weights import Coverage, collapse

# A side file that says how the weights are quantised: not of the plain ones.
QUANTISED_SIDE_FILES = ("hf_quant_config.json",)


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
    requantiser: Requantiser | None,
    advance: Callable[[int], None],
) -> None:
    """Write the planned tensors and everything else of `source` (a bridge) to `target`. Collective.

    `copied_dtype` is that of the tensors passed through, None for the source's own. With a `requantiser` the
    quantised tensors of the source are written as it stores them, without one as plain numbers.

    ValueError or OSError on every rank alike; then the target is as it was.
    """
    names = coverage.passed_through if passthrough else ()
    _check_names(planned.outputs, source, coverage, names)
    reader = source.reader if names else None
    if requantiser is not None and reader is not None:
        names, reader = [part for name in names for part in requantiser.names(name)], reader.stored
    stored = [reader.tensors[name] for name in names] if reader is not None else []
    copied = [
        OutputTensor(
            info.name,
            copied_dtype if copied_dtype and info.dtype.is_floating_point else info.dtype,
            info.shape,
        )
        for info in stored
    ]
    files = cut_files(_owned(planned, requantiser, copied), parse_size(max_shard_size))
    staged: list[Staging] = []  # on the first rank

    def stage() -> Path:
        sources = [source.folder] if source.folder is not None else []
        nbytes = sum(tensor.nbytes for file in files for tensor in file.tensors)
        staged.append(Staging(target, overwrite, nbytes=nbytes, sources=sources))
        return staged[0].path

    folder = from_first(stage)
    try:
        _write(planned, reader, files, copied, requantiser, folder, advance)
        plain = requantiser is None
        from_first(lambda: _finish(source, files, staged[0], config_changes, plain))
    except BaseException:
        for staging in staged:
            staging.discard()
        raise


def _write(
    planned: ExportPlan,
    reader: Any,
    files: Sequence[OutputFile],
    copied: Sequence[OutputTensor],
    requantiser: Requantiser | None,
    folder: Path,
    advance: Callable[[int], None],
) -> None:
    """This rank's part of the files. Collective: an error is raised on all ranks, after the last tensor."""
    with RankFiles(folder, files, planned.rank) as mine:

        def write(piece: Piece) -> None:
            name, index, parts, row = piece
            if requantiser is None or name not in requantiser:
                mine.write(name, *parts, index=index, row=row)
                return
            for stored, matrix, tensor in requantiser(name, index, piece.tensor):
                mine.write(stored, tensor, index=matrix)

        def copy(output: OutputTensor) -> None:
            tensor = planned.cast(output.name, reader.slice(output.name), output.dtype)
            mine.write(output.name, tensor)
            advance(tensor.nbytes)

        error: Exception | None = None
        for piece in planned.pieces():
            if error is None:
                _, error = attempt(partial(write, piece))
                advance(sum(part.nbytes for part in piece.parts))
        for output in copied:
            if error is None and mine.owns(output.name):
                _, error = attempt(partial(copy, output))
        agree(error or planned.overflow())
        mine.finish()


def _finish(
    source: Any, files: Sequence[OutputFile], staging: Staging, changes: Mapping[str, Any], plain: bool
) -> None:
    """Index, config and side files, then the rename; on the first rank only."""
    write_index(staging.path, {file.name: file.tensors for file in files})
    if source.folder is not None:
        carry_side_files(source.folder, staging)
    text = write_config(source.config_text, changes, only_stated=True)
    for name, value in source.overruled.items():
        if name.rpartition(".")[2] in source.family.corrected:
            text = state_field(text, name, value)
    if "text_config" in source.hf_config:
        # Readers of the two levels assume different things of one that is silent.
        tied = bool(source.megatron_fields["share_embeddings_and_output_weights"])
        for name in ("tie_word_embeddings", "text_config.tie_word_embeddings"):
            text = state_field(text, name, tied)
    if plain:
        text = remove_config(text, KEYS)
        for name in QUANTISED_SIDE_FILES:
            (staging.path / name).unlink(missing_ok=True)
    (staging.path / "config.json").write_text(text, encoding="utf-8")
    staging.publish()


def _check_names(
    outputs: Mapping[str, OutputTensor], source: Any, coverage: Coverage, copied: Iterable[str]
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
    for name in sorted(outputs.keys() & expected):
        shapes = tuple(source.reader.tensors[name].shape), tuple(outputs[name].shape)
        if shapes[0] != shapes[1]:
            problems.append(f"{name}: {shapes[0]} in the source, {shapes[1]} exported")
    if problems:
        remembered = isinstance(source.reader, Manifest)
        where = source.reader.folder / SOURCE if remembered else source.folder
        step = "import the checkpoint again" if remembered else "give the checkpoint that the model is of"
        raise ValueError(f"the export would not match {where}; {step}:\n  " + "\n  ".join(problems))


def _owned(
    planned: ExportPlan, requantiser: Requantiser | None, copied: Sequence[OutputTensor]
) -> dict[int, list[OutputTensor]]:
    """All tensors to write, by owner; those copied from the source go to who has the least to write."""
    owned: dict[int, list[OutputTensor]] = {rank: [] for rank in range(planned.world_size)}
    for name, tensor in planned.outputs.items():
        owned[planned.owners[name]] += [tensor] if requantiser is None else requantiser.outputs(tensor)
    load = {rank: sum(tensor.nbytes for tensor in tensors) for rank, tensors in owned.items()}
    for tensor in copied:
        owner = min(load, key=load.__getitem__)
        owned[owner].append(tensor)
        load[owner] += tensor.nbytes
    return owned


def config_changes(dtype: torch.dtype | None, coverage: Coverage, passthrough: bool) -> dict[str, Any]:
    """What an export changes where config.json states it: its dtype, and the counts of what it leaves out."""
    changes: dict[str, Any] = {} if dtype is None else {"dtype": name_of(dtype)}
    return changes if passthrough else changes | dict.fromkeys(coverage.counts, 0)
