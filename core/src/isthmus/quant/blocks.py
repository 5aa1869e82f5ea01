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
    top, bottom = row // height, -(-(row + rows) // height)
    numbers = grid[top:bottom, first:last]
    if last - first > 1:
        if height == 1 and col % width == 0 and cols % width == 0:
            op(values.view(rows, -1, width), numbers[:, :, None])
            return
        # One number a column: rows that lie as the values do are many times faster than runs of a block.
        begin = col - first * width
        numbers = numbers.repeat_interleave(width, 1)[:, begin : begin + cols]
    if height == 1 or bottom - top == 1:
        op(values, numbers)
    elif row % height == 0 and rows % height == 0:
        op(values.view(bottom - top, height, cols), numbers[:, None])
    else:
        for number in range(top, bottom):
            begin, end = max(number * height - row, 0), min((number + 1) * height - row, rows)
            op(values[begin:end], numbers[number - top])


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
