"""Reading into memory that is used again and again."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sigmascope.checkpoints import Checkpoint, open_checkpoint
from sigmascope.errors import CheckpointError, ConfigError

Same = Callable[[Tensor, Tensor], bool]


@pytest.fixture(params=["safetensors", "sharded", "pickle"])
def opened(request: pytest.FixtureRequest, weights: dict[str, Tensor], tmp_path: Path) -> Checkpoint:
    whole = {name: tensor.contiguous() for name, tensor in weights.items()}
    if request.param == "pickle":
        torch.save(weights, tmp_path / "model.ckpt")
        return open_checkpoint(tmp_path / "model.ckpt")
    if request.param == "safetensors":
        save_file(whole, tmp_path / "model.safetensors")
        return open_checkpoint(tmp_path / "model.safetensors")
    names = list(whole)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: whole[name] for name in part}, tmp_path / f"part{number}.safetensors")
    weight_map = {name: f"part{index % 2}.safetensors" for index, name in enumerate(names)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return open_checkpoint(index)


def test_the_tensor_is_the_one_that_is_read_anew(
    opened: Checkpoint, weights: dict[str, Tensor], same_bytes: Same
) -> None:
    buffer = torch.full((4096,), 255, dtype=torch.uint8)
    with opened as checkpoint:
        for name, expected in weights.items():
            assert same_bytes(checkpoint.tensor_into(name, buffer), expected)


def test_the_tensor_lies_in_the_buffer(opened: Checkpoint) -> None:
    buffer = torch.zeros(4096, dtype=torch.uint8)
    with opened as checkpoint:
        tensor = checkpoint.tensor_into("denoiser.conv_in.weight", buffer)
    assert tensor.data_ptr() == buffer.data_ptr()


def test_a_piece_of_a_buffer_will_do(
    opened: Checkpoint, weights: dict[str, Tensor], same_bytes: Same
) -> None:
    buffer = torch.zeros(4096, dtype=torch.uint8)
    with opened as checkpoint:
        tensor = checkpoint.tensor_into("vae.scale", buffer[64:72])
    assert same_bytes(tensor, weights["vae.scale"])


@pytest.mark.parametrize(
    "buffer",
    [
        torch.zeros(4096),
        torch.zeros(64, 64, dtype=torch.uint8),
        torch.zeros(8192, dtype=torch.uint8)[::2],
        torch.zeros(4096, dtype=torch.uint8)[4:],
        torch.zeros(4096, dtype=torch.uint8, device="meta"),
    ],
)
def test_a_buffer_of_another_kind_is_refused(opened: Checkpoint, buffer: Tensor) -> None:
    with opened as checkpoint, pytest.raises(ConfigError, match="cannot take a tensor's bytes"):
        checkpoint.tensor_into("vae.scale", buffer)


def test_a_buffer_that_is_too_small_is_refused_with_both_sizes(opened: Checkpoint) -> None:
    with (
        opened as checkpoint,
        pytest.raises(ConfigError, match=r"vae\.scale takes 8 bytes at once, the buffer has 7"),
    ):
        checkpoint.tensor_into("vae.scale", torch.zeros(7, dtype=torch.uint8))


def test_a_closed_checkpoint_says_so(opened: Checkpoint) -> None:
    opened.close()
    with pytest.raises(CheckpointError, match="closed already"):
        opened.tensor_into("vae.scale", torch.zeros(8, dtype=torch.uint8))


@pytest.mark.parametrize("size", [8, 24, 4096])
def test_pieces_put_together_are_the_tensor(
    opened: Checkpoint, weights: dict[str, Tensor], same_bytes: Same, size: int
) -> None:
    buffer = torch.zeros(size, dtype=torch.uint8)
    with opened as checkpoint:
        for name, expected in weights.items():
            pieces = [piece.clone() for piece in checkpoint.pieces(name, buffer)]
            assert all(piece.numel() * piece.element_size() <= size for piece in pieces)
            whole = torch.cat(pieces) if pieces else expected.new_empty(0)
            assert same_bytes(whole.reshape(expected.shape), expected)


def test_a_buffer_that_holds_no_piece_is_refused(opened: Checkpoint) -> None:
    with opened as checkpoint, pytest.raises(ConfigError, match="takes 8 bytes at once, the buffer has 4"):
        list(checkpoint.pieces("vae.scale", torch.zeros(4, dtype=torch.uint8)))
