"""AutoBridge: a Hugging Face checkpoint and the Megatron model that computes the same function.

bridge = AutoBridge.from_hf_pretrained("Qwen/Qwen3-Next-80B-A3B-Instruct")
config = bridge.get_model_config(tensor_model_parallel_size=4, sequence_parallel=True)
model = bridge.build_model(config)
bridge.load_hf_weights(model)
bridge.save_hf_pretrained(model, "out")
"""

import copy
import dataclasses
import functools
import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isthmus import registry
from isthmus.checkpoint.collector import collector_paused
from isthmus.checkpoint.dtypes import main_dtype, name_of, rounds
from isthmus.config import HFConfig
from isthmus.decoder import dtype_fields
from isthmus.family import Family
from isthmus.layout import Layout
from isthmus.weights import WeightMap, collapse


class AutoBridge:
    """Joins one checkpoint (or config) and Megatron. Made by `from_hf_pretrained` or `from_hf_config`."""

    def __init__(self, family: Family, hf_config: HFConfig, *, folder: Path | None = None) -> None:
        self.family = family
        self.hf_config = hf_config
        self.folder = folder
        self._weights: tuple[Any, WeightMap] | None = None
        self.choices: dict[str, Any] = {}  # config fields that another than the checkpoint decides

    @classmethod
    def from_hf_pretrained(
        cls, path_or_id: str | Path, *, trust_remote_code: bool = False, revision: str | None = None
    ) -> "AutoBridge":
        """Bind to a checkpoint folder or hub id. LookupError where no installed family handles it.

        `trust_remote_code` is accepted for symmetry with transformers; converting weights never runs a
        checkpoint's code.
        """
        folder = resolve(path_or_id, revision)
        config = HFConfig.from_text(read_config(folder))
        return cls(registry.family(config.model_type), config, folder=folder)

    @classmethod
    def from_hf_config(cls, config: Any) -> "AutoBridge":
        """Bind to a config alone: a dict as in config.json, or a transformers config object."""
        raw = dict(config) if isinstance(config, Mapping) else config.to_dict()
        hf_config = HFConfig(raw)
        return cls(registry.family(hf_config.model_type), hf_config)

    @classmethod
    def from_megatron(cls, megatron_dir: str | Path, hf: str | Path | None = None) -> "AutoBridge":
        """Bind to the checkpoint that a Megatron folder was imported from: as it remembers it, or at `hf`.

        Without `hf` names, dtypes, config and side files are known, the source's data is not. ValueError
        where the folder was not made by an import.
        """
        from isthmus.checkpoint.manifest import load_manifest
        from isthmus.checkpoint.megatron_folder import HF, check_folder, recorded_choices

        check_folder(megatron_dir)
        if hf is not None:
            bridge = cls.from_hf_pretrained(hf)
        else:
            manifest = load_manifest(megatron_dir)
            config = HFConfig.from_text(manifest.config_text)
            bridge = cls(registry.family(config.model_type), config, folder=Path(megatron_dir) / HF)
            bridge.config_text, bridge.reader = manifest.config_text, manifest
        bridge.choices = recorded_choices(megatron_dir)
        return bridge

    @cached_property
    def config_text(self) -> str:
        """The text of config.json."""
        if self.folder is None:
            return json.dumps(self.hf_config.raw, indent=2) + "\n"
        return read_config(self.folder)

    @cached_property
    def reader(self) -> Any:
        """The checkpoint's tensors, headers only until they are read. ValueError where there is none."""
        from isthmus.checkpoint.quantised import refuse_quantised
        from isthmus.checkpoint.reader import CheckpointReader

        if self.folder is None:
            raise ValueError(
                "this bridge was made from a config and has no weights; use from_hf_pretrained(folder)"
            )
        reader = CheckpointReader(self.folder)
        refuse_quantised(self.hf_config.raw, reader.tensors)
        return reader

    @cached_property
    def keys(self) -> frozenset[str]:
        """Names of the checkpoint's tensors; empty where there is only a config."""
        return frozenset(self.reader.tensors) if self.folder is not None else frozenset()

    @cached_property
    def megatron_fields(self) -> dict[str, Any]:
        """The Megatron config fields that reproduce the checkpoint's arithmetic."""
        return self.family.model_config(self.hf_config, self.keys)

    def get_model_config(self, **overrides: Any) -> Any:
        """Megatron's model config for this checkpoint, not finalized.

        `overrides` are fields of it or of its TransformerConfig, such as ``tensor_model_parallel_size=2``.
        LookupError names unknown fields; ValueError lists why the layout does not fit the model.
        """
        from megatron.core.transformer.transformer_config import TransformerConfig

        module, _, name = self.family.config_class.partition(":")
        config_class = getattr(importlib.import_module(module), name)
        of_model = {field.name for field in dataclasses.fields(config_class) if field.init}
        of_transformer = {field.name for field in dataclasses.fields(TransformerConfig) if field.init}
        fields = self._fields(overrides)
        unknown = sorted(set(fields) - of_model - of_transformer)
        if unknown:
            raise LookupError(
                f"{config_class.__name__} and TransformerConfig have no field {', '.join(unknown)}"
            )
        Layout.of(fields).check(self.family, fields)
        try:
            transformer = TransformerConfig(**{k: v for k, v in fields.items() if k in of_transformer})
        except AssertionError as error:
            raise ValueError(f"Megatron refuses this configuration: {error}") from error
        return config_class(transformer=transformer, **{k: v for k, v in fields.items() if k in of_model})

    def _fields(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """The checkpoint's fields under `overrides`, and what follows from those."""
        fields: dict[str, Any] = {**self.megatron_fields, **self.choices, **overrides}
        dtype: torch.dtype | None = fields.get("params_dtype")
        if "params_dtype" not in {**self.choices, **overrides} and self.folder is not None:
            stored = main_dtype(self.reader.tensors.values())
            if dtype is not None and stored is not None and dtype != stored:
                raise ValueError(
                    f"config.json says {name_of(dtype)}, most of the weights are {name_of(stored)}."
                    " Choose one with params_dtype (--dtype), or correct config.json"
                )
            dtype = fields["params_dtype"] = dtype or stored
        if dtype is not None:
            fields |= {**dtype_fields(dtype), **overrides}
        if fields.get("virtual_pipeline_model_parallel_size"):
            # With two stages, the previous and the next are one peer, and Megatron's batched default mixes up
            # their messages without an error.
            fields |= {"overlap_p2p_comm": True, "batch_p2p_comm": False, **overrides}
        return fields

    def weight_map(self, model_config: Any, keys: frozenset[str] | None = None) -> WeightMap:
        """The family's rules for this checkpoint and model config (another set of tensor names: `keys`).

        The map of the last config is kept: building, loading and exporting a model take it in turn.
        """
        if keys is not None:
            return self.family.weights(self.hf_config, keys, model_config)
        if self._weights is None or self._weights[0] is not model_config:
            self._weights = model_config, self.family.weights(self.hf_config, self.keys, model_config)
        return self._weights[1]

    def build_model(
        self,
        model_config: Any = None,
        *,
        wrap_with_ddp: bool = False,
        ddp_config: Any = None,
        mixed_precision_wrapper: Callable[[Any, Any], Any] | None = None,
        pg_collection: Any = None,
    ) -> list[nn.Module]:
        """This rank's model chunks from Megatron's own builder; weights are initialised, not loaded.

        Parameters whose source is wider than `params_dtype` (fp32 ones of a bf16 checkpoint) keep its dtype.
        `mixed_precision_wrapper` defaults to Megatron's Float16Module, with those put back after the cast.
        ValueError where Transformer Engine, which `transformer_impl` asks for, is not installed, where
        Megatron refuses the config, and where its parallel sizes are not those of Megatron's process groups.
        """
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.process_groups_config import ProcessGroupCollection

        from isthmus.backend import check_modules
        from isthmus.precision import exact_float16_module
        from isthmus.vocabulary import mask_padding

        config = copy.copy(model_config if model_config is not None else self.get_model_config())
        check_modules(config.transformer)
        if pg_collection is None:
            _check_groups(config.transformer)
        hooks = [_remember(config), self._keep_precision(config), mask_padding(config)]
        config.pre_wrap_hooks = [*config.pre_wrap_hooks, *hooks]
        try:
            config.finalize()
        except AssertionError as error:
            raise ValueError(f"Megatron refuses this configuration: {error}") from error
        if wrap_with_ddp and ddp_config is None:
            ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        return config.get_builder_cls()(config).build_distributed_models(
            pg_collection or ProcessGroupCollection.use_mpu_process_groups(),
            ddp_config=ddp_config,
            wrap_with_ddp=wrap_with_ddp,
            mixed_precision_wrapper=mixed_precision_wrapper or exact_float16_module,
        )

    def _keep_precision(self, model_config: Any) -> Callable[[list[nn.Module]], list[nn.Module]]:
        """A pre-wrap hook that marks parameters whose source has values that `params_dtype` would round.

        Not where the source has the checkpoint's main dtype: rounding that is the user's choice. ValueError
        names parameters that even float32 would round.
        """

        def mark(chunks: list[nn.Module]) -> list[nn.Module]:
            from isthmus.names import live_tensors
            from isthmus.precision import mark_param_dtype

            if self.folder is None:
                return chunks
            tensors = self.reader.tensors
            weights = self.weight_map(model_config)
            usual = main_dtype(tensors.values())
            wide: dict[str, list[str]] = {}
            for live in live_tensors(chunks):
                bound = weights.megatron.get(live.canonical)
                if bound is None or not isinstance(live.tensor, nn.Parameter):
                    continue
                sources = {tensors[hf.name].dtype for hf in bound.hf if hf.name in tensors} - {usual}
                dtype = functools.reduce(torch.promote_types, sources, live.tensor.dtype)
                if rounds(dtype, torch.float32):
                    wide.setdefault(name_of(dtype), []).append(live.canonical)
                elif dtype != live.tensor.dtype:
                    mark_param_dtype(live.tensor, dtype)
            if wide:
                raise ValueError(
                    "parameters are float32 at most, and the checkpoint has wider numbers for some. Store"
                    " these in float32:\n  "
                    + "\n  ".join(f"{dtype}: {', '.join(collapse(names))}" for dtype, names in wide.items())
                )
            return chunks

        return mark

    @collector_paused()
    def load_hf_weights(
        self, model: Sequence[nn.Module], *, advance: Callable[[int], None] = lambda n: None
    ) -> Any:
        """Fill the model chunks from the checkpoint; returns a `LoadReport`. No collective.

        Load before the optimizer is made, or tell it (`optimizer.reload_model_params()`).
        """
        from isthmus.checkpoint.load import load

        return load(model, self.weight_map(model_config_of(model)), self.reader, advance)

    def export_hf_weights(
        self,
        model: Sequence[nn.Module],
        *,
        dtype: torch.dtype | str = "source",
        cpu: bool = True,
        ranks: str = "all",
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (HF name, tensor), in the same order on every rank. Collective: run it to its end.

        `dtype` "source" is the checkpoint's dtype for each tensor. `ranks` "all" yields every tensor on every
        rank, "owner" each on one rank only, which spares the broadcast. A tensor may be a view of the model's
        own memory (on a CPU it often is): clone what is written to, or kept while the model trains on.
        """
        from isthmus.checkpoint.export import stream

        if ranks not in ("all", "owner"):
            raise ValueError(f"ranks must be 'all' or 'owner', got {ranks!r}")
        for name, tensor in stream(self._plan(model, dtype), everywhere=ranks == "all"):
            yield name, tensor.cpu() if cpu else tensor

    @collector_paused()
    def save_hf_pretrained(
        self,
        model: Sequence[nn.Module],
        out_dir: str | Path,
        *,
        dtype: torch.dtype | str = "source",
        max_shard_size: str | int = "5GB",
        overwrite: bool = False,
        passthrough: bool = True,
        advance: Callable[[int], None] = lambda n: None,
    ) -> None:
        """Write a folder that transformers, vLLM and SGLang load. Collective; atomic: all of it or nothing.

        `passthrough` copies the source tensors that the model was built without (its MTP block, ...).
        """
        from isthmus.checkpoint.save import config_changes, save

        coverage = self.weight_map(model_config_of(model)).cover(self.keys)
        save(
            self,
            self._plan(model, dtype),
            Path(out_dir),
            coverage=coverage,
            config_changes=config_changes(as_dtype(dtype), coverage, passthrough),
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            passthrough=passthrough,
            copied_dtype=as_dtype(dtype),
            advance=advance,
        )

    def import_ckpt(
        self,
        megatron_dir: str | Path,
        model: Sequence[nn.Module] | None = None,
        *,
        overwrite: bool = False,
        advance: Callable[[int], None] = lambda n: None,
    ) -> Any:
        """Write a torch_dist checkpoint that `megatron.training --load` starts from; returns a `LoadReport`.

        Collective; atomic. Loads the weights into `model`, or into one built for Megatron's process groups.
        ValueError, before either, where `megatron_dir` is not empty and not to be overwritten.
        """
        from isthmus.checkpoint.folder import check_target
        from isthmus.checkpoint.gather import from_first
        from isthmus.checkpoint.torch_dist import write

        self.reader  # noqa: B018 - no weights is an error before a model is built
        from_first(lambda: check_target(megatron_dir, overwrite, sources=self._folders()))
        chunks = self._built(model, {})

        def fill() -> Any:
            return self.load_hf_weights(chunks, advance=advance)

        return write(self, chunks, Path(megatron_dir), fill, overwrite=overwrite)

    def export_ckpt(
        self,
        megatron_dir: str | Path,
        out_dir: str | Path,
        *,
        model: Sequence[nn.Module] | None = None,
        **save_options: Any,
    ) -> None:
        """Write an HF folder from a Megatron folder's newest checkpoint, saved at any layout. Collective.

        `save_options` are those of `save_hf_pretrained`. ValueError where tensors are to be passed through
        and this bridge knows them from the Megatron folder only, which does not hold them.
        """
        from isthmus.checkpoint.folder import check_target
        from isthmus.checkpoint.gather import from_first
        from isthmus.checkpoint.torch_dist import check_export, found_fields, read

        sources = [*self._folders(), Path(megatron_dir)]
        from_first(lambda: check_target(out_dir, save_options.get("overwrite", False), sources=sources))
        chunks = self._built(model, found_fields(megatron_dir) if model is None else {})
        coverage = self.weight_map(model_config_of(chunks)).cover(self.keys)
        check_export(self, coverage, save_options)
        read(chunks, Path(megatron_dir))
        self.save_hf_pretrained(chunks, out_dir, **save_options)

    def _folders(self) -> list[Path]:
        """The source's folder, which no output may take away."""
        return [] if self.folder is None else [self.folder]

    def _built(self, model: Sequence[nn.Module] | None, fields: Mapping[str, Any]) -> list[nn.Module]:
        """The chunks given, or new ones for Megatron's process groups as they are initialised."""
        if model is not None:
            return list(model)
        layout = Layout.current()
        return self.build_model(self.get_model_config(**layout.config_overrides(), **fields))

    @collector_paused()
    def _plan(self, model: Sequence[nn.Module], dtype: torch.dtype | str) -> Any:
        from isthmus.checkpoint.export import plan
        from isthmus.names import live_tensors, unwrapped

        source = self.reader.tensors if self.folder is not None else {}
        wanted = as_dtype(dtype)

        def dtype_of(name: str, held: torch.dtype) -> torch.dtype:
            if wanted is not None:
                return wanted
            return source[name].dtype if name in source else held

        order = {name: position for position, name in enumerate(source)}
        return plan(
            list(live_tensors(model)),
            unwrapped(model[0]),
            self.weight_map(model_config_of(model)),
            dtype_of=dtype_of,
            order=order or None,
        )


def resolve(path_or_id: str | Path, revision: str | None = None) -> Path:
    """The folder of a checkpoint; a hub id is downloaded, or found in the offline cache."""
    folder = Path(path_or_id)
    if folder.is_dir():
        return folder
    if folder.exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(path_or_id)):
        raise FileNotFoundError(f"{path_or_id} is neither a checkpoint folder nor a hub id")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(path_or_id), revision=revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise FileNotFoundError(
            f"{path_or_id} is not a folder here, and the hub gives no checkpoint of that name: {error}"
        ) from error


def read_config(folder: Path) -> str:
    """The text of the folder's config.json. FileNotFoundError where there is none."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json; it is not a Hugging Face checkpoint")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def as_dtype(name: torch.dtype | str) -> torch.dtype | None:
    """A dtype by name; None for "source"."""
    if name == "source":
        return None
    dtype = name if isinstance(name, torch.dtype) else getattr(torch, str(name), None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be source, float32, bfloat16 or float16, got {name!r}")
    return dtype


def model_config_of(model: Sequence[nn.Module]) -> Any:
    """The model config of the chunks; their TransformerConfig where they were not built by a bridge."""
    from isthmus.names import unwrapped

    inner = unwrapped(model[0])
    return getattr(inner, "isthmus_model_config", inner.config)


def _check_groups(transformer: Any) -> None:
    """ValueError where the config's sizes are not those of Megatron's process groups."""
    asked, made = Layout.of(vars(transformer)), Layout.current()
    names = ("tp", "pp", "cp", "ep", "etp") if transformer.num_moe_experts else ("tp", "pp", "cp")
    if wrong := [name for name in names if getattr(asked, name) != getattr(made, name)]:
        sizes = ", ".join(f"{name}={getattr(asked, name)} and {name}={getattr(made, name)}" for name in wrong)
        raise ValueError(
            f"the model config and Megatron's process groups differ: {sizes}. Make both of one Layout:"
            " layout.initialize() and get_model_config(**layout.config_overrides())"
        )


def _remember(model_config: Any) -> Callable[[list[nn.Module]], list[nn.Module]]:
    """A pre-wrap hook that leaves the model config with the chunks: the weight map depends on it."""

    def remember(chunks: list[nn.Module]) -> list[nn.Module]:
        for chunk in chunks:
            chunk.isthmus_model_config = model_config
        return chunks

    return remember
