"""The document of `isthmus verify` as one page that explains itself, with no outside assets."""

import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from isthmus.testing.report_chart import Point, bar, chart
from isthmus.weights import collapse

SIZES = {
    "tp": "tensor parallel",
    "pp": "pipeline stages",
    "vp": "chunks per stage",
    "ep": "expert parallel",
    "etp": "tensor parallel in experts",
    "cp": "context parallel",
    "dp": "data parallel",
}

_FIGURE, _UNBROKEN = re.compile(r"\d[\d.]*e-\d+"), r'<span class="figure">\g<0></span>'

GAPS = {  # of the coverage section -> what becomes of such a tensor
    "missing_hf": "missing from the checkpoint",
    "wrong_shapes": "{why}",
    "unmapped_hf": "no rule loads it",
    "unmapped_megatron": "Megatron tensor that no rule fills",
    "unheld_megatron": "rule for a tensor that no rank holds",
}

GLOSSARY = {
    "coverage": "Every tensor of the checkpoint and of the model is accounted for: loaded, copied by an"
    " export, or left out for a reason.",
    "rel RMS": "RMS(isthmus - HF) / RMS(HF): the size of the difference against the size of the result, over"
    " all elements. 1e-06 means that six digits agree.",
    "bound": "What may still pass. {reason}.",
    "round trip": "Every tensor is loaded into Megatron's layout and exported again; each bit must be the"
    " source's. It proves that nothing is lost, but not that it is in the right place: a mistake that loading"
    " and exporting share cancels. The forward pass below proves that.",
    "float32 parameters": "Parameters that stay float32 though the model trains in a narrower dtype. Their"
    " bits must be the source's: a value that was rounded once cannot be widened back.",
    "hidden states": "What each decoder layer returns, for every token. The first layer above the bound is"
    " where to look for a mistake.",
    "KL": "Mean over tokens of the divergence, in nats, between the two models' next-token distributions.",
    "MTP": "The multi-token prediction block, which reads the model's output and predicts one token further.",
    "gradients": "Of the mean next-token loss, after Megatron's own reductions over all ranks. Forward passes"
    " can agree while a gradient is lost between ranks, or counted twice.",
    "gradient norm": "By Megatron's optimizer, which must count each parameter once however it is divided.",
}


def page(document: dict[str, Any]) -> str:
    """The HTML page of one document of `isthmus verify`."""
    title = f"{document['model_type']}: {'passed' if document['passed'] else 'failed'}"
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    sections = (_verdict, _tiles, _layers, _gradients, _dtypes, _coverage, _cost, _glossary)
    body = "".join(section(document) for section in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>"
        f"<body><main>{body}{_footer(document)}</main></body></html>\n"
    )


def _verdict(document: dict[str, Any]) -> str:
    passed = document["passed"]
    headline = (
        "The Megatron model is the Hugging Face model"
        if passed
        else "The Megatron model is not proven to be the Hugging Face model"
    )
    layout = document["layout"]
    chips = [
        f'<span class="chip" title="{text}">{name} <b>{layout[name]}</b></span>'
        for name, text in SIZES.items()
    ]
    chips.append(f'<span class="chip">sequence parallel <b>{"on" if layout["sp"] else "off"}</b></span>')
    if layout.get("pipeline_layout"):
        chips.append(f'<span class="chip">stages <b>{escape(layout["pipeline_layout"])}</b></span>')
    for name, value in document["request"]["overrides"].items():
        chips.append(f'<span class="chip">{escape(name)} <b>{escape(str(value))}</b></span>')
    failures = "".join(f"<li>{escape(line)}</li>" for line in document["failures"])
    ranks = len(document["peak_rss_mb_per_rank"])
    return (
        f'<section class="card verdict{"" if passed else " failed"}">'
        f'<span class="badge">{"PASSED" if passed else "FAILED"}</span><h1>{headline}</h1>'
        f'<p class="lead">{escape(document["model_type"])}, checkpoint <code>'
        f"{escape(document['checkpoint'])}</code>, compared in {document['dtype']} on {ranks}"
        f" {'rank' if ranks == 1 else 'ranks'}.</p>"
        + (f'<ul class="failures">{failures}</ul>' if failures else "")
        + f'<div class="chips">{"".join(chips)}</div></section>'
    )


def _tiles(document: dict[str, Any]) -> str:
    bounds = document["bounds"] or {}
    tiles = []
    if found := document["coverage"]:
        left = len(found["passed_through"]) + len(found["dropped"])
        about = "tensors have their place" + (f"; {left} left out on purpose" if left else "")
        fine = not any(found[kind] for kind in GAPS)
        tiles.append(_tile("Coverage", f"{found['loaded']} / {found['hf_tensors']}", about, fine))
    if trip := document["roundtrip"]:
        equal = trip["tensors"] - len(trip["mismatched"])
        tiles.append(
            _tile(
                "Round trip", f"{equal} / {trip['tensors']}", "tensors bitwise equal", trip["bitwise_equal"]
            )
        )
    if forward := document["forward"]:
        about = (
            f"rel RMS, bound {bounds['forward']:.0e}; same next token for {forward['argmax_agreement']:.1%}"
        )
        tiles.append(
            _tile("Logits", f"{forward['rel_rms']:.1e}", about, forward["rel_rms"] <= bounds["forward"])
        )
        worst = max(forward["layers"], key=lambda row: row["rel_rms"])
        about = f"rel RMS after layer {worst['layer']}, the worst; bound {bounds['forward']:.0e}"
        fine = forward["first_diverging_layer"] is None
        tiles.append(_tile("Hidden states", f"{worst['rel_rms']:.1e}", about, fine))
        if mtp := forward["mtp"]:
            about = f"rel RMS, bound {bounds['forward']:.0e}; KL {mtp['kl']:.0e}"
            tiles.append(
                _tile("MTP logits", f"{mtp['rel_rms']:.1e}", about, mtp["rel_rms"] <= bounds["forward"])
            )
    if grads := document["gradients"]:
        about = f"rel RMS over {grads['params']} parameters, bound {bounds['gradients']:.0e}"
        tiles.append(
            _tile("Gradients", f"{grads['rel_rms']:.1e}", about, grads["rel_rms"] <= bounds["gradients"])
        )
        about = f"rel RMS of one parameter, bound {bounds['worst_gradient']:.0e}"
        fine = grads["rel_rms_max"] <= bounds["worst_gradient"]
        tiles.append(_tile("Worst gradient", f"{grads['rel_rms_max']:.1e}", about, fine))
        about = f"off by {grads['grad_norm_rel_err']:.1e}, bound {bounds['gradients']:.0e}"
        fine = grads["grad_norm_rel_err"] <= bounds["gradients"]
        tiles.append(_tile("Gradient norm", f"{grads['grad_norm']:.4g}", about, fine))
    return f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""


def _tile(name: str, value: str, about: str, fine: bool) -> str:
    mark = '<span class="ok">pass</span>' if fine else '<span class="not">fail</span>'
    return (
        f'<div class="tile"><div class="name"><span>{name}</span>{mark}</div>'
        f'<div class="value">{value}</div><div class="about">{_FIGURE.sub(_UNBROKEN, about)}</div></div>'
    )


def _layers(document: dict[str, Any]) -> str:
    forward = document["forward"]
    if not forward:
        return ""
    points = [Point(str(row["layer"]), row["rel_rms"], row["layer"] > 0) for row in forward["layers"]]
    points.append(Point("logits", forward["rel_rms"], True))
    if forward["mtp"]:
        points.append(Point("MTP logits", forward["mtp"]["rel_rms"], False))
    first = forward["first_diverging_layer"]
    what = f" The first layer above the bound is layer {first}." if first is not None else ""
    note = (
        f"rel RMS of each decoder layer's output, then of the logits, on {forward['tokens']} random tokens."
        f" A slow rise is rounding that adds up; a step is a mistake.{what}"
    )
    picture = chart(points, document["bounds"]["forward"], floor=document["dtype"] == "float32")
    losses = f"Loss {forward['loss']:.6f}, Hugging Face's {forward['hf_loss']:.6f}."
    return _card(
        "Error from layer to layer", note, f'<div class="scroll">{picture}</div><p class="note">{losses}</p>'
    )


def _gradients(document: dict[str, Any]) -> str:
    grads = document["gradients"]
    if not grads:
        return ""
    bound = document["bounds"]["worst_gradient"]
    rows = [
        (
            f"<code>{escape(row['name'])}</code>",
            f"{row['hf_rms']:.1e}",
            f"{row['rel_rms']:.1e}",
            bar(row["rel_rms"], bound),
        )
        for row in grads["worst_params"]
    ]
    note = (
        f"The {len(rows)} parameters whose gradients differ most, each against its own size. The bars are on"
        f" a logarithmic scale: a full one is the bound, and each fifth less is ten times smaller."
    )
    scale = f'<span class="scale"><span>{bound / 1e5:.0e}</span><span>bound {bound:.0e}</span></span>'
    columns = ("parameter", "RMS of the gradient", "rel RMS", scale)
    return _card("Gradients", note, _table(columns, rows, numbers=(1, 2), bars=(3,)))


def _dtypes(document: dict[str, Any]) -> str:
    found = document["dtypes"]
    if not found:
        return ""
    rounded = set(found["rounded"])
    names = [*found["rounded"], *(name for name in found["fp32_params"] if name not in rounded)]
    bad = len(collapse(found["rounded"])) if rounded else 0
    lines = [*collapse(found["rounded"]), *collapse(n for n in names if n not in rounded)]
    rows = [
        (
            f"<code>{escape(line)}</code>",
            '<span class="not">rounded</span>' if number < bad else '<span class="ok">bits kept</span>',
        )
        for number, line in enumerate(lines)
    ]
    note = "Parameters that are float32 in a model built in the checkpoint's dtype, by Megatron's names."
    content = _table(("parameter", "against the source"), rows) if rows else "<p>None.</p>"
    return _card("Float32 parameters", note, content)


def _coverage(document: dict[str, Any]) -> str:
    found = document["coverage"]
    if not found:
        return ""
    kinds = {**GAPS, "passed_through": "not in the model; an export copies the source's bytes"}
    rows = []
    for kind, text in {**kinds, "dropped": "left out: {why}"}.items():
        why = found[kind] if isinstance(found[kind], dict) else dict.fromkeys(found[kind], "")
        for reason in sorted(set(why.values())):
            names = [name for name in why if why[name] == reason]
            told = escape(text.replace("{why}", reason))
            rows += [(f"<code>{escape(line)}</code>", told) for line in collapse(names)]
    note = (
        f"{found['loaded']} of the checkpoint's {found['hf_tensors']} tensors have their place, in"
        f" {found['megatron_params']} Megatron tensors."
        + (" What is not, and why:" if rows else " Nothing is left over on either side.")
    )
    return _card("Coverage", note, _table(("tensor", "what becomes of it"), rows) if rows else "")


def _cost(document: dict[str, Any]) -> str:
    seconds = document["seconds"]
    longest = max(seconds.values(), default=0.0) or 1.0
    rows = [
        (name.replace("_", " "), f"{value:.2f} s", _share(value / longest)) for name, value in seconds.items()
    ]
    memory = document["peak_rss_mb_per_rank"]
    note = f"Seconds of the slowest rank. Peak memory of a rank: {max(memory):.0f} MiB"
    note += f", of all: {sum(memory):.0f} MiB."
    return _card("Cost", note, _table(("step", "time", ""), rows, numbers=(1,), bars=(2,)))


def _glossary(document: dict[str, Any]) -> str:
    reason = (document["bounds"] or {}).get("reason", "Not reached")
    reason = reason[0].upper() + reason[1:]
    entries = "".join(
        f"<dt>{escape(term)}</dt><dd>{escape(text.replace('{reason}', reason))}</dd>"
        for term, text in GLOSSARY.items()
    )
    return f'<section class="card"><h2>What the numbers mean</h2><dl>{entries}</dl></section>'


def _footer(document: dict[str, Any]) -> str:
    request = document["request"]
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    packed = ", packed" if request["packed"] else ""
    tokens = f"{request['tokens']} tokens a sequence, seed {request['seed']}{packed}"
    return f"<footer>{tokens}. {escape(versions)}.</footer>"


def _card(title: str, note: str, content: str) -> str:
    return f'<section class="card"><h2>{title}</h2><p class="note">{note}</p>{content}</section>'


def _table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Sequence[int] = (),
    bars: Sequence[int] = (),
) -> str:
    """A table of HTML cells; `numbers` and `bars` are the columns of that kind."""

    def kind(index: int) -> str:
        return ' class="number"' if index in numbers else ' class="bar"' if index in bars else ""

    head = "".join(f"<th{kind(i)}>{name}</th>" for i, name in enumerate(columns))
    body = "".join(
        "<tr>" + "".join(f"<td{kind(i)}>{cell}</td>" for i, cell in enumerate(row)) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _share(share: float) -> str:
    width = 0.0 if math.isnan(share) else 100 * share
    return f'<div class="track"><div class="fill" style="width:{width:.1f}%"></div></div>'
