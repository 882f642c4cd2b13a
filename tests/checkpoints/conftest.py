import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

WriteRaw = Callable[..., Path]


def raw_safetensors(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file as the format describes it, from any JSON value or bytes as header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


@pytest.fixture
def write_raw(tmp_path: Path) -> WriteRaw:
    def write(header: object, data: bytes = b"", *, length: int | None = None) -> Path:
        path = tmp_path / "made.safetensors"
        path.write_bytes(raw_safetensors(header, data, length=length))
        return path

    return write


@pytest.fixture
def weights() -> dict[str, Tensor]:
    """A few tensors of several types, one transposed, one empty, one scalar, some of odd sizes."""
    generator = torch.Generator().manual_seed(0)
    return {
        "denoiser.conv_in.weight": torch.randn(4, 3, 3, 3, generator=generator).bfloat16(),
        "denoiser.to_q.weight": torch.randn(4, 6, generator=generator).T,
        "denoiser.to_q.bias": torch.randn(3, generator=generator).half(),
        "vae.scale": torch.tensor(0.5, dtype=torch.float64),
        "num_iterations": torch.tensor(7.0),
        "empty": torch.empty(0, 5),
        "mask": torch.tensor([True, False, True]),
    }


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True
        )
    except FileNotFoundError:
        pytest.skip("there is no `mount` on this system")
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def same_bytes() -> Callable[[Tensor, Tensor], bool]:
    """Equality of type, shape and bits (so that NaN equals itself)."""

    def same(left: Tensor, right: Tensor) -> bool:
        def bits(tensor: Tensor) -> Any:
            return tensor.contiguous().reshape(-1).view(torch.uint8)

        kind = left.dtype == right.dtype and left.shape == right.shape
        return kind and (left.numel() == 0 or torch.equal(bits(left), bits(right)))

    return same
