"""Every tensor of a Qwen3.5 checkpoint, in Megatron's names and layouts."""

from typing import Any

from isthmus.config import HFConfig
from isthmus.weights import Ignored, Rule, WeightMap, hosted, passthrough
from isthmus_qwen3_5.blocks import IN_PROJECTIONS
from isthmus_qwen3_5.names import VISION, has_vision, prefix, text_config
from isthmus_qwen3_5.tensors import vision_tower
from isthmus_qwen3_next import rules


def weights(hf: HFConfig, keys: frozenset[str], model: Any) -> WeightMap:
    """The weight map of a checkpoint with tensor names `keys`, for the Megatron model config `model`."""
    decoder = rules.decoder(text_config(hf), keys, model, prefix(hf, keys), IN_PROJECTIONS)
    return WeightMap([*decoder, *(_vision(hf, keys, model) if has_vision(hf) else [])])


def _vision(hf: HFConfig, keys: frozenset[str], model: Any) -> list[Rule | Ignored]:
    """The tower as HF has it, whole on every rank; or all of it copied by an export."""
    if getattr(model, "part", "text") == "text":
        because = "the model was built without its vision tower (part='text')"
        return [passthrough(f"{name}.*", because=because) for name in VISION]
    name = next((name for name in VISION if any(key.startswith(f"{name}.") for key in keys)), VISION[0])
    return [*hosted("vision_model", name, vision_tower(hf))]
