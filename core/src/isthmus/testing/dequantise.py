"""A plain copy of a quantised checkpoint, for the Hugging Face model that a run is compared with.

Written from the formats' published definitions: whole tensors, the plainest arithmetic, safetensors' own
reader. Nothing here comes from `isthmus.quant`, or a mistake there would be on both sides.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


@contextmanager
def plain_folder(folder: Path) -> Iterator[Path]:
    """The folder itself where it is not quantised, else a temporary copy in the dtype of config.json."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    entry = config.pop("quantization_config", None)
    if not entry:
        yield folder
        return
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    with tempfile.TemporaryDirectory(prefix="isthmus-plain-") as name:
        plain = Path(name)
        for path in folder.iterdir():
            if path.is_file() and ".safetensors" not in path.name:
                shutil.copyfile(path, plain / path.name)
        (plain / "config.json").write_text(json.dumps(config), encoding="utf-8")
        values, used = dequantised(tensors, entry)
        kept = {name: tensor for name, tensor in tensors.items() if name not in used}
        made = {name: tensor.to(dtype).contiguous() for name, tensor in values.items()}
        save_file(kept | made, plain / "model.safetensors", metadata={"format": "pt"})
        yield plain


def dequantised(tensors: dict[str, Tensor], entry: dict[str, Any]) -> tuple[dict[str, Tensor], set[str]]:
    """Real numbers in float32 by name, and the names of the stored tensors that they were made of."""
    values: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, codes in tensors.items():
        if codes.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) and not name.endswith("_scale"):
            scale_name, scale = _beside(tensors, name, "_scale_inv", "_scale", ".scale")
            values[name] = codes.float() * _spread(scale.float(), codes.shape, entry.get("weight_block_size"))
            used |= {name, scale_name}
    return values, used


def _beside(tensors: dict[str, Tensor], name: str, *endings: str) -> tuple[str, Tensor]:
    """The one tensor beside `name` with one of the endings; ".x" stands in place of `.weight`."""
    names = [(name.removesuffix(".weight") if e.startswith(".") else name) + e for e in endings]
    [found] = [candidate for candidate in names if candidate in tensors]
    return found, tensors[found]


def _spread(scale: Tensor, shape: torch.Size, block: list[int] | None) -> Tensor:
    """A scale's number for each value of a matrix, or of each matrix of a stack."""
    if block is not None:
        rows = scale.repeat_interleave(block[0], -2)[..., : shape[-2], :]
        return rows.repeat_interleave(block[1], -1)[..., : shape[-1]]
    if scale.numel() == 1:
        return scale.reshape(())
    while scale.dim() < len(shape):  # one for each row, or for each matrix
        scale = scale[..., None]
    return scale
