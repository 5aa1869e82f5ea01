"""A built Megatron model as a user hands it over: its chunks, and the config that it was built of."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from isthmus.names import unwrapped
from isthmus.weights import collapse

type Model = nn.Module | Sequence[nn.Module]
"""The model chunks of this rank, or its only one."""


def chunks_of(model: Model) -> list[nn.Module]:
    """The chunks as a list.

    ValueError where there are none, where one is no Megatron model, or where FSDP has divided parameters.
    """
    from torch.distributed.tensor import DTensor

    chunks = [model] if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList) else [*model]
    if not chunks:
        raise ValueError("there are no model chunks in an empty list; give what build_model() returned")
    for chunk in chunks:
        if not isinstance(chunk, nn.Module) or not hasattr(unwrapped(chunk), "pg_collection"):
            raise ValueError(
                f"a {type(chunk).__name__} is not a Megatron model; give what build_model() returned"
            )
    divided = [name for chunk in chunks for name, p in chunk.named_parameters() if isinstance(p, DTensor)]
    if divided:
        raise ValueError(
            f"FSDP has divided {len(divided)} parameters, of which a rank holds any rows:\n  "
            + "\n  ".join(collapse(divided))
            + "\nWeights go into and out of models that tensor, expert and pipeline parallelism alone divide:"
            " build the model with Megatron's DistributedDataParallel, or before FSDP wraps it"
        )
    return chunks


def remember(model_config: Any) -> Callable[[list[nn.Module]], list[nn.Module]]:
    """A pre-wrap hook that leaves the model config with the chunks: the weight map depends on it."""

    def hook(chunks: list[nn.Module]) -> list[nn.Module]:
        for chunk in chunks:
            chunk.isthmus_model_config = model_config
        return chunks

    return hook


def model_config_of(model: Sequence[nn.Module]) -> Any:
    """The model config of the chunks; their TransformerConfig where they were not built by a bridge."""
    inner = unwrapped(model[0])
    return getattr(inner, "isthmus_model_config", inner.config)


def fields_of(model_config: Any) -> dict[str, Any]:
    """The fields of a model config and of its TransformerConfig, by name."""
    return {**vars(getattr(model_config, "transformer", model_config)), **vars(model_config)}


def built_fields(model: Sequence[nn.Module]) -> dict[str, Any]:
    """The config fields that the chunks were built of; what another builder's do not tell is absent."""
    config, inner = model_config_of(model), unwrapped(model[0])
    if hasattr(config, "transformer"):
        return fields_of(config)
    return fields_of(config) | {name: getattr(inner, name) for name in _KEPT if hasattr(inner, name)}


_KEPT = (
    "share_embeddings_and_output_weights",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
)
"""Fields of GPTModelConfig that a GPTModel keeps as attributes."""
