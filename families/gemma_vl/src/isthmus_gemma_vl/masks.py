"""Which tokens each may see where images stand: all before it, and all of its own image. Pure."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad


def unseen(images: Tensor, bounds: Sequence[tuple[int, int]]) -> Tensor:
    """(b, 1, s, s), True where a query (row) may not see a key: Megatron's convention.

    Args:
        images: (b, s), True at image tokens; those in a row are of one image.
        bounds: of the sequences in a packed row, which do not see each other.
    """
    starts = images & ~pad(images, (1, 0))[:, :-1]
    image = torch.where(images, starts.cumsum(1), 0)
    lengths = torch.tensor([stop - start for start, stop in bounds])
    sequence = torch.repeat_interleave(torch.arange(len(bounds)), lengths).to(images.device)
    index = torch.arange(images.size(1), device=images.device)
    before = index[:, None] >= index
    own = (image[:, :, None] == image[:, None]) & images[:, None]
    return ~((before | own) & (sequence[:, None] == sequence))[:, None]


def windowed(mask: Tensor, before: int) -> Tensor:
    """`mask` (b, 1, s, s), and more than `before` tokens back unseen: also those of the query's own image."""
    index = torch.arange(mask.size(-1), device=mask.device)
    return mask | (index[:, None] - index > before)
