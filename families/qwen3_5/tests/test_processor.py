"""What HF's own processor returns of real images and frames goes into the hosted model as it is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

from isthmus.config import HFConfig
from isthmus.layout import Layout
from isthmus.testing import ranks
from isthmus.testing.numerics import FLOAT32, rel_rms
from isthmus.testing.picture import picture
from isthmus.testing.tower import hosted_and_hugging_faces
from isthmus_qwen3_5.config import megatron_config
from isthmus_qwen3_5.inputs import KINDS, NAMES, check, token_types
from isthmus_qwen3_5.tiny import SHRUNK_TOKENS, SHRUNK_VISION, VISION, tiny_config, vision_language

WORDS = "user assistant what do you see in the image video and first second seconds compare a cat ."
MARKS = {
    "<|image_pad|>": SHRUNK_TOKENS["image_token_id"],
    "<|video_pad|>": SHRUNK_TOKENS["video_token_id"],
    "<|vision_start|>": SHRUNK_TOKENS["vision_start_token_id"],
    "<|vision_end|>": SHRUNK_TOKENS["vision_end_token_id"],
    "<|im_start|>": 145,
    "<|im_end|>": 146,
}
OF_TOKENS = ("input_ids", "attention_mask", "mm_token_type_ids")
IMAGE, VIDEO = (f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))


def processor() -> Any:
    """A Qwen3VLProcessor for the tiny tower, with a tokenizer of a few words."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    words = {word: i for i, word in enumerate(WORDS.split())}
    tokens = Tokenizer(WordLevel({**words, **MARKS, "?": 144}, unk_token="?"))
    tokens.pre_tokenizer = Whitespace()
    tokens.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    sizes = {
        "patch_size": SHRUNK_VISION["patch_size"],
        "merge_size": VISION["spatial_merge_size"],
        "temporal_patch_size": VISION["temporal_patch_size"],
    }
    return Qwen3VLProcessor(
        Qwen2VLImageProcessor(size={"shortest_edge": 64, "longest_edge": 4096}, **sizes),
        PreTrainedTokenizerFast(tokenizer_object=tokens, unk_token="?"),
        Qwen3VLVideoProcessor(
            size={"shortest_edge": 64, "longest_edge": 4096},
            do_sample_frames=False,
            cap_pixels_per_frame=False,
            **sizes,
        ),
    )


def conversations() -> list[dict[str, Any]]:
    """What the processor returns of each."""
    process, frames = processor(), [picture(24, 16, seed) for seed in range(5)]
    metadata = {"total_num_frames": 5, "fps": 2.0, "frames_indices": list(range(5))}

    def turn(text: str) -> str:
        return f"<|im_start|>user {text}<|im_end|><|im_start|>assistant a cat .<|im_end|>"

    return [
        process(text=[turn(text)], return_tensors="pt", **given)
        for text, given in (
            (
                f"{IMAGE} what do you see in the first image and in the second {IMAGE}",
                {"images": [picture(40, 22, 7), picture(17, 33, 8)]},
            ),
            ("what do you see", {}),
            (
                f"compare {IMAGE} and {VIDEO} .",
                {"images": [picture(24, 24, 9)], "videos": [frames], "video_metadata": [metadata]},
            ),
        )
    ]


def padded(row: Any) -> dict[str, Any]:
    """A row of an even number of tokens: with one of padding behind it, and no attention_mask, where odd."""
    return {
        name: pad(value, (0, value.size(1) % 2)) if name in OF_TOKENS else value
        for name, value in row.items()
        if name != "attention_mask"
    }


def logits(folder: Path, layout: Layout) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Megatron's and HF's, of the conversations one by one, and of all in a packed row."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region as whole

    model, hf = hosted_and_hugging_faces(folder, layout)
    given = [dict(each) for each in conversations()]
    with torch.no_grad():
        expected = [hf(**inputs).logits for inputs in given]
        lengths = [inputs["input_ids"].size(1) for inputs in given]
        for inputs, length in zip(given, lengths, strict=True):
            if length % 2:
                with pytest.raises(ValueError, match=f"rows of {length} tokens, expected a multiple of 2"):
                    model(**inputs)
        found = [
            model(**padded(inputs) if n % 2 else inputs) for n, inputs in zip(lengths, given, strict=True)
        ]
        ends = torch.tensor([0, *lengths, sum(lengths) % 2]).cumsum(0).int()  # padding is a sequence
        longest = int(ends.diff().max())
        row: dict[str, Any] = {}
        for name in dict.fromkeys(name for inputs in given for name in inputs):
            parts = [inputs[name] for inputs in given if name in inputs]
            row[name] = torch.cat(parts, dim=1 if name in OF_TOKENS else 0)
        packed = PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)
        found.append(model(**padded(row), packed_seq_params=packed))
        expected.append(torch.cat(expected, dim=1))
    assert {length % 2 for length in lengths} == {0, 1}  # or one of the two would not be tried
    shapes = [hf.shape for hf in expected]
    return [(whole(mine)[:, : s[1], : s[2]], hf) for mine, hf, s in zip(found, expected, shapes, strict=True)]


def test_a_processors_conversations_give_hugging_faces_logits(checkpoints: Callable[[str], Path]) -> None:
    for found, expected in ranks.run(2, logits, checkpoints("vision"), Layout(tp=2).resolved())[0]:
        assert rel_rms(found, expected) < FLOAT32.forward


def test_the_family_counts_tokens_and_patches_as_the_processor_does() -> None:
    vision = megatron_config(HFConfig(vision_language(tiny_config())), frozenset())["vision"]
    grids = []
    for inputs in conversations():
        ids, (given, types) = inputs["input_ids"], (dict(inputs), inputs["mm_token_type_ids"])
        given = {name: given[name] for name in NAMES if name in given}
        check(ids, [(0, ids.size(1))], None, vision, needs_pixels=True, **given)
        assert torch.equal(token_types(ids, vision), types)
        grids += [given[kind.grid].tolist() for kind in KINDS if kind.grid in given]
    assert grids == [[[1, 6, 10], [1, 8, 4]], [[1, 6, 6]], [[3, 4, 6]]]
