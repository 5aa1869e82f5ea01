"""Grids of one number a block: where a block's number belongs in a matrix (R, C), and what it is taken from.

A block is (rows, columns); the last one along each dim may be partial: 576 rows have 5 blocks of 128.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

type Block = tuple[int, int]


def grid_shape(rows: int, cols: int, block: Block) -> tuple[int, int]:
    """How many blocks a matrix has along each dim."""
    return -(-rows // block[0]), -(-cols // block[1])


def apply_(
    op: Callable[[Tensor, Tensor], object], values: Tensor, grid: Tensor, block: Block, row: int, col: int
) -> None:
    """`op` (``Tensor.mul_``) on each value and its block's number, in place.

    `values` (contiguous) begins at (`row`, `col`) of the matrix, `grid` is of all its blocks.
    """
    height, width = block
    rows, cols = values.shape
    first, last = col // width, -(-(col + cols) // width)
    whole = col % width == 0 and cols % width == 0

    def on(part: Tensor, numbers: Tensor) -> None:
        """`part` (n, cols) with `numbers` (n or 1, blocks)."""
        if last - first == 1:
            op(part, numbers)
        elif whole:
            op(part.view(len(part), -1, width), numbers[:, :, None])
        else:
            begin = col - first * width
            op(part, numbers.repeat_interleave(width, 1)[:, begin : begin + cols])

    if height == 1:
        on(values, grid[row : row + rows, first:last])
        return
    if whole and row % height == 0 and rows % height == 0:  # the usual case in one step
        numbers = grid[row // height : (row + rows) // height, first:last]
        op(values.view(rows // height, height, last - first, width), numbers[:, None, :, None])
        return
    for number in range(row // height, -(-(row + rows) // height)):
        begin, end = max(number * height - row, 0), min((number + 1) * height - row, rows)
        on(values[begin:end], grid[number : number + 1, first:last])


def extremes(values: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """The least and the largest number of each block, 0 among them where a block is partial."""
    rows, cols = values.shape
    height, width = min(block[0], rows), min(block[1], cols)
    padded = pad(values, (0, -cols % width, 0, -rows % height))
    tiled = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width)
    return tiled.amin((1, 3)), tiled.amax((1, 3))


def powers_of_two(numbers: Tensor) -> Tensor:
    """The least power of two that is not below each number (> 0), within what e8m0 has."""
    mantissa, exponent = torch.frexp(numbers)  # numbers = mantissa * 2**exponent, 0.5 <= mantissa < 1
    exponent = exponent - (mantissa == 0.5).int()
    return torch.ldexp(torch.ones_like(numbers), exponent.clamp(-126, 127))
