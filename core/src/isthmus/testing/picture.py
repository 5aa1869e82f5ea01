"""Images as a user has them, for Hugging Face's processors."""

from typing import Any

import torch


def picture(width: int, height: int, seed: int) -> Any:
    """A PIL image with an edge in it, and noise."""
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(120, (height, width, 3), generator=generator, dtype=torch.uint8)
    pixels[: height // 2, :, 0] += 120
    return Image.fromarray(pixels.numpy())
