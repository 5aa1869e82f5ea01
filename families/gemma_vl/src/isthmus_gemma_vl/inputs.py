"""What HF's processor gives for Gemma 3: whether tokens and pixels belong together. Pure."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from torch import Tensor

from isthmus.hosting.vision_arguments import check_together, named

NAMES = ("pixel_values", "token_type_ids")


def check(
    input_ids: Tensor,
    bounds: Sequence[tuple[int, int]],
    vision: dict[str, Any],
    *,
    needs_pixels: bool,
    pixel_values: Tensor | None = None,
    token_type_ids: Tensor | None = None,
) -> None:
    """ValueError, a line for each problem, that names samples by their number in the batch, from 0.

    A sample is a row of `input_ids` (b, s) or, of a packed row, the sequence within `bounds`.

    Args:
        vision: of the model config.
        needs_pixels: whether features are computed here: a later pipeline stage does without.
    """
    images, size, lines = input_ids == vision["image_token"], vision["tokens_per_image"], []
    samples = [row[start:stop] for row in images.tolist() for start, stop in bounds]
    runs = [
        (i, len(list(run))) for i, sample in enumerate(samples) for image, run in groupby(sample) if image
    ]
    lines += [
        f"sample {i} has {length} image tokens in a row, an image has mm_tokens_per_image={size}"
        for i, length in runs
        if length != size
    ]
    if pixel_values is not None:
        side, channels = vision["config"]["image_size"], vision["config"]["num_channels"]
        if tuple(pixel_values.shape[1:]) != (channels, side, side):
            lines.append(
                f"pixel_values is {tuple(pixel_values.shape)}, expected (images, {channels}, {side}, {side})"
            )
        if len(pixel_values) != len(runs):
            counts = [sum(i == sample for sample, _ in runs) for i in range(len(samples))]
            each = ", ".join(f"sample {i} has {count}" for i, count in enumerate(counts))
            lines.append(
                f"pixel_values has {len(pixel_values)} images, the tokens are of {len(runs)}: {each}"
            )
    elif runs and needs_pixels:
        lines.append(
            f"{named([i for i, _ in runs])}: image tokens (image_token_index={vision['image_token']}), and"
            " there is no pixel_values"
        )
    lines += _types(images, runs, bounds, token_type_ids)
    check_together(lines)


def _types(
    images: Tensor, runs: list[tuple[int, int]], bounds: Sequence[tuple[int, int]], given: Tensor | None
) -> list[str]:
    """What is wrong with `token_type_ids`, 1 at image tokens, by which they see each other."""
    if given is None:
        if not runs:
            return []
        return [
            f"{named([i for i, _ in runs])}: no token_type_ids, without which Hugging Face's image tokens"
            " do not see each other. Give what the processor returned"
        ]
    if given.shape != images.shape:
        return [f"token_type_ids is {tuple(given.shape)}, input_ids {tuple(images.shape)}"]
    wrong = ((given == 1) != images).tolist()
    samples = [any(row[start:stop]) for row in wrong for start, stop in bounds]
    found = [i for i, differs in enumerate(samples) if differs]
    return [f"{named(found)}: token_type_ids does not say what input_ids does"] if found else []
