"""What HF's own processor returns of real images goes into the hosted model as it is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.layout import Layout
from isthmus.testing import ranks
from isthmus.testing.numerics import FLOAT32, rel_rms
from isthmus.testing.picture import picture
from isthmus.testing.tower import hosted_and_hugging_faces
from isthmus_gemma_vl.tiny import SHRUNK_TOKENS, SHRUNK_VISION

WORDS = "what do you see in the image and in the other here is original are some crops to help better ? ."
MARKS = {
    "<start_of_image>": SHRUNK_TOKENS["boi_token_index"],
    "<end_of_image>": SHRUNK_TOKENS["eoi_token_index"],
    "<image_soft_token>": SHRUNK_TOKENS["image_token_index"],
}
IMAGE = "<start_of_image>"


def processor() -> Any:
    """A Gemma3Processor for the tiny tower, with a tokenizer of a few words."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import Gemma3ImageProcessor, Gemma3Processor, PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(dict.fromkeys(WORDS.split()), 1)}
    tokens = Tokenizer(WordLevel({**words, **MARKS, "[UNK]": 144}, unk_token="[UNK]"))
    tokens.pre_tokenizer = Whitespace()
    tokens.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    names = ("boi_token", "eoi_token", "image_token")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, unk_token="[UNK]", extra_special_tokens=dict(zip(names, MARKS, strict=True))
    )
    side = SHRUNK_VISION["image_size"]
    return Gemma3Processor(Gemma3ImageProcessor(size={"height": side, "width": side}), tokenizer, None, 9)


def conversations() -> list[dict[str, Any]]:
    """What the processor returns of each: of two images, of none, and of one and its crops."""
    process = processor()
    return [
        dict(process(text=[text], return_tensors="pt", **given))
        for text, given in (
            (
                f"what do you see in the image {IMAGE} and in the other {IMAGE} ?",
                {"images": [picture(40, 22, 7), picture(17, 33, 8)]},
            ),
            ("what do you see ?", {}),
            (
                f"what do you see {IMAGE} ?",
                {
                    "images": [picture(60, 30, 9)],
                    "do_pan_and_scan": True,
                    "pan_and_scan_min_crop_size": 16,
                    "pan_and_scan_max_num_crops": 2,
                },
            ),
        )
    ]


def logits(folder: Path, layout: Layout) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Megatron's and HF's, of the conversations one by one; other masks are refused on the way."""
    model, hf = hosted_and_hugging_faces(folder, layout)
    found = []
    for inputs in conversations():
        mask = inputs["attention_mask"]
        assert mask.all()  # the processor's own, which is taken
        for message, other in (
            (r"attention_mask has padding in sample 0, .*: pack", mask - 1),
            ("leave out attention_mask: it is made of input_ids", torch.zeros(1, 1, 1, 1).bool()),
        ):
            with pytest.raises(ValueError, match=message):
                model(**{**inputs, "attention_mask": other})
        with torch.no_grad():
            found.append((model(**inputs), hf(**inputs).logits))
    return found


def test_a_processors_conversations_give_hugging_faces_logits(checkpoints: Callable[[str], Path]) -> None:
    images = [len(inputs.get("pixel_values", ())) for inputs in conversations()]
    assert images == [2, 0, 3]
    for found, expected in ranks.run(1, logits, checkpoints("vision"), Layout().resolved())[0]:
        assert rel_rms(found, expected) < FLOAT32.forward
