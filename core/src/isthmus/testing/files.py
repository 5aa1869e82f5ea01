"""Tensors of a folder as the safetensors library has them, with nothing of ours between."""

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of all files of a folder."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def renamed(content: dict[str, Tensor], written: str, wanted: str) -> dict[str, Tensor]:
    """The same with another beginning of names; LookupError where none begins so."""
    if not any(name.startswith(written) for name in content):
        raise LookupError(f"no tensor begins with {written}")
    return {
        wanted + name.removeprefix(written) if name.startswith(written) else name: tensor
        for name, tensor in content.items()
    }
