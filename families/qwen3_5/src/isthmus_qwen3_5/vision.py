"""Qwen3.5 with its vision tower: HF's own on the first stage, mrope positions in the language model."""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from isthmus.hosting.sequence import Row
from isthmus.hosting.torch_functions import import_modeling
from isthmus.hosting.vision_model import VisionLanguageModel
from isthmus_qwen3_5 import inputs as vision_inputs
from isthmus_qwen3_5.inputs import KINDS, NAMES

MODELING = {
    "qwen3_5": ("transformers.models.qwen3_5.modeling_qwen3_5", "Qwen3_5"),
    "qwen3_5_moe": ("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe", "Qwen3_5Moe"),
}


class Qwen35Model(VisionLanguageModel):
    """A VisionLanguageModel that takes what HF's Qwen3VLProcessor returns."""

    inputs: ClassVar[tuple[str, ...]] = NAMES

    def build_tower(self, model_config: Any) -> nn.Module:
        """HF's Qwen3_5VisionModel, its merger included."""
        return vision_tower(model_config.vision)

    def check(
        self, input_ids: Tensor, row: Row, position_ids: Tensor | None, **inputs: Tensor | None
    ) -> None:
        """ValueError: see :func:`isthmus_qwen3_5.inputs.check`; on the first stage also: grids alone."""
        vision = self.model_config.vision
        vision_inputs.check(input_ids, row.bounds, position_ids, vision, self._merge, **inputs)
        alone = [
            f"{kind.grid} without {kind.pixels}"
            for kind in KINDS
            if self.pre_process and inputs[kind.grid] is not None and inputs[kind.pixels] is None
        ]
        if alone:
            raise ValueError(f"{', '.join(alone)}: the first pipeline stage computes features of pixels")

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
        if all(inputs[kind.grid] is None for kind in KINDS):
            return None
        if position_ids is None or position_ids.dim() != 3:
            position_ids = positions(input_ids, row.bounds, vision, self._merge, **inputs)
        return interleaved(position_ids, self.rotary_pos_emb.inv_freq, vision["mrope_section"])

    @property
    def _merge(self) -> int:
        return self.model_config.vision["config"]["spatial_merge_size"]


def vision_tower(vision: dict[str, Any]) -> nn.Module:
    """HF's tower of a model config's `vision`."""
    file, name = MODELING[vision["model_type"]]
    modeling = import_modeling(file)
    config = getattr(modeling, f"{name}VisionConfig")(**vision["config"])
    config._attn_implementation = "sdpa"
    return getattr(modeling, f"{name}VisionModel")(config)


def positions(
    input_ids: Tensor, bounds: Sequence[tuple[int, int]], vision: dict[str, Any], merge: int, **inputs: Any
) -> Tensor:
    """HF's mrope positions (3, b, s) of rows (b, s), from 0 in each of the sequences within `bounds`."""
    file, name = MODELING[vision["model_type"]]
    model = getattr(import_modeling(file), f"{name}Model")
    self = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=merge)),
        get_vision_position_ids=partial(model.get_vision_position_ids, None),
    )
    longest = max(stop - start for start, stop in bounds)

    def samples(rows: Tensor) -> Tensor:
        """(b * sequences, longest), padded at the end."""
        cut = [rows[:, start:stop] for start, stop in bounds]
        padded = [pad(each, (0, longest - each.size(1))) for each in cut]
        return torch.stack(padded, dim=1).flatten(0, 1)

    found, _ = model.get_rope_index(
        self,
        samples(input_ids),
        samples(inputs["mm_token_type_ids"]),
        image_grid_thw=inputs["image_grid_thw"],
        video_grid_thw=inputs["video_grid_thw"],
        attention_mask=samples(torch.ones_like(input_ids)),
    )
    found = found.unflatten(1, (len(input_ids), len(bounds)))
    return torch.cat([found[:, :, i, : stop - start] for i, (start, stop) in enumerate(bounds)], dim=-1)


def interleaved(position_ids: Tensor, inverse: Tensor, sections: Sequence[int]) -> Tensor:
    """Rotary frequencies (s, b, 1, d) of positions (3, b, s), as HF interleaves time, height and width.

    Frequency i of d/2 is of height where i % 3 == 1, of width where i % 3 == 2, as long as `sections` have
    any left, and else of time. `inverse` are the d/2 inverse frequencies.
    """
    angles = position_ids[..., None].float() * inverse.to(position_ids.device)
    chosen = angles[0].clone()
    for axis in (1, 2):
        of_axis = slice(axis, 3 * sections[axis], 3)
        chosen[..., of_axis] = angles[axis][..., of_axis]
    return torch.cat([chosen, chosen], dim=-1).transpose(0, 1)[:, :, None]
