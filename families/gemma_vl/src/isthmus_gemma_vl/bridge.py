"""Every tensor of a Gemma 3 checkpoint, in Megatron's names and layouts."""

from typing import Any

from isthmus.config import HFConfig
from isthmus.weights import Ignored, Rule, WeightMap, embeddings, hosted, ignore, passthrough, same, scope
from isthmus_gemma_vl import rules, tensors
from isthmus_gemma_vl.names import HEADS, VISION, has_vision, prefix, text_config, vision_prefixes


def weights(hf: HFConfig, keys: frozenset[str], model: Any) -> WeightMap:
    """The weight map of a checkpoint with tensor names `keys`, for the Megatron model config `model`."""
    text, before = text_config(hf), prefix(hf, keys)
    layer = f"{before}layers.{{i}}"
    head, *copies = [name for name in HEADS if name in keys] or HEADS[:1]
    tied = model.share_embeddings_and_output_weights
    return WeightMap(
        [
            *embeddings(text, keys, before, tied, head=head, head_copies=tuple(copies)),
            *scope("decoder.layers.{i}", layer, rules.layer(text), i=range(text["num_hidden_layers"])),
            same("decoder.final_layernorm.weight", f"{before}norm.weight"),
            ignore(f"{layer}.self_attn.rotary_emb.inv_freq", because="recomputed from the config"),
            *(_vision(hf, keys, model) if has_vision(hf) else []),
        ]
    )


def _vision(hf: HFConfig, keys: frozenset[str], model: Any) -> list[Rule | Ignored]:
    """The tower as HF has it, whole on every rank; or all of it copied by an export."""
    if getattr(model, "part", "text") == "text":
        because = "the model was built without its vision tower (part='text')"
        names = (f"{root}{part}.*" for root in ("", "model.") for part in VISION)
        return [passthrough(name, because=because) for name in names]
    tower, projector = (prefix.removesuffix(".") for prefix in vision_prefixes(keys))
    return [
        *hosted("vision_model.vision_tower", tower, tensors.vision_tower(hf)),
        *hosted("vision_model.multi_modal_projector", projector, tensors.projector(hf)),
        passthrough(f"{tower}.head.*", because="Gemma 3 does not use SigLIP's pooling head"),
    ]
