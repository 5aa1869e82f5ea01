"""How far bf16 moves a model's logits, here and in Hugging Face's own implementations."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from isthmus.bridge import AutoBridge
from isthmus.layout import Layout
from isthmus.testing import reference, training_step
from isthmus.testing.batch import random_batch
from isthmus.testing.numerics import rel_rms
from isthmus.testing.verify import SAMPLES, sample_of

# Attention here rounds once, Hugging Face's eager one at each step, so their roundings are two independent
# samples of one size, and so are those of Hugging Face's own eager and SDPA attention, which differ as much.
INDEPENDENT = 2**0.5


def bfloat16(folders: Sequence[Path], layout: Layout) -> list[dict[str, float]]:
    """Relative RMS between logits, by checkpoint: ours, HF's in bf16, and HF's in fp32; and of embeddings.

    HF's bf16 attention is SDPA, which transformers takes unless it is told otherwise, and eager. With a
    vision tower the sequences hold samples of every kind. Collective.
    """
    layout.initialize()
    return [_of(folder) for folder in folders]


def _of(folder: Path) -> dict[str, float]:
    bridge = AutoBridge.from_hf_pretrained(folder)
    chunks = bridge.build_model(bridge.get_model_config(calculate_per_token_loss=True))
    bridge.load_hf_weights(chunks)
    vision, vocabulary = bridge.megatron_fields.get("part") == "all", bridge.megatron_fields["vocab_size"]
    batch = random_batch(
        vocabulary,
        tokens=64,
        seed=0,
        ranks=1,
        microbatches=4,
        packed=False,
        sample=sample_of(bridge) if vision else None,
        kinds=SAMPLES,
    )
    ours = training_step.run(chunks, batch, gradients=False)
    assert ours is not None
    assert ours.logits is not None
    narrow, wide = (reference.load(folder, dtype, vision=vision) for dtype in (torch.bfloat16, torch.float32))
    eager, exact = (reference.run(model, batch, gradients=False).logits for model in (narrow, wide))
    narrow.hf.set_attn_implementation("sdpa")
    hf = reference.run(narrow, batch, gradients=False).logits
    embedding: Any = next(module for name, module in chunks[0].named_modules() if name.endswith("embedding"))
    tokens = torch.arange(1, vocabulary)[None]
    return {
        "ours against HF": rel_rms(ours.logits, hf),
        "ours against eager": rel_rms(ours.logits, eager),
        "ours against fp32": rel_rms(ours.logits, exact),
        "HF against fp32": rel_rms(hf, exact),
        "eager against fp32": rel_rms(eager, exact),
        "embeddings": rel_rms(embedding(tokens, tokens)[:, 0], narrow.hf.get_input_embeddings()(tokens)[0]),
    }
