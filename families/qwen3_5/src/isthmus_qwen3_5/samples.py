"""Sequences with random images and videos, laid out as Qwen3.5's processor does, for `isthmus verify`."""

import torch
from torch import Tensor

from isthmus.config import HFConfig
from isthmus_qwen3_5.inputs import IMAGE, VIDEO, Kind, token_types
from isthmus_qwen3_5.vision_fields import TOKENS

# Grids (t, h, w) of what a sequence of each kind holds; what does not fit is left out from the end.
KINDS: dict[str, list[tuple[Kind, tuple[int, int, int]]]] = {
    "text": [],
    "image": [(IMAGE, (1, 4, 6))],
    "images": [(IMAGE, (1, 4, 4)), (IMAGE, (1, 2, 6))],
    "video": [(VIDEO, (2, 4, 4))],
    "both": [(VIDEO, (2, 2, 4)), (IMAGE, (1, 4, 4))],
}


def sample(
    hf: HFConfig, tokens: Tensor, kind: str, generator: torch.Generator
) -> tuple[Tensor, dict[str, Tensor]]:
    """`tokens` (L + 1,) with placeholders, and the inputs of the L to run. LookupError: unknown kind."""
    if kind not in KINDS:
        raise LookupError(f"no samples of kind {kind!r}; there are {', '.join(KINDS)}")
    vision, marks = hf.section("vision_config"), {name: hf[name] for name in TOKENS}
    merge = vision["spatial_merge_size"] ** 2
    tokens = torch.where(torch.isin(tokens, torch.tensor(list(marks.values()))), 2, tokens)
    numbers = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    at, found = 3, {}
    for what, (frames, height, width) in KINDS[kind]:
        run = [marks[what.token]] * (height * width // merge)
        frame = [marks["vision_start_token_id"], *run, marks["vision_end_token_id"]]
        if at + frames * (len(frame) + 1) > len(tokens) - 1:
            break
        for _ in range(frames):
            tokens[at : at + len(frame)] = torch.tensor(frame)
            at += len(frame) + 1  # a token of text between frames, as their time stamps
        pixels = torch.randn(frames * height * width, numbers, generator=generator)
        found.setdefault(what.pixels, []).append(pixels)
        found.setdefault(what.grid, []).append(torch.tensor([[frames, height, width]]))
    types = token_types(tokens[:-1], marks)
    return tokens, {**{name: torch.cat(parts) for name, parts in found.items()}, "mm_token_type_ids": types}
