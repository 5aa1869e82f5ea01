"""Tokens and vision inputs of Qwen3.5: where positions lie, and what does not belong together."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.config import HFConfig
from isthmus.hosting.torch_functions import import_modeling
from isthmus_qwen3_5.config import megatron_config
from isthmus_qwen3_5.inputs import check
from isthmus_qwen3_5.mrope import interleaved, positions
from isthmus_qwen3_5.samples import sample
from isthmus_qwen3_5.tiny import tiny_config, vision_language

HF = HFConfig(vision_language(tiny_config()))
VISION = megatron_config(HF, frozenset())["vision"]
MERGE = 2


def row(kind: str, length: int = 32) -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(140, (length + 1,), generator=generator)
    tokens, inputs = sample(HF, tokens, kind, generator)
    return tokens[:-1], inputs


def joined(*kinds: str) -> tuple[Tensor, dict[str, Tensor]]:
    """A batch (b, s) of samples, as the processor returns it."""
    rows = [row(kind) for kind in kinds]
    inputs: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for _, each in rows for name in each):
        parts = [each[name] for _, each in rows if name in each]
        inputs[name] = torch.stack(parts) if name == "mm_token_type_ids" else torch.cat(parts)
    return torch.stack([tokens for tokens, _ in rows]), inputs


def whole(inputs: dict[str, Tensor]) -> dict[str, Any]:
    return {"image_grid_thw": None, "video_grid_thw": None, **inputs}


def test_packed_sequences_have_the_positions_that_each_has_alone() -> None:
    tokens, inputs = joined("images", "text", "video", "both")
    apart = positions(tokens, [(0, 32)], VISION, MERGE, **whole(inputs))
    inputs["mm_token_type_ids"] = inputs["mm_token_type_ids"].flatten()[None]
    bounds = [(i * 32, i * 32 + 32) for i in range(4)]
    packed = positions(tokens.flatten()[None], bounds, VISION, MERGE, **whole(inputs))
    assert torch.equal(packed[:, 0].unflatten(-1, (4, 32)), apart)
    assert not torch.equal(apart[0], apart[1])  # or it would prove nothing of images


def test_frequencies_are_those_of_hugging_faces_rotary_embedding() -> None:
    modeling = import_modeling("transformers.models.qwen3_5.modeling_qwen3_5")
    config = modeling.Qwen3_5TextConfig(**copy.deepcopy(tiny_config(head_dim=256, hidden_size=64)))
    config.rope_parameters["mrope_section"] = [11, 11, 10]
    rotary = modeling.Qwen3_5TextRotaryEmbedding(config)
    where = torch.randint(500, (3, 2, 32), generator=torch.Generator().manual_seed(0))
    cosines, sines = rotary(torch.zeros(1), where)
    found = interleaved(where, rotary.inv_freq, [11, 11, 10]).squeeze(2).transpose(0, 1)
    assert torch.equal(found.cos(), cosines)
    assert torch.equal(found.sin(), sines)


def without(*names: str) -> Callable[[Tensor, dict[str, Tensor]], None]:
    def change(tokens: Tensor, inputs: dict[str, Tensor]) -> None:
        for name in names:
            del inputs[name]

    return change


def one_token_less(tokens: Tensor, inputs: dict[str, Tensor]) -> None:
    at = int((tokens[1] == VISION["image_token_id"]).nonzero()[0])
    tokens[1, at], inputs["mm_token_type_ids"][1, at] = 5, 0


def no_tokens(tokens: Tensor, inputs: dict[str, Tensor]) -> None:
    tokens[1][tokens[1] == VISION["image_token_id"]] = 5
    inputs["mm_token_type_ids"][1] = 0


def a_patch_less(tokens: Tensor, inputs: dict[str, Tensor]) -> None:
    inputs["pixel_values"] = inputs["pixel_values"][1:]


def replaced(**fields: Any) -> Callable[[Tensor, dict[str, Tensor]], None]:
    """Each input by what a function makes of it."""

    def change(tokens: Tensor, inputs: dict[str, Tensor]) -> None:
        for name, make in fields.items():
            inputs[name] = make(inputs[name])

    return change


def types_of_another(tokens: Tensor, inputs: dict[str, Tensor]) -> None:
    inputs["mm_token_type_ids"] = inputs["mm_token_type_ids"][[1, 0, 2]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            without("pixel_values", "image_grid_thw"),
            r"sample 1 has 6 image tokens \(image_token_id=150\), and there is no pixel_values",
        ),
        (no_tokens, r"image 0 of image_grid_thw has no tokens"),
        (one_token_less, r"sample 1 has 5 image tokens in a row where image 0 of grid 1x4x6 has 6 features"),
        (a_patch_less, r"pixel_values has 23 patches, image_grid_thw counts 24"),
        (without("image_grid_thw"), r"pixel_values without image_grid_thw"),
        (without("mm_token_type_ids"), r"samples 1, 2: no mm_token_type_ids, of which mrope positions"),
        (types_of_another, r"samples 0, 1: mm_token_type_ids does not say"),
        (without("pixel_values"), "image_grid_thw without pixel_values, of which the first pipeline stage"),
        *(
            (
                replaced(image_grid_thw=make),
                rf"image_grid_thw is {shape}, expected whole numbers \(images, 3\)",
            )
            for make, shape in (
                (lambda grid: grid[0], r"\(3,\) of torch.int64"),
                (lambda grid: grid[:, 1:], r"\(1, 2\) of torch.int64"),
                (lambda grid: grid[None], r"\(1, 1, 3\) of torch.int64"),
                (lambda grid: grid.float(), r"\(1, 3\) of torch.float32"),
                (lambda grid: grid[:0], r"\(0, 3\) of torch.int64"),
            )
        ),
        *(
            (
                replaced(image_grid_thw=lambda grid, to=to: torch.tensor([to])),
                rf"image 0 .* is {text}, expected at",
            )
            for to, text in (
                ([1, -4, -6], "1x-4x-6"),
                ([0, 4, 6], "0x4x6"),
                ([1, 3, 8], "1x3x8"),
                ([1, 24, 1], "1x24x1"),
            )
        ),
        (
            replaced(pixel_values=lambda pixels: pixels[:, 1:]),
            r"pixel_values is \(24, 95\), expected \(patches, 96\): 3 channels of 2x4x4",
        ),
        (replaced(pixel_values=lambda pixels: pixels[None]), r"pixel_values is \(1, 24, 96\), expected"),
        (replaced(pixel_values=lambda pixels: pixels.flatten()), r"pixel_values is \(2304,\), expected"),
        (
            replaced(image_grid_thw=lambda grid: torch.tensor([[2, 4, 6]])),
            "sample 1 has 6 image tokens in a row where image 0 of grid 2x4x6 has 12 features",
        ),
        (
            without("pixel_values_videos", "video_grid_thw"),
            r"sample 2 has 8 video tokens \(video_token_id=149\), and there is no pixel_values_videos",
        ),
        (
            replaced(video_grid_thw=lambda grid: torch.tensor([[1, 4, 8]])),
            "sample 2 has 4 video tokens in a row where video 0 of grid 1x4x8 has 8 features",
        ),
    ],
)
def test_inputs_that_do_not_belong_together_name_the_sample(
    change: Callable[[Tensor, dict[str, Tensor]], None], message: str
) -> None:
    tokens, inputs = joined("text", "image", "video")
    check(tokens, [(0, 32)], None, VISION, needs_pixels=True, **inputs)
    change(tokens, inputs)
    with pytest.raises(ValueError, match=message):
        check(tokens, [(0, 32)], None, VISION, needs_pixels=True, **inputs)


def test_positions_of_one_axis_are_none_of_images() -> None:
    tokens, inputs = joined("text", "image")
    counted = torch.arange(32).expand(2, 32)
    check(tokens[:1], [(0, 32)], counted[:1], VISION, needs_pixels=True)
    with pytest.raises(
        ValueError, match=r"sample 1: position_ids \(2, 32\) have one axis, .* give \(3, 2, 32\)"
    ):
        check(tokens, [(0, 32)], counted, VISION, needs_pixels=True, **inputs)


def test_an_image_of_two_frames_has_the_tokens_that_hugging_face_gives_it() -> None:
    tokens, inputs = joined("text", "image")
    run = torch.full((12,), VISION["image_token_id"])
    tokens = torch.stack([tokens[0], torch.cat([torch.arange(4), run, torch.arange(16)])])
    inputs["image_grid_thw"] = torch.tensor([[2, 4, 6]])
    inputs["pixel_values"] = inputs["pixel_values"].repeat(2, 1)
    inputs["mm_token_type_ids"] = (tokens == VISION["image_token_id"]).int()
    check(tokens, [(0, 32)], None, VISION, needs_pixels=True, **inputs)
    found = positions(tokens, [(0, 32)], VISION, MERGE, **whole(inputs))
    assert found[0, 1, 4:17].tolist() == [4] * 6 + [5] * 6 + [7]  # as many in time, then on after the width


def test_a_packed_sequence_is_a_sample() -> None:
    tokens, inputs = joined("text", "image")
    del inputs["mm_token_type_ids"]
    with pytest.raises(ValueError, match="sample 1: no mm_token_type_ids"):
        check(tokens.flatten()[None], [(0, 32), (32, 64)], None, VISION, needs_pixels=True, **inputs)
