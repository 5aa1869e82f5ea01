"""Qwen3.5 with its vision tower: HF's own on the first stage, mrope positions in the language model."""

import copy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from isthmus.hosting.sequence import Row
from isthmus.hosting.torch_functions import import_modeling
from isthmus.hosting.vision_model import VisionLanguageModel
from isthmus_qwen3_5 import inputs as vision_inputs
from isthmus_qwen3_5.blocks import MODELING
from isthmus_qwen3_5.inputs import KINDS, NAMES
from isthmus_qwen3_5.mrope import interleaved, positions


class Qwen35Model(VisionLanguageModel):
    """A VisionLanguageModel that takes what HF's Qwen3VLProcessor returns."""

    inputs: ClassVar[tuple[str, ...]] = NAMES
    axes: ClassVar[int] = 3  # time, height and width

    def build_tower(self, model_config: Any) -> nn.Module:
        """HF's Qwen3_5VisionModel, its merger included."""
        return vision_tower(model_config.vision)

    def check(
        self, input_ids: Tensor, row: Row, position_ids: Tensor | None, **inputs: Tensor | None
    ) -> None:
        """ValueError: see :func:`isthmus_qwen3_5.inputs.check`; only the first stage needs pixels."""
        vision = self.model_config.vision
        vision_inputs.check(
            input_ids, row.bounds, position_ids, vision, needs_pixels=self.pre_process, **inputs
        )

    def features(self, input_ids: Tensor, **inputs: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Of images and videos, which HF's model runs apart too."""
        found: list[Tensor] = []
        places, count = torch.full_like(input_ids, -1), 0
        tower: Any = self.vision_model
        for kind in KINDS:
            pixels = inputs[kind.pixels]
            if pixels is None:
                continue
            features = tower(pixels.to(tower.dtype), grid_thw=inputs[kind.grid]).pooler_output
            here = input_ids == self.model_config.vision[kind.token]
            places[here] = count + torch.arange(len(features), device=places.device)
            found.append(features)
            count += len(features)
        return (torch.cat(found), places) if found else None

    def frequencies(
        self, input_ids: Tensor, row: Row, position_ids: Tensor | None, **inputs: Tensor | None
    ) -> Tensor | None:
        """Interleaved mrope; None for text, on which time, height and width count alike."""
        vision = self.model_config.vision
        if position_ids is None or position_ids.dim() != 3:
            if all(inputs[kind.grid] is None for kind in KINDS):
                return None
            position_ids = positions(input_ids, row.bounds, vision, self._merge, **inputs)
        return interleaved(position_ids, self.rotary_pos_emb.inv_freq, vision["mrope_section"])

    @property
    def _merge(self) -> int:
        return self.model_config.vision["config"]["spatial_merge_size"]


def vision_tower(vision: dict[str, Any]) -> nn.Module:
    """HF's tower of a model config's `vision`."""
    file, name = MODELING[vision["model_type"]]
    modeling = import_modeling(file)
    config = getattr(modeling, f"{name}VisionConfig")(**copy.deepcopy(vision["config"]))
    config._attn_implementation = "sdpa"
    return getattr(modeling, f"{name}VisionModel")(config)
