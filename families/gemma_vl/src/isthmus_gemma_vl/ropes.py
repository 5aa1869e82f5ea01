"""Gemma 3's two rotary embeddings: one base for sliding layers, another, perhaps scaled, for full ones.

transformers 4 writes `rope_theta`, `rope_local_base_freq` and `rope_scaling`, transformers 5
`rope_parameters` with a section for each kind of layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isthmus.config import HFConfig
from isthmus.decoder import Stated, state

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Ropes:
    """Bases of the frequencies, and the factor by which positions of full layers are divided, None for 1."""

    full: float
    sliding: float
    factor: float | None


def ropes(hf: HFConfig) -> Ropes:
    """The two embeddings of a config. ValueError: spellings contradict each other, or a kind of scaling that
    is not "linear", or one of sliding layers."""
    stated: dict[str, Stated] = {FULL: {}, SLIDING: {}}
    for kind, section in hf.get("rope_parameters", {}).items():
        if kind not in stated or not isinstance(section, Mapping):
            raise ValueError(
                f"config.json: rope_parameters.{kind}={section!r}, expected a section for each of"
                f" {FULL} and {SLIDING}"
            )
        for entry, value in section.items():
            name = "rope_type" if entry == "type" else entry
            state(stated[kind], name, f"rope_parameters.{kind}.{entry}", value)
    scaling = hf.get("rope_scaling", {})
    old = scaling.get("type", "default")
    if old != "default" and "rope_type" not in stated[FULL].keys() | scaling.keys():
        raise ValueError(
            f"config.json: rope_scaling.type={old!r}: transformers 4 scales the rope of full layers so,"
            " transformers 5 reads no `type` for Gemma 3 and does not. Write rope_scaling.rope_type, as the"
            " model was trained"
        )
    for entry, value in scaling.items():
        state(stated[FULL], "rope_type" if entry == "type" else entry, f"rope_scaling.{entry}", value)
    state(stated[FULL], "rope_theta", "rope_theta", hf.get("rope_theta"))
    state(stated[SLIDING], "rope_theta", "rope_local_base_freq", hf.get("rope_local_base_freq"))

    values = {kind: {entry: value for entry, (_, value) in found.items()} for kind, found in stated.items()}
    for kind, found in values.items():
        if "rope_theta" not in found:
            found["rope_theta"] = hf.default("rope_parameters")[kind]["rope_theta"]
        if found["rope_theta"] is None:
            name = "rope_theta" if kind == FULL else "rope_local_base_freq"
            raise LookupError(f"config.json: {name} is null; add the value used in training")
    sliding, full = values[SLIDING], values[FULL]
    _check(SLIDING, sliding, ("default",))
    _check(FULL, full, ("default", "linear"))
    factor = full.get("factor")
    if (full.get("rope_type", "default") == "linear") != (factor is not None):
        raise ValueError(
            f"config.json: rope_type {full.get('rope_type', 'default')!r} of full attention with"
            f" factor={factor}: 'linear' needs a factor, and nothing else has one"
        )
    return Ropes(float(full["rope_theta"]), float(sliding["rope_theta"]), factor and float(factor))


def _check(kind: str, values: Mapping[str, Any], types: tuple[str, ...]) -> None:
    rope_type = values.get("rope_type", "default")
    strange = values.keys() - {"rope_type", "rope_theta", "factor"}
    if rope_type not in types or strange or (values.get("factor") is not None and "linear" not in types):
        raise ValueError(
            f"config.json: rope_type {rope_type!r} of {kind} with {dict(values)} is not supported, only"
            f" {' or '.join(types)}"
        )
