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
import re
import reprlib
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from isthmus.built import fields_of
from isthmus.checkpoint.folder import Staging, carry_side_files
from isthmus.checkpoint.manifest import save_manifest, save_scales
from isthmus.json_text import parse_json

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
ARGUMENTS = "megatron_args.txt"
HF = "hf"
NOTE = "isthmus.json"
METADATA = "metadata.json"  # of Megatron, in each checkpoint: its format
AGAIN = "copy the folder again, or import the checkpoint again"


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
    if (folder / METADATA).is_file():
        return _of_torch_dist(folder)
    if not (folder / TRACKER).is_file():
        raise FileNotFoundError(f"{folder} has no {TRACKER}; give the folder of Megatron's --save")
    tracker = folder / TRACKER
    word = tracker.read_bytes().decode(errors="replace").strip()
    number = re.fullmatch("[0-9]{1,18}", word)
    if not number and word != RELEASE:
        raise ValueError(
            f"{tracker} says {reprlib.repr(word)}, expected {RELEASE!r} or the number of an iteration; write"
            " there which of the folder's checkpoints is the newest"
        )
    path = folder / (f"iter_{int(word):07d}" if number else word)
    if not (path / METADATA).is_file():
        raise ValueError(
            f"{tracker} says {word!r}, and {path} is not a complete torch_dist checkpoint;"
            " save with --ckpt-format torch_dist, or copy the folder again"
        )
    return _of_torch_dist(path)


def _of_torch_dist(path: Path) -> Path:
    """The path of a checkpoint. ValueError where its metadata.json does not say that it is torch_dist."""
    file = path / METADATA
    try:
        backend = parse_json(file.read_text(encoding="utf-8"))["sharded_backend"]
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{file} is damaged: it names no sharded_backend; copy the folder again") from error
    if backend != "torch_dist":
        raise ValueError(
            f"{file} says sharded_backend={backend!r}, and only torch_dist can be read;"
            " save with --ckpt-format torch_dist"
        )
    return path


def recorded_choices(folder: str | Path, decided: Iterable[str] = ()) -> dict[str, str]:
    """Config fields of the family's own that the import recorded; empty where there was no import.

    ValueError where the record is damaged, or has fields that the checkpoint has `decided`.
    """
    note = Path(folder) / NOTE
    if not note.is_file():
        return {}
    try:
        content = parse_json(note.read_text(encoding="utf-8"))
        fields = content.get("fields") if isinstance(content, dict) else None
        if not isinstance(fields, dict) or not all(isinstance(value, str) for value in fields.values()):
            raise ValueError(f"fields={reprlib.repr(fields)}, expected an object of names")
        if strange := sorted(fields.keys() & set(decided)):
            raise ValueError(f"{', '.join(strange)} is the checkpoint's to say, not an import's")
    except ValueError as error:
        raise ValueError(f"{note} is damaged: {error}; {AGAIN}") from error
    return fields


def check_recorded(folder: str | Path, choices: Iterable[str], config_class: type) -> None:
    """ValueError where the import cannot have recorded these choices: `config_class` adds no such fields."""
    if unknown := sorted(set(choices) - set(own_fields(config_class))):
        raise ValueError(
            f"{Path(folder) / NOTE} is damaged: {config_class.__name__} adds no field"
            f" {', '.join(unknown)}; {AGAIN}"
        )


def describe(bridge: Any, config: Any, staging: Staging) -> list[str]:
    """Write all but the checkpoint itself for a model of `config`; returns what `megatron_args.txt` says."""
    from isthmus.checkpoint.megatron_arguments import arguments

    folder = staging.path
    built, own = fields_of(config), own_fields(type(config))
    fields = {
        name: built[name] for name in {**bridge.megatron_fields, "params_dtype": None} if name not in own
    }
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
    return {
        "isthmus": importlib.metadata.version("isthmus-core"),
        "megatron-core": importlib.metadata.version("megatron-core"),
        # Choices by name; sizes are the checkpoint's, and what is trained is each run's.
        "fields": {
            name: value
            for name in own_fields(type(config))
            if isinstance(value := getattr(config, name), str)
        },
    }


def own_fields(config_class: type) -> list[str]:
    """Names of the fields that a family's config class adds to Megatron's GPT model config."""
    from megatron.training.models.gpt import GPTModelConfig

    megatron = {field.name for field in dataclasses.fields(GPTModelConfig)}
    return [field.name for field in dataclasses.fields(config_class) if field.name not in megatron]


def _write(path: Path, text: str) -> None:
    path.write_text(f"{text}\n", encoding="utf-8")
