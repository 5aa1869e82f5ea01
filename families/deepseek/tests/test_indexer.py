"""DeepSeek-V3.2's indexer in Megatron's own sparse attention: trained by Megatron's loss, or frozen.

Hugging Face's model gives it no gradient and has no such loss. test_verify.py shows that all other gradients
are Hugging Face's where it is frozen; here, that they are the same bits where it is trained.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.bridge import AutoBridge
from isthmus.layout import Layout
from isthmus.names import live_tensors
from isthmus.testing import ranks, training_step
from isthmus.testing.batch import random_batch

# A sum in another order: float32 over tensor-parallel ranks.
DIVIDED = 1e-5


def gradients(folder: Path, layout: Layout, coefficient: float) -> dict[str, Any]:
    """The gradients of this rank's parameters by canonical name, None of a frozen one."""
    layout.initialize()
    bridge = AutoBridge.from_hf_pretrained(folder)
    config = bridge.get_model_config(
        **layout.config_overrides(),
        attention="megatron",
        params_dtype=torch.float32,
        calculate_per_token_loss=True,
        dsa_indexer_loss_coeff=coefficient,
    )
    chunks = bridge.build_model(config, wrap_with_ddp=True)
    bridge.load_hf_weights(chunks)
    vocabulary = bridge.megatron_fields["vocab_size"]
    batch = random_batch(
        vocabulary, tokens=32, seed=0, ranks=1, microbatches=2, packed=False, tp=layout.tp, cp=1
    )
    training_step.run(chunks, batch, gradients=True)
    return {
        live.canonical: live.tensor.main_grad.clone() if live.tensor.requires_grad else None  # type: ignore
        for live in live_tensors(chunks)
        if isinstance(live.tensor, nn.Parameter)
    }


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_a_loss_trains_the_indexer_and_nothing_else(checkpoints: Callable[[str], Path]) -> None:
    folder, divided = checkpoints("v32"), Layout(tp=2).resolved()
    (whole,) = ranks.run(1, gradients, folder, Layout().resolved(), 0.5)
    frozen = ranks.run(divided.world_size, gradients, folder, divided, 0.0)
    trained = ranks.run(divided.world_size, gradients, folder, divided, 0.5)
    indexer = {name for name in whole if ".indexer." in name}
    assert len(indexer) == 4 * 5, "four layers of five tensors"
    for before, after in zip(frozen, trained, strict=True):
        assert {name for name, gradient in before.items() if gradient is None} == indexer
        assert [name for name in after.keys() - indexer if not torch.equal(before[name], after[name])] == []
        for name in indexer:
            assert whole[name].any(), name
            assert relative(after[name], whole[name]) < DIVIDED, name
