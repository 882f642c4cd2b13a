import struct
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file

from sigmascope import load_tensors, save_tensors
from sigmascope.checkpoints.safetensors import TORCH_DTYPES
from sigmascope.checkpoints.tensor_dumps import open_tensors, to_numpy
from sigmascope.errors import CheckpointError, ConfigError, WriteError
from sigmascope.records.prompts import prompt_sha256

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
NOT_IN_NUMPY = sorted(code for code in TORCH_DTYPES if code.startswith(("BF16", "F8", "F4")))
PROMPT = "a vermilion macaw, studio light"


def of_any_bits(code: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    dtype = TORCH_DTYPES[code]
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.reshape(-1).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@settings(max_examples=60, deadline=None)
@given(code=st.sampled_from(sorted(TORCH_DTYPES)), shape=SHAPES, seed=st.integers(0, 2**31))
def test_every_dtype_comes_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, code: str, shape: tuple[int, ...], seed: int
) -> None:
    path = tmp_path_factory.mktemp("dump") / "x.safetensors"
    tensor = of_any_bits(code, shape or (() if code != "F4" else (1,)), seed)
    save_tensors(path, {"x": tensor})
    found = load_tensors(path)["x"]
    assert (found.dtype, found.shape, bits(found)) == (tensor.dtype, tensor.shape, bits(tensor))
    assert load_tensors(path).metadata.tensors["x"].dtype == str(tensor.dtype).removeprefix("torch.")


@settings(max_examples=60, deadline=None)
@given(code=st.sampled_from(sorted(TORCH_DTYPES)), shape=SHAPES, seed=st.integers(0, 2**31))
def test_every_dtype_becomes_an_array(code: str, shape: tuple[int, ...], seed: int) -> None:
    tensor = of_any_bits(code, shape or (1,), seed)
    raw = to_numpy(tensor, "bits")
    assert raw.tobytes() == bits(tensor)
    assert raw.shape == tuple(tensor.shape)
    if code not in NOT_IN_NUMPY:
        assert raw.dtype.name == str(tensor.dtype).removeprefix("torch.")


def test_bf16_becomes_the_float32_of_the_same_number() -> None:
    codes = np.arange(2**16, dtype=np.uint16)
    ours = to_numpy(torch.from_numpy(codes).view(torch.bfloat16))
    # A bf16 is the upper half of a float32.
    np.testing.assert_array_equal(ours, (codes.astype(np.uint32) << 16).view(np.float32))


def test_fp8_becomes_float32_by_the_definition_of_e4m3() -> None:
    ours = to_numpy(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn))
    for code, value in enumerate(ours):
        sign, exponent, mantissa = -1 if code & 0x80 else 1, (code >> 3) & 15, code & 7
        if exponent == 15 and mantissa == 7:
            assert np.isnan(value)
        else:
            whole = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
            assert value == sign * whole


def test_fp4_is_unpacked_low_half_first() -> None:
    # OCP Microscaling Formats 1.0: code 7 is 6.0, code 9 is -0.5.
    ours = to_numpy(torch.tensor([[0x97]], dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    assert ours.tolist() == [[6.0, -0.5]]


def test_a_strided_bf16_tensor_becomes_an_array() -> None:
    tensor = torch.arange(6.0).bfloat16().view(2, 3).T
    assert to_numpy(tensor).tolist() == [[0, 3], [1, 4], [2, 5]]
    assert to_numpy(tensor, "bits").shape == (3, 2)


def test_ml_dtypes_is_asked_for_by_name() -> None:
    tensor = torch.ones(2, dtype=torch.bfloat16)
    if (found := pytest.importorskip("ml_dtypes", reason="the package is optional")) is not None:
        assert to_numpy(tensor, "ml_dtypes").dtype == found.bfloat16


def test_a_missing_ml_dtypes_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    with pytest.raises(ConfigError, match="not installed"):
        to_numpy(torch.ones(2, dtype=torch.bfloat16), "ml_dtypes")


def test_the_header_tells_of_the_tensors_and_where_they_come_from(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    conditioning = [[torch.ones(1, 77, 8), {"pooled_output": torch.ones(1, 8), "start_percent": 0.25}]]
    save_tensors(path, {"positive": conditioning}, run_id="r1", encoder="CLIP-L", seed=7, cfg=float("inf"))
    metadata = load_tensors(path).metadata
    assert (metadata.run_id, metadata.encoder) == ("r1", "CLIP-L")
    assert metadata.tensors["positive.0.cond"].shape == (1, 77, 8)
    assert metadata.tensors["positive.0.cond"].device == "cpu"
    assert metadata.metadata == {"seed": 7, "cfg": float("inf")}
    assert metadata.conditioning["positive"][0][1]["start_percent"] == 0.25


@pytest.mark.parametrize("privacy", ["hash", "none"])
def test_the_file_does_not_hold_the_prompt(tmp_path: Path, privacy: Any) -> None:
    path = tmp_path / "x.safetensors"
    nested = {"positive": [[torch.ones(2), {"prompt": PROMPT, "note": f"of {PROMPT}", PROMPT: 1}]]}
    save_tensors(path, nested, prompt=PROMPT, prompt_privacy=privacy, encoder=f"CLIP {PROMPT}", log=[PROMPT])
    raw = path.read_bytes()
    assert PROMPT.encode() not in raw
    assert (prompt_sha256(PROMPT).encode() in raw) == (privacy == "hash")


def test_prompts_are_hashed_unless_asked_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"x": torch.ones(1)}, prompt=PROMPT)
    stored = load_tensors(path).metadata.prompts["prompt"]
    assert (stored.sha256, stored.text) == (prompt_sha256(PROMPT), None)


@pytest.mark.parametrize("prompt", [PROMPT, "", "<b>[red]\x1b[31m\n\0", "猫 ‏קאט 🐈‍⬛ é", "\ud800"])
def test_a_full_prompt_comes_back(tmp_path: Path, prompt: str) -> None:
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"x": torch.ones(1)}, prompt=prompt, prompt_privacy="full")
    assert load_tensors(path).metadata.prompts["prompt"].text == prompt


def test_the_safetensors_library_reads_a_dump(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"x": torch.arange(3)})
    assert load_file(path)["x"].tolist() == [0, 1, 2]


def test_a_file_from_elsewhere_is_read_with_its_own_header(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.ones(2)}, path, {"made": "elsewhere"})
    dump = load_tensors(path)
    assert list(dump) == ["x"]
    assert dump.metadata.header == {"made": "elsewhere"}


def test_numpy_is_given_on_request(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"x": torch.full((2,), 1.5, dtype=torch.bfloat16)})
    assert load_tensors(path, as_numpy=True)["x"].tolist() == [1.5, 1.5]
    assert load_tensors(path, as_numpy="bits")["x"].dtype == np.uint16


def test_an_open_dump_reads_when_it_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"x": torch.ones(2), "y": torch.zeros(2)})
    with open_tensors(path) as dump:
        assert list(dump) == ["x", "y"]
        assert dump["y"].tolist() == [0, 0]
        with pytest.raises(KeyError):
            dump["z"]


def test_the_tensors_are_as_they_were_and_a_gradient_is_left_behind(tmp_path: Path) -> None:
    tensor = torch.ones(2, requires_grad=True)
    save_tensors(tmp_path / "x.safetensors", {"x": tensor * 2})
    assert load_tensors(tmp_path / "x.safetensors")["x"].tolist() == [2, 2]
    assert tensor.grad is None


def test_a_sparse_tensor_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="'x'"):
        save_tensors(tmp_path / "x.safetensors", {"x": torch.eye(2).to_sparse()})
    assert list(tmp_path.iterdir()) == []


def header_replaced(path: Path, old: bytes, new: bytes) -> None:
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = raw[8 : 8 + length].replace(old, new)
    path.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b'"sigmascope_dump":"1"', b'"sigmascope_dump":"9"', "version '9'"),
        (b'\\"dtype\\":', b'\\"dtyp\\":', "header is damaged"),
        (b'"tensors":"{', b'"tensors":"[', "header is damaged"),
        (b'"tensors":', b'"prompt":"{\\"privacy\\":\\"eash\\"}","tensors":', "header is damaged .*eash"),
    ],
)
def test_a_damaged_header_is_one_clear_error(tmp_path: Path, old: bytes, new: bytes, said: str) -> None:
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"x": torch.ones(2)})
    header_replaced(path, old, new)
    with pytest.raises(CheckpointError, match=said):
        load_tensors(path)


@pytest.mark.parametrize("length", [0, 5, 100, -1])
def test_a_cut_dump_is_one_clear_error(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"x": torch.ones(200)})
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        load_tensors(path)
