"""Megatron's `pipeline_model_parallel_layout`: which layers stand on which pipeline stage.

``"Ett|(tt|)*2tmL"``: E embedding, t decoder layer, m MTP layer, L loss, | next stage, ``x*3`` and ``(xy)*3``
repeat, commas mean nothing. Stages count through all pipeline ranks, then through their next model chunks.
"""

import re
from collections.abc import Iterator

KINDS = {"E": "embedding", "t": "decoder layer", "m": "MTP layer", "L": "loss"}


def stages(text: str) -> list[str]:
    """The letters of each stage, repetition written out. ValueError where a letter means nothing."""
    unrolled = text.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        unrolled = re.sub(repeated, lambda match: match[1] * int(match[2]), unrolled)
    wrong = sorted(set(unrolled) - KINDS.keys() - {"|"})
    if wrong:
        meanings = ", ".join(f"{letter} {kind}" for letter, kind in KINDS.items())
        raise ValueError(
            f"pipeline layout {text!r}: {' '.join(wrong)} has no meaning here ({meanings}, | next stage)"
        )
    return unrolled.split("|")


def problems(text: str, pp: int, vp: int, num_layers: int, mtp_layers: int) -> list[str]:
    """Why a model cannot be laid out so; empty where it can."""
    try:
        laid_out = stages(text)
    except ValueError as error:
        return [str(error)]
    return [f"pipeline layout {text!r}: {what}" for what in _wrong(laid_out, pp, vp, num_layers, mtp_layers)]


def _wrong(laid_out: list[str], pp: int, vp: int, num_layers: int, mtp_layers: int) -> Iterator[str]:
    if len(laid_out) != pp * vp:
        yield f"{len(laid_out)} stages, pp x vp = {pp} x {vp} needs {pp * vp}"
    letters = "".join(laid_out)
    for letter, count in {"E": 1, "t": num_layers, "m": mtp_layers, "L": 1}.items():
        if letters.count(letter) != count:
            yield f"{letters.count(letter)} of {letter} ({KINDS[letter]}), the model has {count}"
    if letters and (letters[0], letters[-1]) != ("E", "L"):
        yield f"begins with {letters[0]} and ends with {letters[-1]}, not with E and L"
    if "t" in letters[letters.find("m") :] and "m" in letters:
        yield "a decoder layer after an MTP layer"
    if sum("m" in stage for stage in laid_out) > 1:
        yield "MTP layers on more than one stage"
