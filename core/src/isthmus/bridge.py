"""AutoBridge: a Hugging Face checkpoint and the Megatron model that computes the same function.

bridge = AutoBridge.from_hf_pretrained("Qwen/Qwen3-Next-80B-A3B-Instruct")
config = bridge.get_model_config(tensor_model_parallel_size=4, sequence_parallel=True)
model = bridge.build_model(config)
bridge.load_hf_weights(model)
bridge.save_hf_pretrained(model, "out")
"""

import copy
import itertools
import json
import operator
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isthmus import arithmetic, megatron_config, registry
from isthmus.built import Model, built_fields, chunks_of, fields_of, model_config_of, remember
from isthmus.checkpoint.collector import collector_paused
from isthmus.checkpoint.dtypes import as_dtype, main_dtype
from isthmus.checkpoint.source import read_config, resolve
from isthmus.config import HFConfig
from isthmus.family import Family
from isthmus.layout import Layout
from isthmus.weights import WeightMap


class AutoBridge:
    """Joins one checkpoint (or config) and Megatron. Made by `from_hf_pretrained` or `from_hf_config`."""

    def __init__(self, family: Family, hf_config: HFConfig, *, folder: Path | None = None) -> None:
        self.family = family
        self._stated = hf_config
        self.folder = folder
        self._weights: tuple[Any, WeightMap] | None = None
        self.choices: dict[str, Any] = {}  # config fields that another than the checkpoint decides
        self.megatron_dir: Path | None = None  # the Megatron folder that the choices were recorded in

    @classmethod
    def from_hf_pretrained(
        cls,
        path_or_id: str | Path,
        *,
        trust_remote_code: bool = False,
        revision: str | None = None,
        part: str | None = None,
    ) -> "AutoBridge":
        """Bind to a checkpoint folder or hub id. LookupError where no installed family handles it.

        `trust_remote_code` is accepted for symmetry with transformers; converting weights never runs a
        checkpoint's code. `part` "text" is the language model of a vision-language checkpoint, whose other
        tensors an export copies from the source; LookupError where the checkpoint has no such part.
        """
        folder = resolve(path_or_id, revision)
        config = HFConfig.from_text(read_config(folder))
        bridge = cls(registry.family(config.model_type), config, folder=folder)
        if part is not None:
            if part not in bridge.parts:
                known = (
                    f"it has {' and '.join(map(repr, bridge.parts))}" if bridge.parts else "leave out part"
                )
                raise LookupError(f"no part {part!r} of a checkpoint of {config.model_type!r}: {known}")
            bridge.choices["part"] = part
        return bridge

    @classmethod
    def from_hf_config(cls, config: Any) -> "AutoBridge":
        """Bind to a config alone: a dict as in config.json, or a transformers config object."""
        if not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
            raise ValueError(
                f"expected a config.json's dict or a transformers config, got {config!r};"
                " a checkpoint folder or hub id is for from_hf_pretrained"
            )
        hf_config = HFConfig(config if isinstance(config, Mapping) else config.to_dict())
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
        # Names, such as which part of a vision-language model it is, may be the run's choice.
        sizes = [name for name, value in bridge.megatron_fields.items() if not isinstance(value, str)]
        bridge.choices = recorded_choices(megatron_dir, sizes)
        bridge.megatron_dir = Path(megatron_dir)
        return bridge

    @cached_property
    def hf_config(self) -> HFConfig:
        """The checkpoint's config; fields that its tensors overrule have the values that these give."""
        return self._stated.overruled_by(self.overruled) if self.overruled else self._stated

    @cached_property
    def overruled(self) -> dict[str, Any]:
        """Config fields in which the checkpoint's tensors overrule config.json, with their true values."""
        if self.family.overruled is None or self.folder is None:
            return {}
        return self.family.overruled(
            self._stated, {name: info.shape for name, info in self.reader.tensors.items()}
        )

    @cached_property
    def config_text(self) -> str:
        """The text of config.json."""
        if self.folder is None:
            return json.dumps(self._stated.raw, indent=2) + "\n"
        return read_config(self.folder)

    @cached_property
    def reader(self) -> Any:
        """The checkpoint's tensors as real numbers; headers only until they are read. ValueError: none."""
        from isthmus.checkpoint.dequantised import open_checkpoint

        if self.folder is None:
            raise ValueError(
                "this bridge was made from a config and has no weights; use from_hf_pretrained(folder)"
            )
        return open_checkpoint(self.folder, self._stated.raw)

    @cached_property
    def keys(self) -> frozenset[str]:
        """Names of the checkpoint's tensors; empty where there is only a config."""
        return frozenset(self.reader.tensors) if self.folder is not None else frozenset()

    @property
    def parts(self) -> tuple[str, ...]:
        """What `part` of the checkpoint may be built; none of a family without vision towers."""
        return {"all": ("all", "text"), "text": ("text",)}.get(self.megatron_fields.get("part", ""), ())

    @cached_property
    def megatron_fields(self) -> dict[str, Any]:
        """The Megatron config fields that reproduce the checkpoint's arithmetic."""
        return self.family.model_config(self.hf_config, self.keys)

    def get_model_config(self, **overrides: Any) -> Any:
        """Megatron's model config for this checkpoint, not finalized.

        `overrides` are fields of it or of its TransformerConfig, such as ``tensor_model_parallel_size=2``.
        Dtypes may be given by name. LookupError names unknown fields; ValueError lists values that are none
        for their fields, and why the layout does not fit the model.
        """
        from isthmus.checkpoint.megatron_folder import check_recorded

        if self.megatron_dir is not None:
            check_recorded(self.megatron_dir, self.choices, megatron_config.config_class(self.family))
        stored = main_dtype(self.reader.tensors.values()) if self.folder is not None else None
        chosen = {**self.choices, **overrides}
        return megatron_config.build(self.family, self.megatron_fields, chosen, stored)

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

        from isthmus import optimizer_state
        from isthmus.backend import check_modules
        from isthmus.padding_token import FreezePadding
        from isthmus.precision import exact_float16_module
        from isthmus.vocabulary import MaskPadding

        config = copy.copy(model_config if model_config is not None else self.get_model_config())
        check_modules(config.transformer)
        optimizer_state.install()
        if pg_collection is None:
            transformer = config.transformer
            Layout.of(vars(transformer)).check_groups(experts=bool(transformer.num_moe_experts))
        pad = getattr(config, "pad", self.megatron_fields.get("pad", -1))  # not in Megatron's class
        hooks = [remember(config), self._pin(config), MaskPadding(config.vocab_size), FreezePadding(pad)]
        config.pre_wrap_hooks = [*config.pre_wrap_hooks, *hooks]
        if wrap_with_ddp and ddp_config is None:
            ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        try:
            config.finalize()
            return config.get_builder_cls()(config).build_distributed_models(
                pg_collection or ProcessGroupCollection.use_mpu_process_groups(),
                ddp_config=ddp_config,
                wrap_with_ddp=wrap_with_ddp,
                mixed_precision_wrapper=mixed_precision_wrapper or exact_float16_module,
            )
        except AssertionError as error:
            raise ValueError(f"Megatron refuses this configuration: {error}") from error

    def _pin(self, model_config: Any) -> Callable[[list[nn.Module]], list[nn.Module]]:
        """A pre-wrap hook that marks the parameters that keep a wider dtype than `params_dtype`."""
        from isthmus.checkpoint.pins import mark_wide_sources

        def hook(chunks: list[nn.Module]) -> list[nn.Module]:
            if self.folder is not None:
                mark_wide_sources(chunks, self.weight_map(model_config), self.reader.tensors)
            return chunks

        return hook

    def _checked(self, model: Model) -> list[nn.Module]:
        """The model's chunks. ValueError lists the fields by which it computes another function."""
        chunks = chunks_of(model)
        arithmetic.check(self._arithmetic, built_fields(chunks), "the model")
        return chunks

    @cached_property
    def _arithmetic(self) -> dict[str, Any]:
        """`megatron_fields` as a model config holds them: with what Megatron makes of a None."""
        fields = fields_of(self.get_model_config(params_dtype=torch.float32))
        return {name: fields[name] for name in self.megatron_fields}

    @collector_paused()
    def load_hf_weights(self, model: Model, *, advance: Callable[[int], None] = lambda n: None) -> Any:
        """Fill the model chunks from the checkpoint; returns a `LoadReport`. No collective.

        Load before the optimizer is made, or tell it (`optimizer.reload_model_params()`). ValueError, before
        a parameter is touched, lists what keeps the model from being this checkpoint's: fields of its config
        that change the arithmetic, missing and unknown tensors, shapes, roundings.
        """
        from isthmus.checkpoint.load import load

        chunks = self._checked(model)
        return load(chunks, self.weight_map(model_config_of(chunks)), self.reader, advance)

    def export_hf_weights(
        self,
        model: Model,
        *,
        dtype: torch.dtype | str = "auto",
        cpu: bool = True,
        ranks: str = "all",
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (HF name, tensor), in the same order on every rank. Collective: run it to its end.

        `dtype` "auto" is the checkpoint's dtype for each tensor, and that of its real numbers where it is
        quantised; "source" gives codes and scales there, under the checkpoint's own names. `ranks` "all"
        yields every tensor on every rank, "owner" each on one rank only, which spares the broadcast. A tensor
        may be a view of the model's own memory (on a CPU it often is): clone what is written to, or kept
        while the model trains on.
        """
        from isthmus.checkpoint.outgoing import stream_of

        for _, name, tensor in stream_of(self, self._checked(model), dtype=dtype, cpu=cpu, ranks=ranks):
            yield name, tensor

    def export_hf_groups(self, model: Model, **options: Any) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield `export_hf_weights` in lists that must reach an engine in one bucket. Collective.

        A list holds the tensors that engines fuse: those of one Megatron tensor, codes and scales of each,
        and what the family declares (`isthmus.weights.atomic`). `options` are those of `export_hf_weights`;
        with `ranks` "owner", one rank owns a list.
        """
        from isthmus.checkpoint.outgoing import stream_of

        stream = stream_of(self, self._checked(model), **options)
        for _, group in itertools.groupby(stream, key=operator.itemgetter(0)):
            yield [(name, tensor) for _, name, tensor in group]

    @collector_paused()
    def save_hf_pretrained(
        self,
        model: Model,
        out_dir: str | Path,
        *,
        dtype: torch.dtype | str = "auto",
        max_shard_size: str | int = "5GB",
        overwrite: bool = False,
        passthrough: bool = True,
        advance: Callable[[int], None] = lambda n: None,
    ) -> None:
        """Write a folder that transformers, vLLM and SGLang load. Collective; atomic: all of it or nothing.

        `passthrough` copies the source tensors that the model was built without (its MTP block, ...). `dtype`
        "auto" writes a quantised source's weights as plain numbers, "source" in its own quantised format.
        """
        from isthmus.checkpoint.outgoing import plan_of, requantiser_of
        from isthmus.checkpoint.save import config_changes, save

        chunks = self._checked(model)
        coverage = self.weight_map(model_config_of(chunks)).cover(self.keys)
        save(
            self,
            plan_of(self, chunks, dtype, written=True),
            Path(out_dir),
            coverage=coverage,
            config_changes=config_changes(as_dtype(dtype), coverage, passthrough),
            requantiser=requantiser_of(self, dtype),
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            passthrough=passthrough,
            copied_dtype=as_dtype(dtype),
            advance=advance,
        )

    def import_ckpt(
        self,
        megatron_dir: str | Path,
        model: Model | None = None,
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
        chunks = self._checked(self._build_like_groups() if model is None else model)

        def fill() -> Any:
            return self.load_hf_weights(chunks, advance=advance)

        return write(self, chunks, Path(megatron_dir), fill, overwrite=overwrite)

    def export_ckpt(
        self,
        megatron_dir: str | Path,
        out_dir: str | Path,
        *,
        model: Model | None = None,
        **save_options: Any,
    ) -> None:
        """Write an HF folder from a Megatron folder's newest checkpoint, saved at any layout. Collective.

        `save_options` are those of `save_hf_pretrained`. ValueError where tensors are to be passed through
        and this bridge knows them from the Megatron folder only, which does not hold them.
        """
        from isthmus.checkpoint.folder import check_target
        from isthmus.checkpoint.gather import from_first
        from isthmus.checkpoint.torch_dist import check_export, found_fields, read, saved_fields

        sources = [*self._folders(), Path(megatron_dir)]
        from_first(lambda: check_target(out_dir, save_options.get("overwrite", False), sources=sources))
        if model is None:
            model = self._build_like_groups(**found_fields(megatron_dir))
        chunks = self._checked(model)
        saved = saved_fields(megatron_dir, self._arithmetic)
        arithmetic.check(self._arithmetic, saved, f"the run saved in {megatron_dir}")
        coverage = self.weight_map(model_config_of(chunks)).cover(self.keys)
        check_export(self, coverage, save_options)
        read(chunks, Path(megatron_dir))
        self.save_hf_pretrained(chunks, out_dir, **save_options)

    def _folders(self) -> list[Path]:
        """The source's folder, which no output may take away."""
        return [] if self.folder is None else [self.folder]

    def _build_like_groups(self, **fields: Any) -> list[nn.Module]:
        """New chunks for Megatron's process groups as they are initialised, of these config fields."""
        return self.build_model(self.get_model_config(**Layout.current().config_overrides(), **fields))
