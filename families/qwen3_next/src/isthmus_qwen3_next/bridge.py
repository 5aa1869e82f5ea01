"""Every tensor of a Qwen3-Next checkpoint, in Megatron's names and layouts."""

from typing import Any

from isthmus.config import HFConfig
from isthmus.weights import WeightMap
from isthmus_qwen3_next import rules


def weights(hf: HFConfig, keys: frozenset[str], model: Any) -> WeightMap:
    """The weight map of a checkpoint with tensor names `keys`, for the Megatron model config `model`."""
    return WeightMap(rules.decoder(hf, keys, model))
