"""Gemma 3's images: masks are transformers', and what does not belong together names its samples."""

from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.config import HFConfig
from isthmus.layout import Layout
from isthmus_gemma_vl.config import megatron_config
from isthmus_gemma_vl.inputs import check
from isthmus_gemma_vl.layout import problems
from isthmus_gemma_vl.masks import unseen, windowed
from isthmus_gemma_vl.samples import sample
from isthmus_gemma_vl.tiny import tiny_gqa_config, vision_language

HF = HFConfig(vision_language(tiny_gqa_config()))
FIELDS = megatron_config(HF, frozenset())
VISION = FIELDS["vision"]
IMAGE = VISION["image_token"]
LENGTH = 32


def joined(*kinds: str) -> tuple[Tensor, dict[str, Tensor]]:
    """A batch (b, s) of samples, as the processor returns it."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(150, (len(kinds), LENGTH + 1), generator=generator)
    pairs = [sample(HF, row, kind, generator) for row, kind in zip(tokens, kinds, strict=True)]
    inputs = {"token_type_ids": torch.stack([each["token_type_ids"] for _, each in pairs])}
    if pixels := [each["pixel_values"] for _, each in pairs if "pixel_values" in each]:
        inputs["pixel_values"] = torch.cat(pixels)
    return torch.stack([row[:-1] for row, _ in pairs]), inputs


def hugging_faces(types: Tensor, window: int) -> dict[str, Tensor]:
    """(b, 1, s, s) by kind of layer, True where a key is seen."""
    from transformers import Gemma3TextConfig
    from transformers.models.gemma3 import modeling_gemma3 as gemma3

    config = Gemma3TextConfig(hidden_size=8, sliding_window=window)
    config._attn_implementation = "sdpa"  # whose masks are boolean
    blocks = gemma3.get_block_sequence_ids_for_mask(types)
    embeddings = torch.zeros(*types.shape, 8)
    return gemma3.create_masks_for_vision_model(config, embeddings, None, None, None, blocks)


@pytest.mark.parametrize("window", [3, 6, 20])
def test_masks_are_transformers_element_by_element(window: int) -> None:
    tokens, inputs = joined("image", "images", "text", "video")
    expected = hugging_faces(inputs["token_type_ids"], window)
    found = unseen(tokens == IMAGE, [(0, LENGTH)])
    assert torch.equal(~found, expected["full_attention"])
    assert torch.equal(~windowed(found, window - 1), expected["sliding_attention"])
    assert (~found).triu(1).any()  # or it would prove nothing of images


def test_packed_sequences_see_what_each_sees_alone() -> None:
    tokens, _ = joined("images", "text", "image")
    # The first sequence ends and the second begins with an image: they are two.
    tokens[0, -9:] = tokens[1, :9] = IMAGE
    types = (tokens == IMAGE).long()
    expected = hugging_faces(types, 6)
    bounds = [(i * LENGTH, (i + 1) * LENGTH) for i in range(3)]
    packed = unseen((tokens == IMAGE).flatten()[None], bounds)
    for kind, found in (("full_attention", packed), ("sliding_attention", windowed(packed, 5))):
        blocks = [~found[0, 0, start:stop, start:stop] for start, stop in bounds]
        assert torch.equal(torch.stack(blocks)[:, None], expected[kind])
        assert torch.equal(torch.block_diag(*blocks).bool(), ~found[0, 0])


def without(name: str) -> Any:
    def change(tokens: Tensor, inputs: dict[str, Tensor]) -> None:
        del inputs[name]

    return change


def no_tokens_of_the_last(tokens: Tensor, inputs: dict[str, Tensor]) -> None:
    tokens[3] = 5
    inputs["token_type_ids"][3] = 0


def one_token_less(tokens: Tensor, inputs: dict[str, Tensor]) -> None:
    at = (tokens[3] == IMAGE).nonzero()[0]
    tokens[3, at], inputs["token_type_ids"][3, at] = 5, 0


def types_of_text(tokens: Tensor, inputs: dict[str, Tensor]) -> None:
    inputs["token_type_ids"][1] = 0


def small_pixels(tokens: Tensor, inputs: dict[str, Tensor]) -> None:
    inputs["pixel_values"] = inputs["pixel_values"][..., :20]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without("pixel_values"), r"samples 1, 3: image tokens \(image_token_index=159\), and there is no"),
        (without("token_type_ids"), "samples 1, 3: no token_type_ids"),
        (no_tokens_of_the_last, "has 3 images, the tokens are of 2: sample 0 has 0, sample 1 has 2"),
        (one_token_less, "sample 3 has 8 image tokens in a row, an image has mm_tokens_per_image=9"),
        (types_of_text, "sample 1: token_type_ids does not say what input_ids does"),
        (small_pixels, r"pixel_values is \(3, 3, 24, 20\), expected \(images, 3, 24, 24\)"),
    ],
)
def test_what_does_not_belong_together_names_its_samples(change: Any, said: str) -> None:
    tokens, inputs = joined("text", "images", "text", "image")
    bounds = [(0, LENGTH)]
    check(tokens, bounds, VISION, needs_pixels=True, **inputs)
    change(tokens, inputs)
    with pytest.raises(ValueError, match=said):
        check(tokens, bounds, VISION, needs_pixels=True, **inputs)


def test_a_later_stage_needs_no_pixels() -> None:
    tokens, inputs = joined("images", "image")
    del inputs["pixel_values"]
    check(tokens, [(0, LENGTH)], VISION, needs_pixels=False, **inputs)


def test_layouts_and_choices_that_are_not_exact_are_refused() -> None:
    (said,) = problems(Layout(cp=2), FIELDS)
    assert said.startswith("bidirectional image attention under context parallelism: ")
    assert problems(Layout(cp=2), FIELDS | {"part": "text"}) == []
    (said,) = problems(Layout(), FIELDS | {"attention_dropout": 0.1})
    assert said.startswith("attention_dropout=0.1 with part='all'")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"mm_tokens_per_image": 8}, "mm_tokens_per_image=8, vision_config.image_size=24"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, "expected 'siglip_vision_model'"),
        ({"vision_config": {"num_attention_heads": 5}}, "vision_config.hidden_size=.*multiple of .*heads=5"),
        ({"vision_config": {"hidden_act": "swiglu2"}}, "vision_config.hidden_act='swiglu2', expected one of"),
        ({"vision_config": {"patch_size": 0}}, "vision_config.patch_size=0, expected a whole number, 1"),
        ({"vision_config": {"image_size": "24"}}, "vision_config.image_size='24', expected a whole number"),
    ],
)
def test_a_tower_that_gemma_does_not_have_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        megatron_config(HFConfig(merged(HF.raw, fields)), frozenset())


def merged(raw: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """`raw` with other `fields`, those of its sections one by one."""
    return {**raw, **{k: {**raw[k], **v} if isinstance(v, dict) else v for k, v in fields.items()}}
