"""GGUF files, as the gguf package writes them; damaged ones give an error each."""

import random
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import CheckpointError

WEIGHT = "double_blocks.0.img_attn.qkv.weight"


def integers(*shape: int) -> np.ndarray:
    """Numbers that Q8_0 holds exactly: every block of 32 has a largest one of 127, so its scale is 1."""
    numbers = np.random.default_rng(0).integers(-126, 127, shape).astype(np.float32)
    numbers.reshape(-1, 32)[:, 0] = 127
    return numbers


def write(path: Path, *, original_shape: tuple[int, ...] | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "flux")
    writer.add_quantization_version(2)
    if original_shape is not None:
        writer.add_array(f"comfy.gguf.orig_shape.{WEIGHT}", original_shape)
    quantised = gguf.quants.quantize(integers(4, 64), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor(WEIGHT, quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("img_in.bias", np.arange(6, dtype=np.float32))
    writer.add_tensor("img_in.weight", np.arange(6, dtype=np.float16).reshape(2, 3))
    halves = torch.arange(6.0).bfloat16().reshape(3, 2)
    writer.add_tensor(
        "final.weight", halves.view(torch.uint8).numpy(), raw_dtype=gguf.GGMLQuantizationType.BF16
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "flux-Q8_0.gguf")


def test_quantised_weights_come_back_as_numbers_in_pytorch_s_order_of_sizes(file: Path) -> None:
    with open_checkpoint(file) as checkpoint:
        weight = checkpoint.tensor(WEIGHT)
        assert checkpoint.info(WEIGHT).nbytes == weight.numel() * 4
    assert weight.dtype == torch.float32
    assert torch.equal(weight, torch.from_numpy(integers(4, 64)))


def test_plain_tensors_keep_their_types(file: Path) -> None:
    with open_checkpoint(file) as checkpoint:
        assert torch.equal(checkpoint.tensor("img_in.bias"), torch.arange(6.0))
        assert torch.equal(checkpoint.tensor("img_in.weight"), torch.arange(6.0).half().reshape(2, 3))
        assert torch.equal(checkpoint.tensor("final.weight"), torch.arange(6.0).bfloat16().reshape(3, 2))


def test_what_was_dequantised_is_told_and_nothing_else(file: Path) -> None:
    with open_checkpoint(file) as checkpoint:
        assert dict(checkpoint.dequantised) == {WEIGHT: "GGUF Q8_0"}
        assert checkpoint.format == "gguf"
        assert checkpoint.metadata["general.architecture"] == "flux"


def test_a_tensor_is_read_into_a_buffer(file: Path) -> None:
    buffer = torch.zeros(4096, dtype=torch.uint8)
    with open_checkpoint(file) as checkpoint:
        weight = checkpoint.tensor_into(WEIGHT, buffer)
    assert weight.data_ptr() == buffer.data_ptr()
    assert torch.equal(weight, torch.from_numpy(integers(4, 64)))


def test_a_weight_that_was_reshaped_for_the_quantisation_has_its_own_shape_back(tmp_path: Path) -> None:
    with open_checkpoint(write(tmp_path / "x.gguf", original_shape=(16, 4, 2, 2))) as checkpoint:
        weight = checkpoint.tensor(WEIGHT)
    assert torch.equal(weight, torch.from_numpy(integers(4, 64)).reshape(16, 4, 2, 2))


def test_an_original_shape_of_another_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"of shape \(4, 64\) does not hold shape \[4, 4\]"):
        open_checkpoint(write(tmp_path / "x.gguf", original_shape=(4, 4)))


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
def test_every_common_type_gives_the_package_s_own_numbers(tmp_path: Path, kind: str) -> None:
    qtype = gguf.GGMLQuantizationType[kind]
    _, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
    raw = np.random.default_rng(1).integers(0, 120, (3, 2 * block_bytes)).astype(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "flux")
    writer.add_tensor("a.weight", raw, raw_dtype=qtype)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    with open_checkpoint(tmp_path / "x.gguf") as checkpoint:
        found = checkpoint.tensor("a.weight").numpy()
    np.testing.assert_array_equal(found, gguf.quants.dequantize(raw, qtype))


def test_many_blocks_are_put_together_in_order(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sigmascope.checkpoints.gguf._BLOCKS_PER_CALL", 3)
    with open_checkpoint(file) as checkpoint:
        assert torch.equal(checkpoint.tensor(WEIGHT), torch.from_numpy(integers(4, 64)))


def test_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf")
    content = bytearray(path.read_bytes())
    # Name, number of sizes, two sizes of 8 bytes, then the type.
    place = content.index(WEIGHT.encode()) + len(WEIGHT) + 4 + 16
    content[place] = gguf.GGMLQuantizationType.Q8_K
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="has the type Q8_K, which Sigmascope cannot read"):
        open_checkpoint(path)
    with open_checkpoint(path, keep_unread=True) as checkpoint:
        assert checkpoint.info(WEIGHT).shape == (4, 64)
        for read in (checkpoint.tensor, checkpoint.rounding):
            with pytest.raises(CheckpointError, match="has the type Q8_K"):
                read(WEIGHT)


def test_without_the_package_its_installation_is_told(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"pip install .*\[gguf\]"):
        open_checkpoint(file)
    with open_checkpoint(file, keep_unread=True) as checkpoint:
        assert checkpoint.info(WEIGHT).shape == (4, 64)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "IQ4_XS"])
def test_a_type_that_the_package_only_reads_is_not_rounded_to(tmp_path: Path, kind: str) -> None:
    type_ = gguf.GGMLQuantizationType[kind]
    size, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "flux")
    writer.add_tensor(WEIGHT, np.zeros((2, block_bytes), dtype=np.uint8), raw_dtype=type_)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    with open_checkpoint(tmp_path / "x.gguf") as checkpoint:
        assert checkpoint.tensor(WEIGHT).shape == (2, size)
        with pytest.raises(
            CheckpointError, match=f"cannot be stored as {kind}.*the gguf package only reads it"
        ):
            checkpoint.rounding(WEIGHT)
        with pytest.raises(CheckpointError) as raised:
            checkpoint.rounding(WEIGHT)
        assert str(raised.value).count(kind) == 1  # no advice to get a file in the very same type


def test_a_closed_file_says_so(file: Path) -> None:
    checkpoint = open_checkpoint(file)
    checkpoint.close()
    with pytest.raises(CheckpointError, match="closed already"):
        checkpoint.tensor(WEIGHT)


def test_a_file_that_was_cut_anywhere_is_refused(file: Path) -> None:
    content = file.read_bytes()
    end = len(content) - 20  # the last tensor's 12 bytes are padded to 32
    for length in [*range(64), *range(64, end, 37), end - 1]:
        file.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"flux-Q8_0\.gguf: "):
            open_checkpoint(file)


@pytest.mark.parametrize("place", [8, 16])
@pytest.mark.parametrize("count", [2**20, 2**40, 2**63, 2**64 - 1])
def test_counts_that_lie_are_refused(file: Path, place: int, count: int) -> None:
    content = bytearray(file.read_bytes())
    content[place : place + 8] = count.to_bytes(8, "little")
    file.write_bytes(content)
    with pytest.raises(CheckpointError):
        open_checkpoint(file)


@pytest.mark.slow
def test_any_damage_gives_an_error_or_tensors_and_never_a_crash_or_a_hang(file: Path) -> None:
    content = file.read_bytes()
    source = random.Random(0)
    refused = 0
    for _ in range(500):
        damaged = bytearray(content)
        for _ in range(source.choice((1, 1, 2, 8))):
            damaged[source.randrange(700)] = source.randrange(256)
        file.write_bytes(damaged)
        error = error_of(file)
        refused += error is not None
        assert error is None or (error.hint and "\n" not in str(error))
    assert refused > 100


def error_of(path: Path) -> CheckpointError | None:
    try:
        with open_checkpoint(path) as checkpoint:
            shapes = {key: tuple(checkpoint.tensor(key).shape) for key in checkpoint}
    except CheckpointError as error:
        return error
    assert shapes == {key: checkpoint.info(key).shape for key in checkpoint}
    return None


def test_another_version_or_byte_order_is_named(file: Path) -> None:
    content = file.read_bytes()
    for version, message in ((b"\x01\0\0\0", "version 1;"), (b"\0\0\0\x03", "big-endian")):
        file.write_bytes(content[:4] + version + content[8:])
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(file)
