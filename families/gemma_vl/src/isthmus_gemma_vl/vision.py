"""Gemma 3 with its vision tower: HF's SigLIP and projector on the first stage, and the mask of images.

An image's tokens stand between marks; its features take their places, not multiplied by the embedding scale.
"""

import copy
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from isthmus.hosting.sequence import Row
from isthmus.hosting.torch_functions import import_modeling
from isthmus.hosting.vision_model import VisionLanguageModel
from isthmus_gemma_vl import inputs as vision_inputs
from isthmus_gemma_vl.inputs import NAMES
from isthmus_gemma_vl.masks import unseen


class Gemma3Model(VisionLanguageModel):
    """A VisionLanguageModel that takes what HF's Gemma3Processor returns."""

    inputs: ClassVar[tuple[str, ...]] = NAMES

    @property
    def placeholders(self) -> tuple[int, ...]:
        """The image token."""
        return (self.model_config.vision["image_token"],)

    def build_tower(self, model_config: Any) -> nn.Module:
        """HF's SiglipVisionModel without its pooling head, and HF's Gemma3MultiModalProjector."""
        return VisionTower(model_config.vision, self.config.hidden_size)

    def check(
        self, input_ids: Tensor, row: Row, position_ids: Tensor | None, **inputs: Tensor | None
    ) -> None:
        """ValueError: see :func:`isthmus_gemma_vl.inputs.check`; only the first stage needs pixels."""
        vision = self.model_config.vision
        vision_inputs.check(input_ids, row.bounds, vision, needs_pixels=self.pre_process, **inputs)

    def mask(self, input_ids: Tensor, row: Row, attention_mask: Tensor | None) -> Tensor | None:
        """Which tokens each may not see, (b, 1, s, s), before windows; None for text, which is causal.

        ValueError: one of Megatron's is given; of the processor's, which has no padding, nothing is left.
        """
        if attention_mask is not None:
            raise ValueError("leave out attention_mask: it is made of input_ids, and rows have no padding")
        images = self._images(input_ids)
        return unseen(images, row.bounds) if images.any() else None

    def features(self, input_ids: Tensor, **inputs: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Of all images in one call."""
        pixels = inputs["pixel_values"]
        if pixels is None or not len(pixels):
            return None
        found = self.vision_model(pixels).flatten(0, 1)
        places, here = torch.full_like(input_ids, -1), self._images(input_ids)
        places[here] = torch.arange(len(found), device=places.device)
        return found, places

    def _merged(
        self, whole: Tensor, ids: Tensor | None, counted: Tensor | None, mine: Tensor | None, inputs: Any
    ) -> Tensor:
        """The base class's; an image token, which may be none of the vocabulary's, is looked up as 0."""
        assert ids is not None
        return super()._merged(whole, ids.masked_fill(self._images(ids), 0), counted, mine, inputs)

    def _images(self, ids: Tensor) -> Tensor:
        return ids == self.model_config.vision["image_token"]


class VisionTower(nn.Module):
    """Pixels (n, channels, size, size) -> features (n, tokens of an image, `hidden_size`)."""

    def __init__(self, vision: dict[str, Any], hidden_size: int) -> None:
        super().__init__()
        siglip = import_modeling("transformers.models.siglip.modeling_siglip")
        gemma = import_modeling("transformers.models.gemma3.modeling_gemma3")
        # Of the pooling head, which Gemma 3 does not use, there would be no gradient.
        config = siglip.SiglipVisionConfig(**copy.deepcopy(vision["config"]), vision_use_head=False)
        config._attn_implementation = "sdpa"
        self.vision_tower = siglip.SiglipVisionModel(config)
        self.multi_modal_projector = gemma.Gemma3MultiModalProjector(
            SimpleNamespace(
                vision_config=config,
                text_config=SimpleNamespace(hidden_size=hidden_size),
                mm_tokens_per_image=vision["tokens_per_image"],
            )
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """See the class."""
        return self.multi_modal_projector(self.vision_tower(pixel_values=pixels).last_hidden_state)
