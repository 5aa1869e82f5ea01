"""The fused weights are in the order in which Megatron's own modules take them apart again.

A round trip cannot see a wrong order. Here Megatron's attention and delta net split what they project, and
each part is compared with the projection by HF's rows of it.
"""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from isthmus import launch
from isthmus.layout import Layout
from isthmus.testing.tiny import write_tiny
from isthmus.tiny import Variant
from isthmus_qwen3_next.family import FAMILY
from isthmus_qwen3_next.tiny import tiny_config

TOKENS = 4
LINEAR, FULL = 0, 3  # a layer of each kind


def inputs(config: dict[str, Any]) -> Tensor:
    """(S, 1, H), whole numbers."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-3, 4, (TOKENS, 1, config["hidden_size"]), generator=generator).float()


def module(folder: Path, layout: Layout, layer: int, **fields: Any) -> Any:
    """Megatron's attention of one layer, loaded; norms are modules of their own and left out."""
    from isthmus.bridge import AutoBridge

    layout.initialize()
    bridge = AutoBridge.from_hf_pretrained(folder)
    fields = {"params_dtype": torch.float32, "transformer_impl": "local", "delta_net": "megatron"} | fields
    model = bridge.build_model(bridge.get_model_config(**layout.config_overrides(), **fields))
    bridge.load_hf_weights(model)
    return model[0].decoder.layers[layer].self_attention


def own_tokens(x: Tensor, layout: Layout) -> Tensor:
    """This rank's share of the sequence, where it is divided."""
    return x.chunk(layout.tp)[torch.distributed.get_rank()] if layout.sequence_parallel else x


@torch.no_grad()
def attention_parts(folder: Path, layout: Layout, x: Tensor) -> dict[str, Tensor]:
    attention = module(folder, layout, FULL)
    attention.q_layernorm = attention.k_layernorm = None
    query, key, value, gate = attention.get_query_key_value_tensors(own_tokens(x, layout), output_gate=True)
    return {"query": query, "gate": gate, "key": key, "value": value}


@torch.no_grad()
def delta_net_parts(folder: Path, layout: Layout, x: Tensor) -> dict[str, Tensor]:
    delta_net = module(folder, layout, LINEAR)
    projected, _ = delta_net.in_proj(own_tokens(x, layout))
    parts = projected.split(list(delta_net.in_proj_split_sections), dim=-1)
    kernels = delta_net.conv1d.weight.split(
        [delta_net.qk_dim_local_tp, delta_net.qk_dim_local_tp, delta_net.v_dim_local_tp]
    )
    found = dict(zip(delta_net.in_proj_split_names, parts, strict=True))
    return found | dict(zip(("conv query", "conv key", "conv value"), kernels, strict=True))


@pytest.mark.parametrize(
    ("groups", "tp"), [(2, 1), (2, 2), (4, 4), (2, 4), (1, 2)], ids=lambda value: str(value)
)
def test_attention_gets_its_queries_gates_keys_and_values(tmp_path: Path, groups: int, tp: int) -> None:
    config = tiny_config(num_key_value_heads=groups)
    write_tiny(FAMILY, tmp_path / "hf", Variant(config, mtp=False), dtype=torch.float32)
    weights = safetensors.torch.load_file(tmp_path / "hf/model.safetensors")
    x, heads, head = inputs(config), config["num_attention_heads"], config["head_dim"]

    def project(name: str, shape: tuple[int, ...]) -> Tensor:
        return (x @ weights[f"model.layers.{FULL}.self_attn.{name}_proj.weight"].T).view(TOKENS, 1, *shape)

    query, gate = project("q", (heads, 2 * head)).chunk(2, dim=-1)  # as transformers takes them apart
    expected = {"query": query, "gate": gate, "key": project("k", (groups, head))}
    expected["value"] = project("v", (groups, head))
    layout = Layout(tp=tp).resolved()
    for rank, found in enumerate(launch.run(tp, attention_parts, tmp_path / "hf", layout, x)):
        for name, whole in expected.items():
            count = whole.size(2)
            # where there are fewer groups than ranks, neighbours share one
            own = slice(rank * count // tp, max((rank + 1) * count // tp, rank * count // tp + 1))
            torch.testing.assert_close(found[name], whole[:, :, own], msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_delta_net_gets_its_parts(tmp_path: Path, tp: int) -> None:
    config = tiny_config()
    write_tiny(FAMILY, tmp_path / "hf", Variant(config, mtp=False), dtype=torch.float32)
    weights = safetensors.torch.load_file(tmp_path / "hf/model.safetensors")
    x, key_heads = inputs(config), config["linear_num_key_heads"]
    per_key = config["linear_num_value_heads"] // key_heads
    k, v = config["linear_key_head_dim"], per_key * config["linear_value_head_dim"]

    def parts(name: str, sizes: list[int]) -> list[Tensor]:
        """Of each key head, as transformers takes them apart; each (S, 1, rows)."""
        projected = x @ weights[f"model.layers.{LINEAR}.linear_attn.{name}.weight"].T
        split = projected.view(TOKENS, 1, key_heads, sum(sizes)).split(sizes, dim=-1)
        return [part.flatten(2) for part in split]

    names = ("query", "key", "value", "z", "beta", "alpha")
    whole = [*parts("in_proj_qkvz", [k, k, v, v]), *parts("in_proj_ba", [per_key, per_key])]
    expected = dict(zip(names, whole, strict=True))
    kernels = weights[f"model.layers.{LINEAR}.linear_attn.conv1d.weight"]
    kernels = kernels.split([key_heads * k, key_heads * k, key_heads * v])
    convolved = dict(zip(("conv query", "conv key", "conv value"), kernels, strict=True))
    layout = Layout(tp=tp).resolved()
    for rank, found in enumerate(launch.run(tp, delta_net_parts, tmp_path / "hf", layout, x)):
        for name, part in expected.items():
            torch.testing.assert_close(found[name], part.chunk(tp, dim=-1)[rank])
        for name, part in convolved.items():
            assert torch.equal(found[name], part.chunk(tp)[rank]), name
