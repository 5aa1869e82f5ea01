"""Every tensor of a Gemma 3 checkpoint, in Megatron's names and layouts."""

from typing import Any

from isthmus.config import HFConfig
from isthmus.weights import WeightMap, embeddings, ignore, passthrough, same, scope
from isthmus_gemma_vl import rules
from isthmus_gemma_vl.names import HEADS, has_vision, prefix, text_config


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
            *(_VISION if has_vision(hf) else []),
        ]
    )


_VISION = [
    passthrough(name, because="the model was built without its vision tower (part='text')")
    for part in ("vision_tower", "multi_modal_projector")
    for name in (f"{part}.*", f"model.{part}.*")
]
