"""What lies in a Megatron checkpoint folder, besides the tensors.

=====================================  =================================================================
``latest_checkpointed_iteration.txt``  ``release``: weights alone, so that a run starts at iteration 0
                                       with a new optimizer; or the number of the last iteration saved
``release/``, ``iter_0000100/``        Megatron's distributed checkpoints
``megatron_args.txt``                  the model as arguments of Megatron's training script
``source.json``                        the HF checkpoint's config.json, and its tensors without data
``scales/``                            a quantised HF checkpoint's scales, in its own names and dtypes
``hf/``                                the HF checkpoint's config.json and side files
``isthmus.json``                       versions, and the family's own choices (which delta net)
=====================================  =================================================================

A run that loads the folder and saves into it adds to it, and the folder stays exportable.
"""

import dataclasses
import importlib.metadata
import json
import shlex
from pathlib import Path
from typing import Any

from isthmus.built import fields_of
from isthmus.checkpoint.folder import Staging, carry_side_files
from isthmus.checkpoint.manifest import save_manifest, save_scales

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
ARGUMENTS = "megatron_args.txt"
HF = "hf"
NOTE = "isthmus.json"


def check_folder(folder: str | Path) -> None:
    """FileNotFoundError, ValueError where this is no Megatron folder: absent, a file, or an HF checkpoint."""
    folder = Path(folder)
    if not folder.exists():
        raise FileNotFoundError(f"{folder} does not exist; give the folder of Megatron's --save")
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; give the folder of Megatron's --save")
    if (folder / "config.json").is_file() and not (folder / TRACKER).is_file():
        raise ValueError(
            f"{folder} is a Hugging Face checkpoint, not a Megatron one. To make one of it:"
            f" isthmus import {shlex.quote(str(folder))} MEGATRON_DIR"
        )


def latest(folder: str | Path) -> Path:
    """The newest distributed checkpoint in a Megatron folder, which may also be that checkpoint itself."""
    folder = Path(folder)
    if (folder / "metadata.json").is_file():
        return folder
    if not (folder / TRACKER).is_file():
        raise FileNotFoundError(f"{folder} has no {TRACKER}; give the folder of Megatron's --save")
    word = (folder / TRACKER).read_text(encoding="utf-8").strip()
    path = folder / (f"iter_{int(word):07d}" if word.isdigit() else word)
    if not (path / "metadata.json").is_file():
        raise ValueError(
            f"{folder / TRACKER} says {word!r}, and {path} is not a complete torch_dist checkpoint;"
            " save with --ckpt-format torch_dist"
        )
    return path


def recorded_choices(folder: str | Path) -> dict[str, Any]:
    """Config fields of the family's own that the import recorded; empty where there was no import."""
    note = Path(folder) / NOTE
    return json.loads(note.read_text(encoding="utf-8"))["fields"] if note.is_file() else {}


def describe(bridge: Any, config: Any, staging: Staging) -> list[str]:
    """Write all but the checkpoint itself for a model of `config`; returns what `megatron_args.txt` says."""
    from isthmus.checkpoint.megatron_arguments import arguments

    folder = staging.path
    built = fields_of(config)
    fields = {name: built[name] for name in {**bridge.megatron_fields, "params_dtype": None}}
    spec = getattr(config, "spec_argument", config.transformer_layer_spec)
    words = arguments(fields, spec if hasattr(spec, "__name__") else None)
    _write(folder / TRACKER, RELEASE)
    _write(folder / ARGUMENTS, " ".join(words))
    _write(folder / NOTE, json.dumps(_note(config), indent=2))
    stored = getattr(bridge.reader, "stored", bridge.reader)
    save_manifest(folder, bridge.config_text, stored.tensors.values())
    save_scales(folder, bridge.reader)
    (folder / HF).mkdir()
    (folder / HF / "config.json").write_text(bridge.config_text, encoding="utf-8")
    carry_side_files(bridge.folder, staging, HF)
    return words


def _note(config: Any) -> dict[str, Any]:
    from megatron.training.models.gpt import GPTModelConfig

    megatron = {field.name for field in dataclasses.fields(GPTModelConfig)}
    own = [field.name for field in dataclasses.fields(config) if field.name not in megatron]
    return {
        "isthmus": importlib.metadata.version("isthmus-core"),
        "megatron-core": importlib.metadata.version("megatron-core"),
        "fields": {name: getattr(config, name) for name in own},
    }


def _write(path: Path, text: str) -> None:
    path.write_text(f"{text}\n", encoding="utf-8")
