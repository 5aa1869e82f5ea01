"""What a Megatron checkpoint remembers of the HF checkpoint it came from: its config, its tensors' kinds."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from isthmus.checkpoint.header import CODES, DTYPES, TensorInfo
from isthmus.json_text import parse_json

SOURCE = "source.json"
_VERSION = 1


class Manifest:
    """Names, dtypes, shapes and files of a checkpoint without its data: a reader that cannot `slice`."""

    def __init__(self, folder: Path, config_text: str, tensors: Iterable[TensorInfo]) -> None:
        self.folder = folder
        self.config_text = config_text  # config.json, letter by letter
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType({info.name: info for info in tensors})

    def slice(
        self, name: str, rows: slice | None = None, cols: slice | None = None, index: int | None = None
    ) -> torch.Tensor:
        """ValueError: the data is not here."""
        raise ValueError(
            f"{self.folder / SOURCE} describes {name} but does not hold it; give the HF checkpoint (--hf)"
        )


def save_manifest(folder: str | Path, config_text: str, tensors: Iterable[TensorInfo]) -> None:
    """Writes source.json into a folder; `config_text` is the checkpoint's config.json as it is."""
    listed = [
        {"name": info.name, "dtype": CODES[info.dtype], "shape": info.shape, "file": info.file}
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
        raise ValueError(f"{folder} has no {SOURCE}; give the HF checkpoint it was imported from (--hf)")
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        if content["version"] != _VERSION:
            raise ValueError(f"version {content['version']}, this isthmus reads version {_VERSION}")
        tensors = []
        for entry in content["tensors"]:
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            tensors.append(TensorInfo(entry["name"], dtype, shape, entry["file"], 0, nbytes))
        return Manifest(folder, content["config"], tensors)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be used: {error}; import the checkpoint again") from error
