"""The checksum depends on every bit and its position, and on nothing else."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rl.weights.checksum import checksum

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


def random_tensor(dtype: torch.dtype, numel: int = 24) -> torch.Tensor:
    torch.manual_seed(0)
    numbers = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8)
    return numbers.bool()[:numel] if dtype == torch.bool else numbers.view(dtype)  # NaN payloads included


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_a_checksum_does_not_depend_on_the_layout(dtype):
    x = random_tensor(dtype).view(2, 3, 4)
    wide = torch.zeros(2, 3, 8, dtype=dtype)
    wide[..., ::2] = x
    transposed = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not transposed.is_contiguous()
    shifted = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(2, 3, 4)
    assert {checksum(y) for y in (wide[..., ::2], transposed, shifted, x.flatten(), x.clone())} == {checksum(x)}


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_a_single_bit_changes_the_checksum(dtype):
    x = random_tensor(dtype)
    for place in (0, 11, 23):
        for bit in range(1 if dtype == torch.bool else 8 * dtype.itemsize):
            flipped = x.clone()
            flipped.view(torch.uint8)[place * dtype.itemsize + bit // 8] ^= 1 << bit % 8
            assert checksum(flipped) != checksum(x)


def test_nans_zeros_and_lengths_have_different_checksums():
    bits = torch.tensor([0x7FC00000, 0x7FC00001, 0x7F800001, -0x400000], dtype=torch.int32)  # four kinds of NaN
    nans = bits.view(torch.float32)
    assert all(math.isnan(value) for value in nans.tolist())
    assert len({checksum(nan) for nan in nans}) == 4
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    assert checksum(torch.zeros(3)) != checksum(torch.zeros(4))
    assert checksum(torch.zeros(0)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_constant_tensors_have_different_checksums(dtype):
    """Norm weights start as ones, and sums of many regular factors would be 0 modulo 2**64."""
    for numel in (256, 4096, 1 << 21):
        values = [torch.full((numel,), value, dtype=dtype) for value in (0.0, 1.0, 2.0, -1.0)]
        assert len({checksum(value) for value in values}) == 4


def test_rows_that_swap_places_change_the_checksum():
    """A tensor of more than 2**20 words of 4 bytes has several rows."""
    x = torch.arange(20 * (1 << 18), dtype=torch.int32)
    y = x.clone()
    y[: 1 << 20], y[1 << 20 : 2 << 20] = x[1 << 20 : 2 << 20], x[: 1 << 20]
    z = x.clone()
    z[9 * (1 << 18)] ^= -(1 << 31)  # a sign
    z[11 * (1 << 18) + 5] ^= -(1 << 31)
    assert len({checksum(x), checksum(y), checksum(z)}) == 3


@given(st.lists(st.integers(0, 255), min_size=2, max_size=50), st.data())
def test_elements_that_swap_places_change_the_checksum(numbers, data):
    i, j = data.draw(st.tuples(st.integers(0, len(numbers) - 1), st.integers(0, len(numbers) - 1)))
    x = torch.tensor(numbers, dtype=torch.uint8)
    y = x.clone()
    y[[i, j]] = x[[j, i]]
    assert (checksum(y) == checksum(x)) == (numbers[i] == numbers[j])


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_different_tensors_have_different_checksums(a, b):
    same = checksum(torch.tensor(a, dtype=torch.int64)) == checksum(torch.tensor(b, dtype=torch.int64))
    assert same == (a == b)
