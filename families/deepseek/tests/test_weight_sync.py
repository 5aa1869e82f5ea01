"""An engine that gets DeepSeek's weights in the smallest buckets can fuse them, and has the source's."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from isthmus.bridge import AutoBridge
from isthmus.layout import Layout
from isthmus.testing import ranks

# What vLLM or SGLang makes one tensor of, below one module: each name with those that it must come with.
FUSED = [
    {"q_a_proj.weight", "kv_a_proj_with_mqa.weight"},
    {"gate_proj.weight", "up_proj.weight"},
    {"indexer.wk.weight", "indexer.weights_proj.weight"},
]
SCALE = "_scale_inv"


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def buckets(folder: Path, layout: Layout, owners: str) -> list[list[tuple[str, str]]]:
    """(name, checksum) of each tensor that this rank sends, by bucket."""
    layout.initialize()
    bridge = AutoBridge.from_hf_pretrained(folder)
    model = bridge.build_model(bridge.get_model_config(**layout.config_overrides()))
    bridge.load_hf_weights(model)
    stream = bridge.export_hf_groups(model, dtype="source", ranks=owners)
    return [[(name, digest(tensor)) for name, tensor in group] for group in stream]


def needed(name: str, source: set[str]) -> set[str]:
    """The tensors without which an engine can do nothing with this one."""
    plain = name.removesuffix(SCALE)
    found = {plain}
    for group in FUSED:
        for end in group:
            if plain.endswith(f".{end}"):
                found |= {plain.removesuffix(end) + other for other in group}
    return found | {scale for member in found if (scale := member + SCALE) in source}


@pytest.mark.parametrize(
    ("layout", "name", "owners"),
    [
        (Layout(tp=2), "default+fp8_block", "all"),
        (Layout(pp=2), "default+fp8_block", "owner"),
        (Layout(ep=2), "default+fp8_block", "owner"),
        (Layout(tp=2), "v32", "owner"),
    ],
    ids=str,
)
def test_every_bucket_of_one_group_is_whole(
    checkpoints: Callable[[str], Path], layout: Layout, name: str, owners: str
) -> None:
    folder, layout = checkpoints(name), layout.resolved()
    source = {name: digest(tensor) for name, tensor in load_file(folder / "model.safetensors").items()}
    sent = ranks.run(layout.world_size, buckets, folder, layout, owners)
    if owners == "all":
        assert all(stream == sent[0] for stream in sent), "every rank has the same order"
        sent = sent[:1]
    engine: dict[str, str] = {}
    parted = []
    for bucket in [bucket for stream in sent for bucket in stream]:
        names = [name for name, _ in bucket]
        parted += [name for name in names if not needed(name, set(source)) <= set(names)]
        assert not engine.keys() & set(names), "a tensor came twice"
        engine |= dict(bucket)
    assert parted == []
    assert engine == source
    assert max(len(bucket) for stream in sent for bucket in stream) <= 4, "buckets hold more than one group"
