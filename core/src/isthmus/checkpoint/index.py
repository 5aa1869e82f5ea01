"""Which files of a folder hold its weights, and whether the index and the files agree."""

import os
import re
from pathlib import Path

from isthmus.checkpoint.header import Defects, TensorInfo, read_header
from isthmus.json_text import parse_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_FILE_NAME = 255  # bytes
LONG = 80  # characters; what is longer is not shown whole
_SHARD = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.ckpt", "*.h5", "*.msgpack", "*.index.json")


def read_tensors(folder: Path) -> tuple[dict[str, TensorInfo], dict[str, os.stat_result]]:
    """Every tensor of a checkpoint folder in file order, and each file's status; reads headers only.

    ValueError lists everything that is wrong: files that are missing, truncated or corrupt, tensors held
    twice, and every tensor on which index and files disagree.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the folder that holds config.json and {SINGLE}")
    defects = Defects()
    weight_map = _weight_map(folder, defects)
    names = sorted(set(weight_map.values())) if weight_map is not None else _unindexed(folder, defects)
    tensors: dict[str, TensorInfo] = {}
    files: dict[str, os.stat_result] = {}
    unread = set()
    for name in names:
        if not (folder / name).is_file():
            if (folder / name).is_dir():
                what = "folders where files should be"
            elif (folder / name).is_symlink():
                what = "broken links"
            else:
                what = f"{INDEX} names files that are not there"
            defects.add(what, name, "download or copy them again")
            unread.add(name)
            continue
        before = len(defects)
        found, status = read_header(folder / name, defects)
        if found and status is not None:
            files[name] = status
        elif len(defects) > before:  # a sound file without tensors lacks those that the index puts there
            unread.add(name)
        for info in found:
            if info.name in tensors:
                defects.add("held by two files", info.name, f"{tensors[info.name].file} and {name}")
            tensors.setdefault(info.name, info)
    if weight_map is not None:
        _compare(weight_map, tensors, unread, defects)
        for path in sorted(folder.iterdir()):
            if _SHARD.fullmatch(path.name) and path.name not in names:
                defects.add(f"not named by {INDEX}", path.name, "two checkpoints in one folder?")
    defects.raise_any(folder)
    return tensors, files


def _weight_map(folder: Path, defects: Defects) -> dict[str, str] | None:
    """Tensor name -> file name as the index has it; None where the folder has no index."""
    path = folder / INDEX
    if not path.exists() and not path.is_symlink():
        return None
    try:
        weight_map = parse_json(path.read_text(encoding="utf-8"))["weight_map"]
        names = set(weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        defects.add(f"{INDEX}: corrupt", detail=f"{type(error).__name__}: {error}")
        defects.raise_any(folder)
        raise
    if not names:
        defects.add(f"{INDEX} names no tensor")
    for tensor, name in weight_map.items():
        if not _is_file_name(name):
            said = f"it says {name!r}"
            shown = said if len(said) <= LONG else f"{said[:LONG]}..."
            defects.add(f"{INDEX} gives no name of a file in this folder for", tensor, shown)
    defects.raise_any(folder)
    return weight_map


def _is_file_name(name: object) -> bool:
    """Whether a file of a folder can have this name: one part of a path, as long as file systems take."""
    if not isinstance(name, str) or name in ("", ".", "..") or "\0" in name:
        return False
    return Path(name).name == name and len(name.encode(errors="replace")) <= MAX_FILE_NAME


def _unindexed(folder: Path, defects: Defects) -> list[str]:
    """The one file of a folder without an index."""
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    shards = [name for name in found if _SHARD.fullmatch(name)]
    if shards == [SINGLE]:
        return shards
    if found:
        defects.add(
            f"no {INDEX}, and so no telling which files are the model", ", ".join(found), "copy the index too"
        )
    else:
        others = sorted({path.name for pattern in _OTHER_WEIGHTS for path in folder.glob(pattern)})
        convert = "convert it to safetensors first" if others else "is this the right folder?"
        holds = f"; found {', '.join(others)}" if others else ""
        defects.add(f"holds no safetensors file{holds}: {convert}")
    defects.raise_any(folder)
    return []


def _compare(
    weight_map: dict[str, str], tensors: dict[str, TensorInfo], unread: set[str], defects: Defects
) -> None:
    """Index against headers, both ways; files that could not be read have been reported already."""
    for name, file in weight_map.items():
        if file in unread:
            continue
        if name not in tensors:
            defects.add(f"named by {INDEX} but in no file", name, f"should be in {file}")
        elif tensors[name].file != file:
            defects.add(
                f"in another file than {INDEX} says", name, f"index {file}, found in {tensors[name].file}"
            )
    for name, info in tensors.items():
        if name not in weight_map:
            defects.add(f"in a file but not named by {INDEX}", name, f"in {info.file}")
