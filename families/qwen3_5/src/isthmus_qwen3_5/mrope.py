"""Positions of Qwen3.5's tokens in time, height and width, and what they rotate by. Pure."""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from isthmus.hosting.torch_functions import import_modeling
from isthmus_qwen3_5.blocks import MODELING


def positions(
    input_ids: Tensor, bounds: Sequence[tuple[int, int]], vision: dict[str, Any], merge: int, **inputs: Any
) -> Tensor:
    """HF's mrope positions (3, b, s) of rows (b, s), from 0 in each of the sequences within `bounds`."""
    file, name = MODELING[vision["model_type"]]
    model = getattr(import_modeling(file), f"{name}Model")
    stand_in = SimpleNamespace(  # for HF's model, of which the method below reads no more than this
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
        stand_in,
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
