"""The Python interface with wrong arguments: what is wrong, and what to give instead."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from isthmus import AutoBridge
from isthmus.built import chunks_of


@pytest.mark.parametrize("config", [None, "qwen3_next", 3, ["model_type"]], ids=repr)
def test_a_config_is_a_dict_or_a_transformers_config(config: Any) -> None:
    with pytest.raises(ValueError, match=r"expected a config.json's dict .*; .* is for from_hf_pretrained"):
        AutoBridge.from_hf_config(config)


@pytest.mark.parametrize("path", ["", None, 3], ids=repr)
def test_no_path_is_not_the_working_folder(path: Any) -> None:
    with pytest.raises(ValueError, match=f"expected a checkpoint folder or a hub id, got {path!r}"):
        AutoBridge.from_hf_pretrained(path)


def test_a_file_is_not_a_checkpoint_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(OSError, match=r"model.safetensors is a file; give the checkpoint folder"):
        AutoBridge.from_hf_pretrained(file)


class MegatronLike(nn.Module):
    pg_collection = None


def test_a_single_chunk_needs_no_list() -> None:
    chunk = MegatronLike()
    assert chunks_of(chunk) == chunks_of([chunk]) == chunks_of(nn.ModuleList([chunk])) == [chunk]


def test_an_empty_list_is_no_model() -> None:
    with pytest.raises(ValueError, match="no model chunks in an empty list; give what build_model"):
        chunks_of([])


def test_parameters_that_fsdp_has_divided_are_refused_by_name() -> None:
    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    chunk = MegatronLike()
    chunk.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    for layer in (chunk.layers[0], chunk.layers[1]):
        local = DTensor.from_local(torch.ones(2, 2), mesh, [Replicate()], run_check=False)
        layer.weight = nn.Parameter(local)
    with pytest.raises(ValueError, match=r"FSDP has divided 2 parameters.*\n  layers\.\{0\.\.1\}\.weight\n"):
        chunks_of(chunk)


@pytest.mark.parametrize("model", [nn.Linear(1, 1), [nn.Linear(1, 1)], ["model"]], ids=repr)
def test_another_module_is_no_megatron_model(model: Any) -> None:
    with pytest.raises(ValueError, match=r"a (Linear|str) is not a Megatron model; give what build_model"):
        chunks_of(model)
