"""What the values of config.json may be: a kind for each field, told by its name.

The names mean the same in every family and release, so one table serves all; fields that it does not have are
the business of who reads them.
"""

import math
import re
import reprlib
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

MOST_LAYERS = 10_000  # a slip of the finger here would be a list that fills the memory
DTYPES = ("float32", "bfloat16", "float16")


class Kind(NamedTuple):
    """What values there may be: in words, and whether one is of the kind."""

    words: str
    holds: Callable[[Any], bool]


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # which no NaN is


COUNT = Kind("a whole number, 0 or more", _whole)
SIZE = Kind("a whole number, 1 or more", lambda value: _whole(value) and value >= 1)
LAYERS = Kind(
    f"a whole number from 1 to {MOST_LAYERS:,}", lambda value: _whole(value) and 1 <= value <= MOST_LAYERS
)
ABOVE_ZERO = Kind("a number above 0", lambda value: _number(value) and value > 0)
NOT_NEGATIVE = Kind("a number, 0 or more", lambda value: _number(value) and value >= 0)
FRACTION = Kind("a number above 0, at most 1", lambda value: _number(value) and 0 < value <= 1)
PROBABILITY = Kind("a number, 0 or more and below 1", lambda value: _number(value) and 0 <= value < 1)
SWITCH = Kind("true or false", lambda value: isinstance(value, bool))
NAME = Kind("a name", lambda value: isinstance(value, str))
NAMES = Kind("a list of names", lambda value: _all(value, NAME))
INDICES = Kind("a list of whole numbers, 0 or more", lambda value: _all(value, COUNT))
SECTION = Kind("an object", lambda value: isinstance(value, Mapping))
DTYPE = Kind(
    f"one of {', '.join(DTYPES)}", lambda value: str(value).removeprefix("torch.") in DTYPES
)  # from a config object it may be torch's own


def _all(value: Any, kind: Kind) -> bool:
    return isinstance(value, list | tuple) and all(map(kind.holds, value))


KINDS: dict[str, Kind] = {  # a pattern of the whole name -> its kind; the first that fits counts
    r"num_hidden_layers": LAYERS,
    r"mlp_only_layers|deepstack_visual_indexes|mrope_section": INDICES,
    r"(hidden|vocab|intermediate|out_hidden|image|patch|temporal_patch|spatial_merge)_size": SIZE,
    r"max_position_embeddings": SIZE,
    r"depth": LAYERS,
    r"num_heads|(in|num)_channels|num_position_embeddings|mm_tokens_per_image": SIZE,
    r"num_attention_heads|num_key_value_heads|linear_num_\w+_heads": SIZE,
    r"(image|video|vision_start|vision_end|boi|eoi)_token_(id|index)": COUNT,
    r"(\w+_)?head_dim|\w+_kernel_dim|\w+_interval|\w+_step": SIZE,
    r"mscale(_all_dim)?": NOT_NEGATIVE,
    r"num_\w+|\w+_(size|dim|heads|layers|position_embeddings|per_tok)": COUNT,
    r"n_(group|routed_experts|shared_experts)|topk_group|first_k_dense_replace|(q|kv)_lora_rank": COUNT,
    r"(attention_)?factor|beta_(fast|slow)": ABOVE_ZERO,
    r"(\w+_)?theta|\w+_base_freq|\w+_eps|\w*scaling_factor": ABOVE_ZERO,
    r"sliding_window(_pattern)?": SIZE,
    r"query_pre_attn_scalar|\w+_softcapping": ABOVE_ZERO,
    r"partial_rotary_factor": FRACTION,
    r"initializer_range|\w+_coef": NOT_NEGATIVE,
    r"\w+_dropout": PROBABILITY,
    r"tie_word_embeddings|norm_topk_prob|attention_bias|mlp_bias|use_bidirectional_attention": SWITCH,
    r"mrope_interleaved": SWITCH,
    r"model_type|hidden_act|hidden_activation|rope_type|scoring_func|topk_method": NAME,
    r"(\w+_)?layer_types": NAMES,
    r"rope_parameters|rope_scaling": SECTION,
    r"dtype|torch_dtype|mamba_ssm_dtype": DTYPE,
}


def check_values(raw: Mapping[str, Any], path: str = "") -> None:
    """ValueError that lists every value of the config `raw` that its field cannot have; null is absence.

    The entries of rope's sections are checked too; `path` is what stands before the names, "text_config.".
    """
    raise_any(list(_misfits(raw, path)))


def raise_any(wrong: Sequence[str]) -> None:
    """ValueError that lists what is wrong with values of config.json, if anything is."""
    if len(wrong) == 1:
        raise ValueError(f"config.json: {wrong[0]}")
    if wrong:
        raise ValueError("config.json has values that its fields cannot have:\n  " + "\n  ".join(wrong))


def misfits(
    raw: Mapping[str, Any], kinds: Mapping[str, Kind], path: str, needed: Container[str] = ()
) -> Iterator[str]:
    """Each value of `raw` that its field cannot have, in words; null is absence, but for `needed` fields."""
    for key, kind in kinds.items():
        value = raw.get(key)
        if not kind.holds(value) and (value is not None or key in needed):
            yield f"{path}{key}={reprlib.repr(value)}, expected {kind.words}"


def _misfits(raw: Mapping[str, Any], path: str) -> Iterator[str]:
    for key, value in raw.items():
        kind = kind_of(key)
        if value is None:
            continue
        if kind is not None and not kind.holds(value):
            yield f"{path}{key}={reprlib.repr(value)}, expected {kind.words}"
        elif kind is SECTION:
            yield from _misfits(value, f"{path}{key}.")
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"{path}{key}={value}, expected a finite number"


def kind_of(name: str) -> Kind | None:
    """The kind of a field, None where the table does not have it."""
    for pattern, kind in KINDS.items():
        if re.fullmatch(pattern, name):
            return kind
    return None
