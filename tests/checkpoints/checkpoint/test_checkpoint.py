import hashlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sigmascope.checkpoints import (
    checkpoint_fingerprint,
    file_sha256,
    open_checkpoint,
    save_safetensors,
    save_torch,
    tensor_fingerprint,
)
from sigmascope.errors import CheckpointError


def test_it_is_blake2b_of_type_shape_and_bytes() -> None:
    expected = hashlib.blake2b(b"torch.float32(2,)" + b"\0\0\x80?\0\0\0@", digest_size=16).hexdigest()
    assert tensor_fingerprint(torch.tensor([1.0, 2.0])) == expected


def test_strides_do_not_matter() -> None:
    matrix = torch.randn(5, 7)
    assert tensor_fingerprint(matrix.T) == tensor_fingerprint(matrix.T.contiguous())
    assert tensor_fingerprint(matrix[:, ::2]) == tensor_fingerprint(matrix[:, ::2].clone())


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(6),
        torch.zeros(3, 2),
        torch.zeros(2, 3, dtype=torch.int32),
        torch.full((2, 3), -0.0),
        torch.tensor([[0, 0, 0], [0, 0, 1e-30]]),
        torch.empty(0),
    ],
)
def test_type_shape_and_every_bit_matter(other: Tensor) -> None:
    assert tensor_fingerprint(torch.zeros(2, 3)) != tensor_fingerprint(other)


def test_nan_equals_itself() -> None:
    assert tensor_fingerprint(torch.tensor([float("nan")])) == tensor_fingerprint(
        torch.tensor([float("nan")])
    )


def test_a_parameter_counts_as_its_tensor() -> None:
    assert tensor_fingerprint(torch.nn.Parameter(torch.ones(2))) == tensor_fingerprint(torch.ones(2))


@pytest.mark.gpu
def test_the_device_does_not_matter() -> None:
    if not torch.accelerator.is_available():
        pytest.skip("there is no accelerator")
    tensor = torch.randn(3000, 1001)
    device = torch.accelerator.current_accelerator()
    assert tensor_fingerprint(tensor.to(device).T) == tensor_fingerprint(tensor.T)


def test_a_checkpoint_s_fingerprint_does_not_depend_on_the_format_or_the_order(
    tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    save_safetensors(tmp_path / "a.safetensors", weights)
    save_torch(tmp_path / "b.ckpt", {"model_state_dict": dict(reversed(weights.items()))})
    reports: list[tuple[int, int, str]] = []
    with open_checkpoint(tmp_path / "a.safetensors") as a, open_checkpoint(tmp_path / "b.ckpt") as b:
        assert checkpoint_fingerprint(a, lambda *report: reports.append(report)) == checkpoint_fingerprint(b)
    assert reports[0][:2] == (0, len(weights))
    assert reports[-1] == (len(weights), len(weights), "")


def test_a_checkpoint_s_fingerprint_depends_on_keys_and_values(tmp_path: Path) -> None:
    found = set()
    for tensors in ({"a": torch.zeros(1)}, {"b": torch.zeros(1)}, {"a": torch.ones(1)}, {}):
        save_safetensors(tmp_path / "x.safetensors", tensors)
        with open_checkpoint(tmp_path / "x.safetensors") as checkpoint:
            found.add(checkpoint_fingerprint(checkpoint))
    assert len(found) == 4


def test_file_sha256_is_that_of_hashlib(tmp_path: Path) -> None:
    content = bytes(range(256)) * 20_000
    (tmp_path / "x.bin").write_bytes(content)
    assert file_sha256(tmp_path / "x.bin") == hashlib.sha256(content).hexdigest()


def test_a_file_that_cannot_be_read_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="none: cannot be read"):
        file_sha256(tmp_path / "none")
