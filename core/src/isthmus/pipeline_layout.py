"""Megatron's `pipeline_model_parallel_layout`: which layers stand on which pipeline stage.

``"Ett|(tt|)*2tmL"``: E embedding, t decoder layer, m MTP layer, L loss, | next stage, ``x*3`` and ``(xy)*3``
repeat, commas mean nothing. Stages count through all pipeline ranks, then through their next model chunks.
Megatron takes lists of layer kinds too, ``[["embedding", "decoder"], ["decoder", "loss"]]``.
"""

import re
from collections.abc import Iterator
from typing import Any

KINDS = {"E": "embedding", "t": "decoder layer", "m": "MTP layer", "L": "loss"}
MOST = 100_000  # letters of a layout written out; far more than any model has layers
SHOWN = 20  # digits
LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}  # of Megatron's LayerType


def as_text(layout: Any) -> str | None:
    """Any of Megatron's forms of a layout as its string, None as None. ValueError names strange kinds."""
    layout = getattr(layout, "input_data", layout)  # a PipelineParallelLayerLayout keeps what it was made of
    if layout is None or isinstance(layout, str):
        return layout
    named = [[str(getattr(kind, "name", kind)) for kind in stage] for stage in layout]
    if unknown := sorted({kind for stage in named for kind in stage} - LETTERS.keys()):
        raise ValueError(
            f"pipeline layout {layout}: {', '.join(unknown)} has no meaning here; use {', '.join(LETTERS)}"
        )
    return "|".join("".join(LETTERS[kind] for kind in stage) for stage in named)


def stages(text: str) -> list[str]:
    """The letters of each stage, repetition written out.

    ValueError where a letter means nothing, or where repetition makes more than `MOST` of them.
    """
    unrolled = text.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        left = MOST

        def write_out(match: re.Match[str]) -> str:
            nonlocal left
            digits = match[2].lstrip("0")
            left -= len(match[1]) * int(digits or 0) if len(digits) <= len(str(MOST)) else MOST + 1
            if left < 0:
                count = digits if len(digits) <= SHOWN else f"{digits[:SHOWN]}... ({len(digits)} digits)"
                raise ValueError(
                    f"pipeline layout repeats {match[1]!r} {count} times, more than {MOST} letters in all;"
                    " write each layer of the model once"
                )
            return match[1] * int(digits or 0)

        unrolled = re.sub(repeated, write_out, unrolled)
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
    if empty := [number for number, stage in enumerate(laid_out) if not stage]:
        yield f"nothing on stage {', '.join(map(str, empty))} of 0..{len(laid_out) - 1}; each needs a layer"
    if early := [number for number, stage in enumerate(laid_out[:-1]) if "m" in stage]:
        # Megatron adds up the embedding's gradients over the first and the last stage, and MTP has a copy.
        where, last = ", ".join(map(str, early)), len(laid_out) - 1
        yield f"m (MTP layer) on stage {where}; put it on the last one, {last}: elsewhere it trains wrong"
