"""Sequences with random images, laid out as Gemma 3's processor does, for `isthmus verify`."""

import torch
from torch import Tensor

from isthmus.config import HFConfig
from isthmus_gemma_vl.names import image_token, text_config

# How many images a sequence of each kind holds; Gemma's processor has no videos, their frames are images.
# What does not fit is left out from the end: with `verify`'s 32 tokens all but two.
KINDS = {"text": 0, "image": 1, "images": 2, "video": 3}


def sample(
    hf: HFConfig, tokens: Tensor, kind: str, generator: torch.Generator
) -> tuple[Tensor, dict[str, Tensor]]:
    """`tokens` (L + 1,) with placeholders, and the inputs of the L to run. LookupError: unknown kind."""
    if kind not in KINDS:
        raise LookupError(f"no samples of kind {kind!r}; there are {', '.join(KINDS)}")
    vision, image, rows = hf.section("vision_config"), image_token(hf), text_config(hf)["vocab_size"]
    begin, end = (mark if mark < rows else 2 for mark in (hf["boi_token_index"], hf["eoi_token_index"]))
    tokens = torch.where(torch.isin(tokens, torch.tensor([image, begin, end])), 2, tokens)
    marked = torch.tensor([begin, *[image] * hf["mm_tokens_per_image"], end])
    at, pixels = 2, []
    for _ in range(KINDS[kind]):
        if at + len(marked) > len(tokens) - 1:
            break
        tokens[at : at + len(marked)] = marked
        at += len(marked) + 1
        shape = (1, vision["num_channels"], vision["image_size"], vision["image_size"])
        pixels.append(torch.randn(shape, generator=generator))
    types = (tokens[:-1] == image).long()
    return tokens, {"token_type_ids": types} | ({"pixel_values": torch.cat(pixels)} if pixels else {})
