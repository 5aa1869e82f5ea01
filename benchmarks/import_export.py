"""Import and export against the plainest code that moves the same bytes; each function runs on every rank."""

import gc
import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from measure import evict, in_turn, peak_memory
from safetensors import safe_open
from safetensors.torch import save_file

from isthmus import AutoBridge
from isthmus.built import model_config_of
from isthmus.checkpoint.reader import CheckpointReader
from isthmus.layout import Layout

CHUNK = 16 << 20  # bytes that the plain read asks for at a time


def import_warm(folder: str, layout: dict[str, int], repeats: int) -> dict[str, Any]:
    """Files in the page cache: the whole import against `get_tensor` and `copy_` into tensors that exist."""
    model = _model(folder, layout)
    files = _files(folder)
    targets = {}
    for path in files:
        with safe_open(path, "pt") as file:
            targets[path] = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118

    def plain() -> None:
        for path, tensors in targets.items():
            with safe_open(path, "pt") as file:
                for name, target in tensors.items():
                    target.copy_(file.get_tensor(name))

    load = _Load(folder, model)
    return in_turn({"reference": plain, "isthmus": load}, repeats, load.prepare)


def load_quantised(folder: str, layout: dict[str, int], repeats: int, quantised: str) -> dict[str, Any]:
    """The same model loaded from FP8 files against from bf16 files, both in the page cache."""
    model = _model(folder, layout)
    plain, codes = _Load(folder, model), _Load(quantised, model)

    def prepare() -> None:
        plain.prepare()
        codes.prepare()

    return in_turn({"reference": plain, "isthmus": codes}, repeats, prepare)


def import_quantised(
    folder: str, layout: dict[str, int], repeats: int, quantised: str, out: str
) -> dict[str, Any]:
    """The whole import, to the Megatron folder's rename, from FP8 files against from bf16 files."""
    model = _model(folder, layout)

    def imported(source: str) -> None:
        AutoBridge.from_hf_pretrained(source).import_ckpt(out, model)

    def clean() -> None:
        shutil.rmtree(out, ignore_errors=True)
        os.sync()

    runs = {"reference": lambda: imported(folder), "isthmus": lambda: imported(quantised)}
    seconds = in_turn(runs, repeats, clean)
    clean()
    return seconds


def import_cold(folder: str, layout: dict[str, int], repeats: int) -> dict[str, Any]:
    """Files out of the page cache: the whole import against reading them from first to last byte."""
    model = _model(folder, layout)
    files = _files(folder)
    buffer = bytearray(CHUNK)

    def plain() -> None:
        for path in files:
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    load = _Load(folder, model)

    def cold() -> None:
        load.prepare()
        evict(files)

    return in_turn({"reference": plain, "isthmus": load}, repeats, cold)


def export(folder: str, layout: dict[str, int], repeats: int, out: str) -> dict[str, Any]:
    """`save_hf_pretrained` on all ranks against `save_file` of all tensors, in memory, on the first rank.

    Neither waits for the disk: both end when the page cache has the bytes, and both begin when it has none to
    write. The time is that of the slowest rank.
    """
    bridge = AutoBridge.from_hf_pretrained(folder)
    model = _model(folder, layout)
    bridge.load_hf_weights(model)
    target = Path(out)
    first = dist.get_rank() == 0
    tensors = {}
    for name, tensor in bridge.export_hf_weights(model):
        if first:
            tensors[name] = tensor.clone()

    def plain() -> None:
        if first:
            target.mkdir()
            save_file(tensors, target / "model.safetensors", {"format": "pt"})
        dist.barrier()

    def isthmus() -> None:
        bridge.save_hf_pretrained(model, target)
        dist.barrier()

    def clean() -> None:
        if first:
            shutil.rmtree(target, ignore_errors=True)
            os.sync()
        dist.barrier()

    seconds = in_turn({"reference": plain, "isthmus": isthmus}, repeats, clean)
    clean()
    return seconds


def memory(folder: str, layout: dict[str, int], out: str) -> dict[str, Any]:
    """This rank's bytes read and its peaks of memory above the built model, import and export."""
    model = _model(folder, layout)
    bridge = AutoBridge.from_hf_pretrained(folder)
    gc.collect()
    with peak_memory() as during_import:
        report = bridge.load_hf_weights(model)
    with peak_memory() as during_export:
        bridge.save_hf_pretrained(model, out)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(out)
    sizes = {name: info.nbytes for name, info in bridge.reader.tensors.items()}
    total = sum(sizes.values())
    experts = sum(nbytes for name, nbytes in sizes.items() if ".mlp.experts." in name)
    held = [parameter.nbytes for chunk in model for parameter in chunk.parameters()]
    return {
        "checkpoint": total,
        "largest": max(sizes.values()),
        "model": sum(held),
        "largest_held": max(held),
        "experts": experts,
        "read": report.bytes_read,
        "import": during_import.nbytes,
        "export": during_export.nbytes,
    }


def count(folder: str) -> int:
    """Tensors of the checkpoint."""
    with CheckpointReader(folder) as reader:
        return len(reader.tensors)


def _model(folder: str, layout: dict[str, int]) -> Any:
    sizes = Layout(**layout).resolved()
    sizes.initialize()
    bridge = AutoBridge.from_hf_pretrained(folder)
    return bridge.build_model(bridge.get_model_config(**sizes.config_overrides()))


class _Load:
    """An import by a bridge that has built the model, and so has read the headers, and nothing else."""

    def __init__(self, folder: str, model: Any) -> None:
        self._folder = folder
        self._model = model

    def prepare(self) -> None:
        """Make a new bridge: no page of the files is mapped by an earlier import."""
        self._bridge = AutoBridge.from_hf_pretrained(self._folder)
        self._bridge.weight_map(model_config_of(self._model))
        gc.collect()

    def __call__(self) -> None:
        self._bridge.load_hf_weights(self._model)
        self._bridge.reader.close()


def _files(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("*.safetensors"))
