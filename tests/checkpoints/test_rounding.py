"""8-bit floats by their bits are what torch's casts make of them."""

import pytest
import torch

from sigmascope.checkpoints.rounding import nearest_fp8, numbers_of

TYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz]


@pytest.mark.parametrize("kind", TYPES)
def test_every_code_is_read_as_torch_reads_it(kind: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(kind)
    assert torch.equal(numbers_of(codes).nan_to_num(12345.0), codes.float().nan_to_num(12345.0))


@pytest.mark.parametrize("kind", TYPES)
def test_numbers_are_rounded_as_torch_rounds_them(kind: torch.dtype) -> None:
    """Halves between two codes, small and large numbers, and what lies beyond the range."""
    codes = torch.arange(256, dtype=torch.uint8).view(kind).float()
    grid = torch.unique(codes[codes.isfinite()])
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(10_000, generator=generator) * torch.logspace(-6, 4, 10_000)
    numbers = torch.cat([grid, (grid[1:] + grid[:-1]) / 2, drawn])
    limit = torch.finfo(kind).max
    assert torch.equal(nearest_fp8(numbers, kind), numbers.clamp(-limit, limit).to(kind).float())
