"""Which key each query sees, layer by layer, is what transformers' masks say, element by element."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.bridge import AutoBridge
from isthmus.layout import Layout
from isthmus.testing import ranks


def hugging_faces(folder: Path, lengths: list[int]) -> dict[str, torch.Tensor]:
    """(T, T) by kind of layer, of sequences end to end, by their positions."""
    from transformers import AutoConfig
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    config = AutoConfig.from_pretrained(folder)
    config._attn_implementation = "sdpa"  # whose masks are boolean
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    arguments: dict[str, Any] = {
        "config": config,
        "inputs_embeds": torch.zeros(1, sum(lengths), config.hidden_size),
        "attention_mask": None,
        "cache": None,
        "position_ids": positions,
        "allow_is_causal_skip": False,
    }
    full, sliding = create_causal_mask(**arguments), create_sliding_window_causal_mask(**arguments)
    return {"full_attention": full[0, 0], "sliding_attention": sliding[0, 0]}


def compared(folder: Path, lengths: list[int]) -> list[tuple[str, bool, int]]:
    """Of each layer: its kind, whether the masks are equal, and the keys that the last query sees.

    Ours is that of the CPU backend, which has one method for it; Transformer Engine's kernels are given the
    same window, and do not say what they see.
    """
    from megatron.core.transformer.enums import AttnMaskType

    from isthmus.cpu.positions import packed

    Layout().initialize()
    bridge = AutoBridge.from_hf_pretrained(folder)
    (chunk,) = bridge.build_model(bridge.get_model_config())
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    tokens = packed(starts, starts, starts[-1])
    expected, found = hugging_faces(folder, lengths), []
    layers: Any = next(module for name, module in chunk.named_modules() if name.endswith("decoder")).layers
    every = bridge.megatron_fields["window_attn_skip_freq"]
    for layer, slides in zip(layers, every, strict=True):
        kind = "sliding_attention" if slides else "full_attention"
        core = layer.self_attention.core_attention  # isthmus.cpu's in the place of Transformer Engine's
        ours = core._allowed(tokens, torch.arange(starts[-1]), AttnMaskType.causal)
        found.append((kind, torch.equal(ours, expected[kind]), int(ours[-1].sum())))
    return found


@pytest.mark.parametrize("lengths", [[24], [5, 14, 11]], ids=["one", "packed"])
def test_windows_are_those_of_transformers(checkpoints: Callable[[str], Path], lengths: list[int]) -> None:
    found = ranks.run(1, compared, checkpoints("default"), lengths)[0]
    assert found == [("sliding_attention", True, 9)] * 3 + [("full_attention", True, lengths[-1])]
