"""DeepSeek-V3.2's indexer in Megatron's own sparse attention: trained by Megatron's loss, or frozen.

Hugging Face's model gives it no gradient and has no such loss. The reference is the loss that the report on
DeepSeek-V3.2 gives, of what Hugging Face's attention looks at, in autograd's gradients. test_verify.py shows
that all other gradients are Hugging Face's where it is frozen; here, that they are the same bits where not.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isthmus.bridge import AutoBridge
from isthmus.layout import Layout
from isthmus.names import live_tensors
from isthmus.testing import ranks, reference, training_step
from isthmus.testing.batch import Batch, random_batch

# A sum in another order: float32 over tensor-parallel ranks.
DIVIDED = 1e-5
# Float32 through four layers on each side. The two forms of the loss are many times as far apart.
EXACT, OTHER = 1e-5, 0.1


def batch_of(vocabulary: int) -> Batch:
    return random_batch(vocabulary, tokens=32, seed=0, ranks=1, microbatches=2, packed=False)


def gradients(folder: Path, layout: Layout, coefficient: float, sparse: bool = False) -> dict[str, Any]:
    """The gradients of this rank's parameters by canonical name, None of a frozen one."""
    layout.initialize()
    bridge = AutoBridge.from_hf_pretrained(folder)
    config = bridge.get_model_config(
        **layout.config_overrides(),
        attention="megatron",
        params_dtype=torch.float32,
        calculate_per_token_loss=True,
        dsa_indexer_loss_coeff=coefficient,
        dsa_indexer_use_sparse_loss=sparse,
    )
    chunks = bridge.build_model(config, wrap_with_ddp=True)
    bridge.load_hf_weights(chunks)
    training_step.run(chunks, batch_of(bridge.megatron_fields["vocab_size"]), gradients=True)
    return {
        live.canonical: live.tensor.main_grad.clone() if live.tensor.requires_grad else None  # type: ignore
        for live in live_tensors(chunks)
        if isinstance(live.tensor, nn.Parameter)
    }


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def scores(indexer: Any, hidden: Tensor, latent: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(s, s) of one sequence: how much the indexer would have token t look at token s, head by head."""
    heads, dim, rotated = indexer.n_heads, indexer.head_dim, indexer.qk_rope_head_dim
    queries = (latent @ indexer.wq_b.weight.T).unflatten(1, (heads, dim))
    norm = indexer.k_norm
    keys = torch.layer_norm(hidden @ indexer.wk.weight.T, (dim,), norm.weight, norm.bias, norm.eps)
    cos, sin = cos[:, : rotated // 2], sin[:, : rotated // 2]

    def rotate(vectors: Tensor) -> Tensor:
        """The first dims in two halves, which are real and imaginary parts."""
        real, imaginary, rest = vectors.split([rotated // 2, rotated // 2, dim - rotated], 1)
        return torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin, rest], 1)

    weights = hidden @ indexer.weights_proj.weight.T
    total = torch.zeros(len(hidden), len(hidden))
    for head in range(heads):
        seen = torch.relu(rotate(queries[:, head]) @ rotate(keys).T / dim**0.5)
        total = total + weights[:, head, None] / heads**0.5 * seen
    return total


def divergence(looked: Tensor, index: Tensor, among: Tensor) -> Tensor:
    """Sum over tokens of KL(attention of all heads || softmax of the indexer), each `among` its keys."""
    total = torch.zeros(())
    for token, keys in enumerate(among):
        target = looked[:, token, keys].sum(0)
        target = target / target.sum()
        total = total + (torch.xlogy(target, target) - target * index[token, keys].log_softmax(0)).sum()
    return total


def published(folder: Path, coefficient: float, sparse: bool) -> dict[str, Tensor]:
    """The report's loss, of all causal keys or of the chosen ones, in its gradients by canonical name."""
    hf = reference.load(folder, torch.float32).hf
    calls: list[tuple[Any, dict[str, Any]]] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: calls.append((module, kwargs)), with_kwargs=True
        )
        for layer in hf.model.layers
    ]
    batch = batch_of(hf.config.vocab_size)
    with torch.no_grad():
        for sequence in batch.sequences:
            hf(sequence[None, :-1], use_cache=False)
    for hook in hooks:
        hook.remove()
    loss = torch.zeros(())
    for module, kwargs in calls:
        hidden, (cos, sin) = kwargs["hidden_states"][0], kwargs["position_embeddings"]
        with torch.no_grad():
            if not sparse:
                module.indexer.index_topk = len(hidden)
            _, looked = module(**kwargs)
            latent = module.q_a_layernorm(module.q_a_proj(hidden))
        index = scores(module.indexer, hidden, latent, cos[0], sin[0])
        causal = torch.ones_like(index, dtype=torch.bool).tril()
        loss = loss + divergence(looked[0], index, looked[0].sum(0) > 0 if sparse else causal)
    (coefficient * loss / batch.tokens).backward()
    return {
        f"decoder.layers.{number}.self_attention.core_attention.indexer."
        f"{name if name.startswith('k_norm') else f'linear_{name}'}": parameter.grad
        for number, layer in enumerate(hf.model.layers)
        for name, parameter in layer.self_attn.indexer.named_parameters()
    }


@pytest.mark.parametrize("sparse", [False, True], ids=["all-keys", "chosen-keys"])
def test_the_gradient_is_that_of_the_published_loss(checkpoints: Callable[[str], Path], sparse: bool) -> None:
    folder, divided = checkpoints("v32"), Layout(tp=2).resolved()
    expected = published(folder, 0.5, sparse)
    other = published(folder, 0.5, not sparse)
    assert len(expected) == 4 * 5, "four layers of five tensors"
    (whole,) = ranks.run(1, gradients, folder, Layout().resolved(), 0.5, sparse)
    for found in (whole, *ranks.run(divided.world_size, gradients, folder, divided, 0.5, sparse)):
        for name, gradient in expected.items():
            assert relative(found[name], gradient) < EXACT, name
            assert relative(found[name], other[name]) > OTHER, name


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
