"""The files of an export as one rank sees them: its own, and those of others that it adds rows to."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from isthmus.checkpoint.gather import from_all, on_every_rank
from isthmus.checkpoint.writer import OutputTensor, ShardWriter, shard_names, split_files


class OutputFile(NamedTuple):
    """A file to come: the rank that creates it, and its tensors."""

    name: str
    owner: int
    tensors: list[OutputTensor]


def cut_files(owned: Mapping[int, list[OutputTensor]], max_shard_size: int) -> list[OutputFile]:
    """The files for the tensors of each owner; numbered by owner, alike on every rank."""
    cut = [(owner, file) for owner, mine in owned.items() for file in split_files(mine, max_shard_size)]
    names = shard_names(len(cut))
    return [OutputFile(name, owner, tensors) for name, (owner, tensors) in zip(names, cut, strict=True)]


class RankFiles:
    """Creates this rank's files, and writes to any; a context manager that closes them. Collective."""

    def __init__(self, folder: Path, files: Sequence[OutputFile], rank: int) -> None:
        self._folder = folder
        self._files = {tensor.name: file for file in files for tensor in file.tensors}  # by tensor
        self._rank = rank
        self._writers: dict[str, ShardWriter] = {}  # by file
        self._own = [file for file in files if file.owner == rank]

    def __enter__(self) -> "RankFiles":
        try:
            on_every_rank(self._create)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers.values():
            writer.close(partial=True)

    def _create(self) -> None:
        for file in self._own:
            self._writers[file.name] = ShardWriter(self._folder / file.name, file.tensors)

    def owns(self, name: str) -> bool:
        """Whether a tensor is in a file of this rank."""
        return self._files[name].owner == self._rank

    def write(
        self, name: str, *parts: torch.Tensor, index: int | None = None, row: int | None = None
    ) -> None:
        """As :meth:`ShardWriter.write`, to the file that the tensor is in."""
        file = self._files[name]
        if file.name not in self._writers:
            path = self._folder / file.name
            self._writers[file.name] = ShardWriter(path, file.tensors, joins=True)
        self._writers[file.name].write(name, *parts, index=index, row=row)

    def finish(self) -> None:
        """Closes all. Collective; ValueError on every rank, naming what none has written, or two have."""
        own = {file.name for file in self._own}
        added = from_all({name: writer.written for name, writer in self._writers.items() if name not in own})

        def close() -> None:
            for files in added:
                for name in own & files.keys():
                    self._writers[name].joined(files[name])
            for name, writer in self._writers.items():
                writer.close(partial=name not in own)

        on_every_rank(close)
