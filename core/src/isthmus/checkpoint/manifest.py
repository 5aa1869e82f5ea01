"""What a Megatron checkpoint remembers of the HF checkpoint it came from: its config, its tensors' kinds.

Of a quantised one also its scales, which are small: with them an export gives the same codes again.
"""

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from isthmus.checkpoint.dequantised import logical, small_parts
from isthmus.checkpoint.header import CODES as NAMES
from isthmus.checkpoint.header import DTYPES, TensorInfo
from isthmus.checkpoint.index import SINGLE
from isthmus.checkpoint.reader import CheckpointReader
from isthmus.checkpoint.writer import OutputTensor, ShardWriter
from isthmus.config import HFConfig
from isthmus.json_text import parse_json
from isthmus.quant.codec import CODES, Quantised
from isthmus.quant.find import find_or_refuse
from isthmus.quant.settings import plain_dtype

SOURCE = "source.json"
SCALES = "scales"  # a folder with all stored tensors of quantised weights but for the codes
_VERSION = 1


class Manifest:
    """Names, dtypes, shapes and files of a checkpoint without its data: a reader that cannot `slice`."""

    def __init__(self, folder: Path, config_text: str, tensors: Iterable[TensorInfo]) -> None:
        self.folder = folder
        self.config_text = config_text  # config.json, letter by letter
        config = json.loads(config_text)
        stored = {info.name: info for info in tensors}
        self.quantised = find_or_refuse(config, stored, folder / SOURCE)
        self.dtype = plain_dtype(config)
        self.stored = StoredScales(folder, stored)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(logical(stored, self.quantised, self.dtype))

    def slice(
        self,
        name: str,
        rows: slice | None = None,
        cols: slice | None = None,
        index: int | None = None,
        *,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """ValueError: the data is not here."""
        raise ValueError(
            f"{self.folder / SOURCE} describes {name} but does not hold it;"
            " give the HF checkpoint (hf=..., --hf)"
        )

    def parts(self, name: str, index: int | None = None) -> dict[str, torch.Tensor]:
        """As :meth:`DequantisedReader.parts`, without the codes. ValueError where they cannot be read."""
        try:
            return small_parts(self.quantised[name], self.stored, index)
        except (ValueError, LookupError, OSError) as error:
            raise ValueError(
                f"{self.stored.folder}, the source's scales, cannot be used: {error}."
                " Give the HF checkpoint (hf=..., --hf), or import it again"
            ) from error


class StoredScales:
    """The stored tensors of a quantised checkpoint: all by name, those that are no codes with their data."""

    def __init__(self, folder: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self.folder = folder / SCALES
        self.tensors = tensors

    @cached_property
    def _reader(self) -> CheckpointReader:
        return CheckpointReader(self.folder)

    def slice(self, name: str, *, index: int | None = None) -> torch.Tensor:
        """A scale, or matrix `index` of a stack of them. ValueError where it is not as source.json says."""
        stated, held = self.tensors[name], self._reader.tensors.get(name)
        if held is None or (held.dtype, held.shape) != (stated.dtype, stated.shape):
            has = "nothing" if held is None else f"{held.dtype} {held.shape}"
            raise ValueError(f"{name} should be {stated.dtype} {stated.shape}, and is {has}")
        return self._reader.slice(name, index=index)


def save_scales(folder: Path, reader: Any) -> None:
    """Writes what :class:`StoredScales` reads; nothing where `reader` is of a plain checkpoint."""
    quantised: Mapping[str, Quantised] = getattr(reader, "quantised", {})
    names = [
        name
        for item in quantised.values()
        for role, name in (*item.parts.items(), *item.beside.items())
        if role != CODES
    ]
    if not names:
        return
    (folder / SCALES).mkdir()
    infos = [reader.stored.tensors[name] for name in dict.fromkeys(names)]
    outputs = [OutputTensor(info.name, info.dtype, info.shape) for info in infos]
    with ShardWriter(folder / SCALES / SINGLE, outputs) as writer:
        for info in infos:
            writer.write(info.name, reader.stored.slice(info.name))


def save_manifest(folder: str | Path, config_text: str, tensors: Iterable[TensorInfo]) -> None:
    """Writes source.json into a folder; `config_text` is the checkpoint's config.json as it is."""
    listed = [
        {"name": info.name, "dtype": NAMES[info.dtype], "shape": info.shape, "file": info.file}
        for info in tensors
    ]
    # A line for each tensor: a diff of two manifests shows what differs.
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in listed)
    config = json.dumps(config_text, ensure_ascii=False)
    text = f'{{"version": {_VERSION},\n"config": {config},\n"tensors": [\n{lines}\n]}}\n'
    (Path(folder) / SOURCE).write_text(text, encoding="utf-8")


def load_manifest(folder: str | Path) -> Manifest:
    """Inverse of :func:`save_manifest`; ValueError where the folder has none or it is damaged."""
    folder = Path(folder)
    path = folder / SOURCE
    if not path.is_file():
        raise ValueError(
            f"{folder} has no {SOURCE}; give the HF checkpoint it was imported from (hf=..., --hf)"
        )
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        if content["version"] != _VERSION:
            raise ValueError(f"version {content['version']}, this isthmus reads version {_VERSION}")
        tensors = []
        for entry in content["tensors"]:
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            tensors.append(TensorInfo(entry["name"], dtype, shape, entry["file"], 0, nbytes))
        _ = HFConfig.from_text(content["config"]).model_type
        return Manifest(folder, content["config"], tensors)
    except (ValueError, LookupError, TypeError) as error:
        reason = f"{error} is missing or unknown" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} cannot be used: {reason}; import the checkpoint again") from error
