"""What hosting costs: the time of a hosted layer against the bare Hugging Face module, and a rank's work."""

from typing import Any

import torch
from measure import in_turn
from torch.utils.flop_counter import FlopCounterMode

TOKENS, BATCH = 512, 2
# Between the tiny checkpoint and the released one, whose hidden size is 2048.
SIZES = {
    "hidden_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}


def overhead(layout: dict[str, int], mixer: str, repeats: int) -> dict[str, list[float]]:
    """Seconds of forward and backward, of the hosted module and of the HF module in it, in turn."""
    hosted = _hosted(layout, mixer)
    bare = hosted.hosted
    x = torch.randn(TOKENS, BATCH, SIZES["hidden_size"])

    def run_hosted() -> None:
        output, _ = hosted(x.clone().requires_grad_())
        output.sum().backward()

    def run_bare() -> None:
        output = hosted.run(bare, x.transpose(0, 1).contiguous().requires_grad_())
        output.sum().backward()

    return in_turn({"reference": run_bare, "isthmus": run_hosted}, repeats)


def work(layout: dict[str, int], mixer: str) -> int:
    """FLOPs of forward and backward on this rank, but for the depthwise convolution's backward.

    torch counts that as if every channel saw all others.
    """
    hosted = _hosted(layout, mixer)
    tokens = TOKENS // (layout.get("tp", 1) * layout.get("cp", 1))
    x = torch.randn(tokens, BATCH, SIZES["hidden_size"], requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        output, _ = hosted(x)
        output.sum().backward()
    counts = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    counts.pop("aten.convolution_backward", None)
    return sum(counts.values())


def _hosted(layout: dict[str, int], mixer: str) -> Any:
    from isthmus.bridge import AutoBridge
    from isthmus.hosting.spec import rope
    from isthmus.layout import Layout
    from isthmus_qwen3_next.attention import HostedAttention
    from isthmus_qwen3_next.delta_net import HostedDeltaNet
    from isthmus_qwen3_next.tiny import tiny_config

    sizes = Layout(**layout)
    sizes.initialize()
    bridge = AutoBridge.from_hf_config(tiny_config(**SIZES))
    config = bridge.get_model_config(params_dtype=torch.float32, **sizes.config_overrides())
    if mixer == "delta net":
        return HostedDeltaNet(config.transformer)
    return HostedAttention(config.transformer, **rope(config))
