"""Codes are the nearest ones, ties to even: every code, every point between two, and beyond the last."""

import itertools

import pytest
import torch

from isthmus.quant.codec import CODES, quantise
from isthmus.quant.float4 import Mxfp4
from isthmus.quant.float8 import Float8
from isthmus.quant.integers import Integers

CODECS = {
    "e4m3": (Float8(torch.float8_e4m3fn), [*range(0x7F)]),
    "e5m2": (Float8(torch.float8_e5m2), [*range(0x7C)]),
    "e2m1": (Mxfp4(), [*range(8)]),
}


def numbers(codec, codes: list[int]) -> torch.Tensor:
    """What codes stand for, one after the other."""
    if isinstance(codec, Mxfp4):
        row = torch.tensor([codes], dtype=torch.uint8)
        return codec.decode(row)[0, 0::2]
    return torch.tensor(codes, dtype=torch.uint8).view(codec.dtype).float()


def encoded(codec, values: torch.Tensor) -> list[int]:
    if isinstance(codec, Mxfp4):
        pairs = torch.stack([values, torch.zeros_like(values)], 1).flatten()[None]
        return (codec.encode(pairs)[0] & 15).tolist()
    return codec.encode(values[None])[0].view(torch.uint8).tolist()


@pytest.mark.parametrize("name", CODECS)
def test_codes_are_nearest_and_ties_go_to_even(name):
    codec, codes = CODECS[name]
    exact = numbers(codec, codes)
    assert encoded(codec, exact) == codes
    between = (exact[1:] + exact[:-1]) / 2
    even = [low if low % 2 == 0 else high for low, high in itertools.pairwise(codes)]
    assert encoded(codec, between) == even
    assert encoded(codec, torch.nextafter(between, exact[1:])) == codes[1:]
    assert encoded(codec, torch.nextafter(between, exact[:-1])) == codes[:-1]
    top = 0x80 if name != "e2m1" else 8
    assert encoded(codec, -exact) == [code + top for code in codes]
    beyond = torch.tensor([float(exact[-1]) * 1.2, float(exact[-1]) * 1e6])
    assert encoded(codec, beyond) == [codes[-1]] * 2


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_are_nearest_and_ties_go_to_even(bits):
    codec = Integers(bits, packed=False, zero=False)
    half = 2 ** (bits - 1)
    exact = torch.arange(-half, half).float()
    assert codec.encode(exact[None])[0].tolist() == exact.tolist()
    assert codec.encode(exact[None, :-1] + 0.5)[0].tolist() == [n + n % 2 for n in range(-half, half - 1)]
    assert codec.encode(torch.tensor([[-1e9, 1e9]]))[0].tolist() == [-half, half - 1]


@pytest.mark.parametrize("power", [False, True])
def test_a_new_scale_makes_the_largest_number_the_largest_code_or_less(power):
    codec = Float8(torch.float8_e4m3fn, power)
    values = torch.randn(50, 70, generator=torch.Generator().manual_seed(0))
    parts = quantise(codec, (16, 16), values, {"scale": torch.float32})
    scale = parts["scale"]
    assert scale.shape == (4, 5)
    for r in range(4):
        for c in range(5):
            tile = slice(16 * r, 16 * r + 16), slice(16 * c, 16 * c + 16)
            largest, code = values[tile].abs().max(), parts[CODES][tile].float().abs().max()
            assert 224 < code <= 448
            if power:
                assert torch.frexp(scale[r, c])[0] == 0.5
                assert scale[r, c] / 2 < largest / 448 <= scale[r, c]
            else:
                assert code == 448
