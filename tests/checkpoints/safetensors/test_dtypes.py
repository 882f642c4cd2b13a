from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sigmascope.checkpoints import read_header
from sigmascope.checkpoints.safetensors import BITS, TORCH_DTYPES, to_file, to_torch


@pytest.mark.parametrize("code", sorted(TORCH_DTYPES))
def test_codes_and_sizes_are_those_of_the_safetensors_library(code: str, tmp_path: Path) -> None:
    dtype = TORCH_DTYPES[code]
    tensor = torch.zeros(2, 16, dtype=torch.uint8).view(dtype)
    save_file({"x": tensor}, tmp_path / "x.safetensors")
    entry = read_header(tmp_path / "x.safetensors").tensors["x"]
    assert (entry.dtype, entry.nbytes) == (code, 32)
    assert to_file(dtype, tuple(tensor.shape)) == (code, entry.shape)
    assert to_torch(code, entry.shape) == (dtype, tuple(tensor.shape))


def test_a_type_without_counterpart_is_known_by_size_only() -> None:
    assert BITS["F6_E2M3"] == 6
    assert to_torch("F6_E2M3", (4,)) is None
    assert to_file(torch.complex128, (4,)) is None


def test_packed_elements_must_fill_whole_bytes() -> None:
    assert to_torch("F4", (3,)) is None
    assert to_torch("F4", ()) is None
