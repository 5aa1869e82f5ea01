"""What a family package provides."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from isthmus.config import HFConfig
from isthmus.layout import Layout
from isthmus.tiny import QUANTISED, STACKED, Tiny, Variant
from isthmus.weights import Heads, WeightMap


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: data and callables, from which the bridge, the commands and the conformance tests work.

    The callables take the checkpoint's config and the set of its tensor names, since a config may not say
    everything (whether there is an MTP block, how experts are stored).
    """

    name: str
    model_types: tuple[str, ...]
    """Those that it converts. Each is an entry point of the package."""
    model_config: Callable[[HFConfig, frozenset[str]], dict[str, Any]]
    """Fields of GPTModelConfig and TransformerConfig that reproduce the checkpoint's arithmetic."""
    weights: Callable[[HFConfig, frozenset[str], Any], WeightMap]
    """The weight map, for a Megatron model config (or anything with its fields)."""
    config_class: str
    """``module:Class`` of the GPTModelConfig to build; imported only when a model is built."""
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """model_type -> why it is not converted. Each is an entry point, too, so that its users are told."""
    axes: frozenset[str] = frozenset({"tp", "sp", "pp", "vp", "ep", "etp", "dp"})
    """The kinds of parallelism that are supported and tested."""
    problems: Callable[[Layout, Mapping[str, Any]], list[str]] | None = None
    """Why a layout cannot divide the parts that Megatron does not have, of a model of these config fields."""
    hosted: Callable[[Any], Heads | None] | None = None
    """How the heads of a hosted module divide, for a model config or anything with its fields; None where it
    hosts none. A layout must divide them, unless `hosted_mode` is "replicated". A family with several has
    `problems` of its own."""
    overruled: Callable[[HFConfig, Mapping[str, tuple[int, ...]]], dict[str, Any]] | None = None
    """Config fields, dotted for those of a section, in which the shapes of a checkpoint's tensors (by name)
    overrule its config, with the values that they give. Everything else is told what the tensors say."""
    corrected: frozenset[str] = frozenset()
    """Of those fields the ones without which transformers does not load the files: an export's config.json
    states them. All others stay as the source has them."""
    tiny: Tiny | None = None
    """Tiny checkpoints for tests, in the layout of the published ones."""
    sample: str | None = None
    """``module:function`` of (config, tokens, kind, generator) that puts random images into a sequence, of a
    family with vision towers: :data:`isthmus.testing.batch.Sample` after its first argument."""
    mtp_reference: str | None = None
    """``module:function`` giving the MTP block in plain HF modules, where HF has none of its own."""

    def variants(self, model_type: str | None = None) -> Mapping[str, Variant]:
        """The tiny variants, of one `model_type` or of all; the first is the usual one."""
        return {
            name: variant
            for name, variant in (self.tiny.variants if self.tiny else {}).items()
            if model_type in (None, variant.config["model_type"])
        }

    def variant(self, name: str, model_type: str | None = None) -> Variant:
        """The tiny variant `name`, of one `model_type` or of all.

        `default` is the first one, `fp8_block` that one quantised, `tied+fp8_block` another one quantised.
        LookupError where the family has none of that name, or none at all.
        """
        variants = self.variants(model_type)
        variants = {"default": next(iter(variants.values())), **variants} if variants else {}
        if name in variants:
            return variants[name]
        base, _, storage = name.rpartition("+")
        plain = variants.get(base or "default")
        if plain is not None and storage in QUANTISED:
            fused = plain.fused_experts or storage in STACKED
            about = f"{plain.about}; {QUANTISED[storage]}"
            return dataclasses.replace(plain, about=about, quantised=storage, fused_experts=fused)
        owner = model_type or f"family {self.name}"
        raise LookupError(
            f"{owner} has no tiny variant {name!r} (it has: {', '.join(variants) or 'none'}; each"
            f" of them quantised, as in default+fp8_block: {', '.join(QUANTISED)})"
        )
