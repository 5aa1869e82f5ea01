"""Megatron's torch_dist checkpoints: written so that a training run starts from one, read at any layout.

Everything here is collective. What surrounds the tensors is :mod:`isthmus.checkpoint.megatron_folder`.
"""

import copy
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isthmus.checkpoint.damage import check_files, refused
from isthmus.checkpoint.dtypes import main_dtype, rounds
from isthmus.checkpoint.folder import Staging
from isthmus.checkpoint.gather import from_all, from_first, on_every_rank
from isthmus.checkpoint.header import TensorInfo
from isthmus.checkpoint.manifest import Manifest
from isthmus.checkpoint.megatron_folder import RELEASE, TRACKER, describe, latest
from isthmus.names import unwrapped
from isthmus.padding_token import PAD
from isthmus.weights import Coverage, collapse

BESIDES = ("optimizer", "chained_", "opt_param", "rng_state", "rerun_state", "common_state")  # not the model
EXTRA = "_extra_state"  # Transformer Engine's scales for narrow floats: none here


def write(
    bridge: Any, chunks: Sequence[nn.Module], target: Path, fill: Callable[[], Any], *, overwrite: bool
) -> Any:
    """Write the model to the Megatron folder `target` after `fill()`, and return what that returned.

    Atomic: all of it or nothing. ValueError, before anything is read, where `target` is not empty and not to
    be overwritten.
    """
    config = _whole_config(bridge, chunks)
    pad = getattr(config, "pad", bridge.megatron_fields.get("pad", -1))  # not in Megatron's class
    staged: list[Staging] = []  # on the first rank

    def stage() -> Path:
        count = sum(torch.Size(info.shape).numel() for info in bridge.reader.tensors.values())
        nbytes = count * config.transformer.params_dtype.itemsize
        staged.append(Staging(target, overwrite, nbytes=nbytes, sources=[bridge.folder]))
        (staged[0].path / RELEASE).mkdir()
        return staged[0].path

    folder = from_first(stage)
    try:
        filled = on_every_rank(fill)
        words = from_first(lambda: describe(bridge, config, staged[0]))
        _save(chunks, _common(words, config.transformer, pad), folder / RELEASE)
        from_first(lambda: staged[0].publish())
    except BaseException:
        for staging in staged:
            staging.discard()
        raise
    return filled


def read(chunks: Sequence[nn.Module], folder: Path) -> None:
    """Fill the model from a Megatron folder's newest checkpoint, whatever layout saved it.

    ValueError lists the tensors that only one side has, and roundings; or names what is damaged.
    """
    from megatron.core import dist_checkpointing

    path = str(latest(folder))
    with refused(path):
        content: Any = dist_checkpointing.load_content_metadata(path) or {}  # a dict, unlike its annotation
    states = _sharded(chunks, content)
    saved = {name: info.dtype for name, info in saved_tensors(folder).items()}
    _check(_sharded(chunks, content), saved, path)

    def load() -> Any:
        with refused(path):
            return dist_checkpointing.load(states, path)

    loaded = on_every_rank(load)
    for key, chunk in zip(states, chunks, strict=True):
        unwrapped(chunk).load_state_dict(loaded[key], strict=False)  # absent: extra state only, see _check


def check_export(bridge: Any, coverage: Coverage, options: Mapping[str, Any]) -> None:
    """ValueError now, on every rank, where the export would not have the data to copy at its end."""
    absent = sorted(coverage.passed_through) if options.get("passthrough", True) else []
    if absent and isinstance(bridge.reader, Manifest):
        raise ValueError(
            f"the model does not hold {', '.join(collapse(absent))}, and {bridge.reader.folder} remembers"
            " them by name only; give the HF checkpoint to copy them from (hf=..., --hf), or leave them out"
            " (passthrough=False, --no-passthrough)"
        )


def saved_tensors(folder: str | Path) -> dict[str, TensorInfo]:
    """The model's tensors in a Megatron folder's newest checkpoint, by name; where they lie is left out."""
    from megatron.core import dist_checkpointing

    path = str(latest(folder))
    check_files(path)
    with refused(path):
        saved: dict[str, Any] = dist_checkpointing.load_tensors_metadata(path)
    found = {}
    for name, tensor in saved.items():
        if not name.startswith(BESIDES):
            shape = tuple(tensor.global_shape)
            found[name] = TensorInfo(name, tensor.dtype, shape, path, 0, prod(shape) * tensor.dtype.itemsize)
    return found


def saved_dtypes(
    chunks: Sequence[nn.Module], folder: str | Path
) -> Iterator[tuple[nn.Parameter, torch.dtype]]:
    """Parameters of the chunks that the newest checkpoint holds, not in its main dtype, and in which instead.

    None where the folder has no checkpoint.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    if not (Path(folder) / TRACKER).is_file():
        return
    saved = saved_tensors(folder)
    usual = main_dtype(saved.values())
    parameters = {p.data_ptr(): p for chunk in chunks for p in chunk.parameters()}
    states = _sharded(chunks, {})
    apply_factories(states)
    for leaf in _leaves(states):
        if isinstance(leaf, ShardedTensor) and leaf.key in saved and saved[leaf.key].dtype != usual:
            data = leaf.data
            if data is not None and (parameter := parameters.get(data.data_ptr())) is not None:
                yield parameter, saved[leaf.key].dtype


def found_fields(folder: str | Path) -> dict[str, Any]:
    """Config fields that the saved tensors tell: their dtype, and no MTP block where none was saved."""
    saved = saved_tensors(folder)
    fields: dict[str, Any] = {"params_dtype": main_dtype(saved.values())}
    if not any(name.startswith("mtp.") for name in saved):
        fields["mtp_num_layers"] = None
    return fields


def saved_fields(folder: str | Path, names: Iterable[str]) -> dict[str, Any]:
    """The config fields among `names` of the run that saved the newest checkpoint, by its arguments.

    Empty where it saved none: only a training script other than Megatron's leaves them out.
    """
    from isthmus.checkpoint.megatron_arguments import fields

    args = saved_arguments(folder)
    return fields(args, names) if "num_layers" in args else {}


def saved_arguments(folder: str | Path) -> dict[str, Any]:
    """The arguments in a Megatron folder's newest checkpoint, by name; empty where it has none."""
    from megatron.core import dist_checkpointing

    path = str(latest(folder))
    check_files(path)
    with refused(path):
        args = dist_checkpointing.load_common_state_dict(path).get("args")
    return dict(vars(args)) if hasattr(args, "__dict__") else {}


def _whole_config(bridge: Any, chunks: Sequence[nn.Module]) -> Any:
    """The chunks' model config; another builder's chunks have a TransformerConfig, put into the bridge's."""
    inner: Any = unwrapped(chunks[0])
    if hasattr(inner, "isthmus_model_config"):
        return inner.isthmus_model_config
    config = copy.copy(bridge.get_model_config(params_dtype=inner.config.params_dtype))
    config.transformer = inner.config
    return config


def _save(chunks: Sequence[nn.Module], common: Mapping[str, Any], path: Path) -> None:
    """Collective. OSError, on every rank, where one could not write."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from torch.distributed.checkpoint.api import CheckpointException

    # What megatron.training records: it makes its state dicts of the same options when it loads.
    content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    strategy: Any = TorchDistSaveShardedStrategy()
    replicas: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if replicas.size() > 1:
        strategy = FullyParallelSaveStrategyWrapper(strategy, replicas)
    states = {**common, **_sharded(chunks, content)}
    try:
        dist_checkpointing.save(states, str(path), strategy, content_metadata=content)
    except CheckpointException as error:  # a BaseException; the first rank's alone has the reasons
        reasons = "; ".join(dict.fromkeys(str(failure) for failure, _ in error.failures.values()))
        disk = path.parent.parent  # where the staging folder was, which the first rank may have removed
        raise OSError(
            f"Megatron could not write the checkpoint ({reasons or 'the first rank knows why'}); {disk} has"
            f" {shutil.disk_usage(disk).free:,} bytes free. Make room, mind quotas, or choose another disk"
        ) from error


def _sharded(chunks: Sequence[nn.Module], content: Mapping[str, Any]) -> dict[str, Any]:
    """The chunks' sharded state dicts under megatron.training's keys."""
    from megatron.core import parallel_state

    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {**content, "dp_cp_group": replicas}
    keys = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
    return {
        key: unwrapped(chunk).sharded_state_dict(metadata=metadata)  # type: ignore[operator]
        for key, chunk in zip(keys, chunks, strict=True)
    }


def _common(words: list[str], transformer: Any, pad: int) -> dict[str, Any]:
    """What is not sharded, as megatron.training saves it; its `args` only where they describe the model."""
    from isthmus.checkpoint.megatron_arguments import namespace

    args = Namespace(
        **vars(namespace(words)),
        tensor_model_parallel_size=transformer.tensor_model_parallel_size,
        pipeline_model_parallel_size=transformer.pipeline_model_parallel_size,
        ckpt_format="torch_dist",
        no_save_optim=True,
        no_save_rng=True,
        **{PAD: pad},
    )
    return {"args": args, "checkpoint_version": 3.0, "iteration": 0}


def _check(states: dict[str, Any], saved: Mapping[str, torch.dtype], path: str) -> None:
    """ValueError with every reason, on any rank, why the checkpoint is not this model's; changes `states`."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    apply_factories(states)
    held = {}
    for leaf in _leaves(states):
        if isinstance(leaf, ShardedTensor) and EXTRA not in leaf.key:
            held[leaf.key] = leaf.dtype
    everywhere = {name: dtype for names in from_all(held) for name, dtype in names.items()}
    kept = [name for name in saved if EXTRA not in name and name not in everywhere]
    lines = []
    if absent := [name for name in everywhere if name not in saved]:
        lines.append(f"the model has, the checkpoint has not ({len(absent)}): " + ", ".join(collapse(absent)))
    if kept:
        lines.append(f"the checkpoint has, the model has not ({len(kept)}): " + ", ".join(collapse(kept)))
    rounded: dict[str, list[str]] = {}
    for name, dtype in everywhere.items():
        if name in saved and rounds(saved[name], dtype):
            rounded.setdefault(f"saved as {saved[name]}, the model has {dtype}", []).append(name)
    lines += [f"{', '.join(collapse(names))}: {what}" for what, names in rounded.items()]
    if lines:
        raise ValueError(
            f"{path} is of another model:\n  " + "\n  ".join(lines) + "\n  build the model as it was saved:"
            " get_model_config(params_dtype=..., mtp_num_layers=..., ...)"
        )


def _leaves(state: Any) -> list[Any]:
    if isinstance(state, Mapping):
        return [leaf for value in state.values() for leaf in _leaves(value)]
    if isinstance(state, list | tuple):
        return [leaf for value in state for leaf in _leaves(value)]
    return [state]
