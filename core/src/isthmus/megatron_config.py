"""Megatron's model config of a checkpoint: its fields and a user's, in Megatron's two dataclasses."""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

import torch

from isthmus.checkpoint.dtypes import name_of
from isthmus.decoder import dtype_fields
from isthmus.family import Family
from isthmus.layout import Layout
from isthmus.model_fields import check_kinds, with_dtypes


def config_class(family: Family) -> type:
    """The family's GPTModelConfig."""
    module, _, name = family.config_class.partition(":")
    return getattr(importlib.import_module(module), name)


def build(
    family: Family, stated: Mapping[str, Any], chosen: Mapping[str, Any], stored: torch.dtype | None
) -> Any:
    """The family's model config, not finalized.

    Args:
        stated: fields that the checkpoint's config.json decides.
        chosen: fields that overrule them; dtypes may be given by name.
        stored: dtype of most of the checkpoint's weights, None where there are none.

    Raises:
        LookupError: names fields that there are not.
        ValueError: lists values that are none for their fields, and why the layout does not fit the model.
    """
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    model = config_class(family)
    kind = MLATransformerConfig if stated.get("multi_latent_attention") else TransformerConfig
    chosen = with_dtypes(chosen)
    check_kinds((model, kind), chosen)
    fields = _with_what_follows({**stated, **chosen}, chosen, stored)
    Layout.of(fields).check(family, fields)
    of_model, of_transformer = (
        {
            field.name: fields[field.name]
            for field in dataclasses.fields(owner)
            if field.init and field.name in fields
        }
        for owner in (model, kind)
    )
    try:
        transformer = kind(**of_transformer)
    except AssertionError as error:
        raise ValueError(f"Megatron refuses this configuration: {error}") from error
    return model(transformer=transformer, **of_model)


def _with_what_follows(
    fields: dict[str, Any], chosen: Mapping[str, Any], stored: torch.dtype | None
) -> dict[str, Any]:
    """The fields with those that follow from others; what was chosen stays."""
    dtype: torch.dtype | None = fields.get("params_dtype")
    if "params_dtype" not in chosen:
        if dtype is not None and stored is not None and dtype != stored:
            raise ValueError(
                f"config.json says {name_of(dtype)}, most of the weights are {name_of(stored)}."
                " Choose one with params_dtype (--dtype), or correct config.json"
            )
        dtype = dtype or stored
    if dtype is not None:
        fields |= {**dtype_fields(dtype), **chosen}
    if fields.get("virtual_pipeline_model_parallel_size"):
        # With two stages, the previous and the next are one peer, and Megatron's batched default mixes up
        # their messages without an error.
        fields |= {"overlap_p2p_comm": True, "batch_p2p_comm": False, **chosen}
    return fields
