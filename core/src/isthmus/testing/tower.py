"""What tests of vision-language families share: HF's model beside a hosted one, and a mistake of places."""

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isthmus.bridge import AutoBridge
from isthmus.layout import Layout
from isthmus.testing import reference


def hosted_and_hugging_faces(folder: Path, layout: Layout) -> tuple[Any, Any]:
    """Megatron's model and HF's of a checkpoint, both in float32, in a worker. Collective."""
    layout.initialize()
    bridge = AutoBridge.from_hf_pretrained(folder)
    fields = {"params_dtype": torch.float32, **layout.config_overrides()}
    model = bridge.build_model(bridge.get_model_config(**fields))[0]
    bridge.load_hf_weights(model)
    return model, reference.load(folder, torch.float32, vision=True).hf


def features_one_token_late(patch: Any, model: str) -> None:
    """By pytest's `patch`: features of the VisionLanguageModel ``module:Class`` a token behind their own."""
    module, _, name = model.partition(":")
    target = getattr(importlib.import_module(module), name)
    original = target.features

    def late(self: Any, input_ids: Tensor, **inputs: Any) -> Any:
        found = original(self, input_ids, **inputs)
        return found and (found[0], found[1].roll(1, dims=1))

    patch.setattr(target, "features", late)
