"""What HF's processor gives for Qwen3.5: whether tokens, pixels and grids belong together. Pure.

A grid (t, h, w) counts patches; `merge`^2 of them make one feature, and one token. An image's tokens stand
together; a video's stand together for each of its t frames, with text between.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from isthmus.hosting.vision_arguments import check_together, named, whole_numbers

NAMES = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "mm_token_type_ids")


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of vision input: how the processor names it, and its number in `mm_token_type_ids`."""

    name: str
    type_id: int
    pixels: str
    grid: str
    token: str


IMAGE = Kind("image", 1, "pixel_values", "image_grid_thw", "image_token_id")
VIDEO = Kind("video", 2, "pixel_values_videos", "video_grid_thw", "video_token_id")
KINDS = (IMAGE, VIDEO)


def token_types(input_ids: Tensor, tokens: dict[str, int]) -> Tensor:
    """`mm_token_type_ids` by the placeholders in `input_ids`: 0 for text; of the same shape."""
    found = torch.zeros_like(input_ids)
    for kind in KINDS:
        found.masked_fill_(input_ids == tokens[kind.token], kind.type_id)
    return found


def check(
    input_ids: Tensor,
    bounds: Sequence[tuple[int, int]],
    position_ids: Tensor | None,
    vision: dict[str, Any],
    *,
    needs_pixels: bool,
    **inputs: Tensor | None,
) -> None:
    """ValueError, a line for each problem, that names samples by their number in the batch, from 0.

    A sample is a row of `input_ids` (b, s) or, of a packed row, the sequence within `bounds`.

    Args:
        vision: of the model config.
        needs_pixels: whether features are computed here: a later pipeline stage does without.
    """
    types = token_types(input_ids, vision)
    samples = [row[start:stop].tolist() for row in types for start, stop in bounds]
    lines: list[str] = []
    for kind in KINDS:
        shapes = list(_shapes(kind, vision["config"], inputs, needs_pixels))
        lines += shapes or _counts(kind, samples, vision, inputs)
    given = inputs.get("mm_token_type_ids")
    if given is not None and given.shape != input_ids.shape:
        lines.append(f"mm_token_type_ids is {tuple(given.shape)}, input_ids {tuple(input_ids.shape)}")
    elif given is not None:
        stated = [row[start:stop].tolist() for row in given for start, stop in bounds]
        wrong = [i for i, sample in enumerate(samples) if sample != stated[i]]
        if wrong:
            lines.append(f"{named(wrong)}: mm_token_type_ids does not say what input_ids does")
    seen = [i for i, sample in enumerate(samples) if any(sample)]
    three = position_ids is not None and position_ids.dim() == 3
    if seen and position_ids is not None and not three:
        lines.append(
            f"{named(seen)}: position_ids {tuple(position_ids.shape)} have one axis, those of images and"
            f" videos three. Leave them out, or give {(3, *input_ids.shape)}"
        )
    elif seen and given is None and not three:
        lines.append(
            f"{named(seen)}: no mm_token_type_ids, of which mrope positions are made. Give what the"
            " processor returned, or position_ids (3, b, s)"
        )
    check_together(lines)


def _shapes(
    kind: Kind, tower: dict[str, Any], inputs: dict[str, Tensor | None], needs_pixels: bool
) -> Iterator[str]:
    """What is wrong with the inputs of one kind by themselves, a line each."""
    grid, pixels, merge = inputs.get(kind.grid), inputs.get(kind.pixels), tower["spatial_merge_size"]
    width = tower["in_channels"] * tower["temporal_patch_size"] * tower["patch_size"] ** 2
    if pixels is not None and (pixels.dim() != 2 or pixels.size(1) != width):
        yield (
            f"{kind.pixels} is {tuple(pixels.shape)}, expected (patches, {width}): {tower['in_channels']}"
            f" channels of {tower['temporal_patch_size']}x{tower['patch_size']}x{tower['patch_size']}"
        )
    if grid is None:
        if pixels is not None:
            yield f"{kind.pixels} without {kind.grid}"
        return
    if pixels is None and needs_pixels:
        yield f"{kind.grid} without {kind.pixels}, of which the first pipeline stage computes features"
    if grid.dim() != 2 or grid.size(1) != 3 or not len(grid) or not whole_numbers(grid):
        yield (
            f"{kind.grid} is {tuple(grid.shape)} of {grid.dtype}, expected whole numbers ({kind.name}s, 3),"
            f" and no {kind.grid} where there is no {kind.name}"
        )
        return
    for number, (t, h, w) in enumerate(grid.tolist()):
        if min(t, h, w) < 1 or h % merge or w % merge:
            yield (
                f"{kind.name} {number} of {kind.grid} is {t}x{h}x{w}, expected at least one frame, and height"
                f" and width in multiples of spatial_merge_size={merge}"
            )


def _counts(
    kind: Kind, samples: list[list[int]], vision: dict[str, Any], inputs: dict[str, Tensor | None]
) -> Iterator[str]:
    """Where tokens, grids and pixels of one kind do not agree, a line each."""
    grid, pixels = inputs.get(kind.grid), inputs.get(kind.pixels)
    merged = vision["config"]["spatial_merge_size"] ** 2
    counts = {i: n for i, sample in enumerate(samples) if (n := sample.count(kind.type_id))}
    if grid is None:
        if counts:
            found = ", ".join(f"sample {i} has {n}" for i, n in counts.items())
            yield (
                f"{found} {kind.name} tokens ({kind.token}={vision[kind.token]}), and there is no"
                f" {kind.pixels} with {kind.grid}"
            )
        return
    patches = int(grid.prod(-1).sum())
    if pixels is not None and len(pixels) != patches:
        yield f"{kind.pixels} has {len(pixels)} patches, {kind.grid} counts {patches}"
    # A video's frames have a run of tokens each, those of an image, which has one, stand together.
    wanted = [
        (number, h * w // merged * (1 if kind is VIDEO else t), f"{t}x{h}x{w}")
        for number, (t, h, w) in enumerate(grid.tolist())
        for _ in range(t if kind is VIDEO else 1)
    ]
    runs = [
        (i, len(list(group)))
        for i, sample in enumerate(samples)
        for value, group in groupby(sample)
        if value == kind.type_id
    ]
    for (number, size, shape), (sample, length) in zip(wanted, runs, strict=False):
        if size != length:
            yield (
                f"sample {sample} has {length} {kind.name} tokens in a row where {kind.name} {number} of"
                f" grid {shape} has {size} features"
            )
            return  # one run too many or too few moves all that follow: they would be named for nothing
    if len(runs) > len(wanted):
        yield f"{named([i for i, _ in runs[len(wanted) :]])}: {kind.name} tokens that no {kind.grid} is of"
    if len(wanted) > len(runs):
        extra = sorted({number for number, *_ in wanted[len(runs) :]})
        yield (
            f"{kind.name} {', '.join(map(str, extra))} of {kind.grid} has no tokens: the"
            f" {len(samples)} samples have {len(runs)} runs of {kind.name} tokens, the grids {len(wanted)}"
        )
