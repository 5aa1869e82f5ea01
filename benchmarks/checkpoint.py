"""The checkpoints that the benchmarks read: Qwen3-Next of about 2 GB, most of it in small experts."""

import json
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file

from isthmus import AutoBridge
from isthmus.layout import Layout
from isthmus.testing.quantised import E4M3, FLOAT32, SCALE_INV, Kind, Storage, quantise_tensors
from isthmus_qwen3_next.tiny import tiny_config


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes that make the work: an expert is three tensors of `hidden` x `expert_rows` elements."""

    layers: int
    experts: int
    hidden: int
    expert_rows: int

    def config(self) -> dict[str, object]:
        """The config.json, in the published proportions."""
        return tiny_config(
            vocab_size=32000,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=16,
            num_key_value_heads=2,
            head_dim=self.hidden // 8,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_key_head_dim=self.hidden // 16,
            linear_value_head_dim=self.hidden // 16,
            num_experts=self.experts,
            num_experts_per_tok=10,
            moe_intermediate_size=self.expert_rows,
            shared_expert_intermediate_size=self.expert_rows,
        )


SHAPES = {
    "512-experts": Shape(layers=8, experts=512, hidden=512, expert_rows=128),  # 128 KiB a tensor
    "128-experts": Shape(layers=4, experts=128, hidden=1024, expert_rows=512),  # 1 MiB a tensor
    "tiny": Shape(layers=4, experts=16, hidden=128, expert_rows=32),  # to try the benchmarks themselves
}


def quantise(folder: str, target: str) -> int:
    """Write the checkpoint in `folder` again in FP8, blocks of 128 x 128, into `target`; its bytes."""
    block = Storage(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        Kind(E4M3, lambda rows, cols: (128, 128), SCALE_INV, FLOAT32),
    )
    tensors = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        tensors |= load_file(path)
    stored, entry = quantise_tensors(tensors, block)
    Path(target).mkdir(parents=True)
    save_torch_state_dict(stored, target, max_shard_size="500MB")
    config = json.loads((Path(folder) / "config.json").read_text())
    (Path(target) / "config.json").write_text(json.dumps(config | {"quantization_config": entry}, indent=2))
    return sum(tensor.nbytes for tensor in stored.values())


def make(folder: str, shape: str) -> int:
    """Write the checkpoint with random weights into `folder`; its bytes. Runs in a worker process."""
    import torch

    config = SHAPES[shape].config()
    Layout().initialize()
    bridge = AutoBridge.from_hf_config(config)
    model = bridge.build_model(bridge.get_model_config(params_dtype=torch.bfloat16))
    tensors = {
        name: tensor.clone() for name, tensor in bridge.export_hf_weights(model)
    }  # no views of one storage
    Path(folder).mkdir(parents=True)
    save_torch_state_dict(tensors, folder, max_shard_size="500MB")
    (Path(folder) / "config.json").write_text(json.dumps(config, indent=2))
    return sum(tensor.nbytes for tensor in tensors.values())
