"""Every tensor of a Qwen3.5 checkpoint, in Megatron's names and layouts."""

from typing import Any

from isthmus.config import HFConfig
from isthmus.weights import WeightMap, passthrough
from isthmus_qwen3_5.blocks import IN_PROJECTIONS
from isthmus_qwen3_5.names import has_vision, prefix, text_config
from isthmus_qwen3_next import rules


def weights(hf: HFConfig, keys: frozenset[str], model: Any) -> WeightMap:
    """The weight map of a checkpoint with tensor names `keys`, for the Megatron model config `model`."""
    decoder = rules.decoder(text_config(hf), keys, model, prefix(hf, keys), IN_PROJECTIONS)
    return WeightMap([*decoder, *(_VISION if has_vision(hf) else [])])


_VISION = [
    passthrough(name, because="the model was built without its vision tower (part='text')")
    for name in ("model.visual.*", "visual.*")
]
