"""Quantised sources that cannot be read are told from plain ones and refused."""

import pytest
import torch
from safetensors.torch import save_file

from isthmus.checkpoint.reader import CheckpointReader
from isthmus.quant.find import find_or_refuse

FLOAT8, UINT8 = torch.zeros(2).to(torch.float8_e4m3fn), torch.zeros(2).to(torch.uint8)
QUANTISED = {
    "config only": ({"quantization_config": {"quant_method": "awq"}}, {"w": torch.zeros(2)}, "(awq)"),
    "nested config": (
        {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
        {},
        "text_config.quantization_config (fp8)",
    ),
    "float8": (
        {},
        {"a.0.weight": FLOAT8, "a.1.weight": FLOAT8},
        "2 tensors hold float8_e4m3fn codes: a.{0..1}.",
    ),
    "gptq": ({}, {"q.qweight": torch.zeros(2).int()}, "1 tensors hold int32 codes: q.qweight"),
    "mxfp4": ({}, {"e.down_proj_blocks": UINT8, "e.down_proj_scales": UINT8}, "e.down_proj_blocks"),
    "int8 and scale": ({}, {"w": UINT8.view(torch.int8), "w_scale": torch.zeros(1)}, "int8 codes: w"),
    "int8 and sibling": ({}, {"x.weight": UINT8, "x.scale": torch.zeros(1)}, "uint8 codes: x.weight"),
}


@pytest.mark.parametrize("case", QUANTISED)
def test_a_quantised_checkpoint_is_refused(tmp_path, case):
    config, tensors, message = QUANTISED[case]
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors or {"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    with CheckpointReader(tmp_path) as reader, pytest.raises(ValueError, match="quantised") as caught:
        find_or_refuse(config, reader.tensors, tmp_path)
    assert message in str(caught.value)


def test_integers_and_names_alone_do_not_make_a_checkpoint_quantised(tmp_path):
    tensors = {
        "position_ids": torch.arange(4),
        "gate.tid2eid": torch.zeros(4).int(),
        "mask": torch.zeros(4).bool(),
        "vision.num_blocks": torch.zeros(1),
        "router.scale": torch.zeros(1),
        "router.weight": torch.zeros(1),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with CheckpointReader(tmp_path) as reader:
        assert not find_or_refuse({"text_config": {"quantization_config": None}}, reader.tensors, tmp_path)
