"""Quantised checkpoints: codes with scales are undone, kinds without a reader refused by name or kept unread."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import CheckpointError

FP8 = torch.float8_e4m3fn
State = dict[str, Tensor]


def codes(*shape: int) -> Tensor:
    """Small integers: 8-bit floats hold them exactly."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(0)).to(torch.float32)


@pytest.fixture
def save(tmp_path: Path) -> Callable[[State], Path]:
    def write(state: State) -> Path:
        path = tmp_path / "model.safetensors"
        save_file({key: tensor.contiguous() for key, tensor in state.items()}, path)
        return path

    return write


def comfyui(weight: Tensor, prefix: str = "") -> State:
    return {
        f"{prefix}scaled_fp8": torch.empty(2, dtype=FP8),
        f"{prefix}a.weight": weight.to(FP8),
        f"{prefix}a.scale_weight": torch.tensor([0.25]),
        f"{prefix}a.scale_input": torch.tensor([3.0]),
        f"{prefix}a.bias": torch.ones(4),
    }


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_comfyui_s_scaled_weights_are_multiplied_by_their_scale(
    save: Callable[[State], Path], prefix: str
) -> None:
    weight = codes(4, 6)
    with open_checkpoint(save(comfyui(weight, prefix))) as checkpoint:
        assert set(checkpoint) == {f"{prefix}a.weight", f"{prefix}a.bias"}
        assert torch.equal(checkpoint.tensor(f"{prefix}a.weight"), weight * 0.25)
        assert checkpoint.info(f"{prefix}a.weight").dtype == torch.float32
        assert checkpoint.info(f"{prefix}a.weight").nbytes == 4 * 24
        assert dict(checkpoint.dequantised) == {f"{prefix}a.weight": "float8_e4m3fn scaled per tensor"}
        assert checkpoint.skipped[f"{prefix}a.scale_weight"].startswith("is the scale of")
        assert checkpoint.skipped[f"{prefix}a.scale_input"] == "is a scale of activations, not a weight"
        assert checkpoint.skipped[f"{prefix}scaled_fp8"] == "marks a quantisation and is not a weight"


@pytest.mark.parametrize(
    ("weight_shape", "scale", "how"),
    [
        ((4, 6), torch.tensor(0.5), "per tensor"),
        ((4, 6), torch.tensor([[0.5]]).bfloat16(), "per tensor"),
        ((4, 6), torch.tensor([0.5, 1.0, 2.0, 4.0]), "per channel"),
        ((4, 6), torch.tensor([[0.5], [1.0], [2.0], [4.0]]), "per channel"),
        ((4, 2, 3, 3), torch.tensor([0.5, 1.0, 2.0, 4.0]), "per channel"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_scales_per_tensor_and_per_channel(
    save: Callable[[State], Path], weight_shape: tuple[int, ...], scale: Tensor, how: str, dtype: torch.dtype
) -> None:
    weight = codes(*weight_shape)
    spread = scale.float().reshape(-1, *[1] * (len(weight_shape) - 1))
    with open_checkpoint(save({"a.weight": weight.to(dtype), "a.weight_scale": scale})) as checkpoint:
        assert torch.equal(checkpoint.tensor("a.weight"), weight * spread)
        assert checkpoint.dequantised["a.weight"].endswith(how)


def test_scales_in_blocks(save: Callable[[State], Path]) -> None:
    weight, scale = codes(130, 260), torch.tensor([[1.0, 2.0, 4.0], [0.5, 0.25, 8.0]])
    expected = weight.clone()
    for row in range(2):
        for column in range(3):
            block = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            expected[block] *= scale[row, column]
    with open_checkpoint(save({"a.weight": weight.to(FP8), "a.weight_scale_inv": scale})) as checkpoint:
        assert torch.equal(checkpoint.tensor("a.weight"), expected)


def test_a_dequantised_weight_is_read_into_a_buffer(save: Callable[[State], Path]) -> None:
    weight = codes(4, 6)
    buffer = torch.zeros(4096, dtype=torch.uint8)
    with open_checkpoint(save(comfyui(weight))) as checkpoint:
        tensor = checkpoint.tensor_into("a.weight", buffer)
        assert torch.equal(checkpoint.tensor_into("a.bias", buffer[256:]), torch.ones(4))
    assert tensor.data_ptr() == buffer.data_ptr()
    assert torch.equal(tensor, weight * 0.25)


def test_codes_and_scales_are_given_as_they_are_when_asked_for(save: Callable[[State], Path]) -> None:
    state = comfyui(codes(4, 6))
    with open_checkpoint(save(state), dequantise=False) as checkpoint:
        assert set(checkpoint) == set(state)
        assert checkpoint.tensor("a.weight").dtype == FP8
        assert not checkpoint.dequantised


def test_8_bit_floats_without_a_scale_are_their_own_values(save: Callable[[State], Path]) -> None:
    weight = codes(4, 6)
    with open_checkpoint(save({"a.weight": weight.to(FP8)})) as checkpoint:
        assert torch.equal(checkpoint.tensor("a.weight").float(), weight)
        assert not checkpoint.dequantised


def test_a_parameter_named_as_a_scale_beside_plain_weights_is_a_parameter(
    save: Callable[[State], Path],
) -> None:
    state = {"a.weight": codes(4, 6), "a.weight_scale": torch.ones(4), "b.input_scale": torch.ones(1)}
    with open_checkpoint(save(state)) as checkpoint:
        assert set(checkpoint) == set(state)


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        (["a.W_q", "a.scale", "a.zero"], "HQQ"),
        (["a._weight_qdata", "a._weight_scale"], "torchao"),
        (["a.qweight", "a.wscales", "a.smooth_factor"], "SVDQuant"),
        (["a.qweight", "a.qzeros", "a.scales"], "GPTQ or AWQ"),
        (["a.weight._data", "a.weight._scale"], "optimum-quanto"),
        (["a.weight_packed", "a.weight_scale"], "compressed-tensors"),
    ],
)
def test_other_quantisations_are_refused_by_name(
    save: Callable[[State], Path], keys: list[str], name: str
) -> None:
    path = save({key: torch.zeros(2, 2, dtype=torch.uint8) for key in keys})
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: is quantised by {name}") as caught:
        open_checkpoint(path)
    assert caught.value.hint
    with open_checkpoint(path, dequantise=False) as checkpoint:
        assert set(checkpoint) == set(keys)


@pytest.mark.parametrize(
    ("weight", "scale", "message"),
    [
        (torch.zeros(4, 6, dtype=torch.int16), torch.ones(4, 1), r"a\.weight is int16 with scales"),
        (
            torch.zeros(4, 6, dtype=FP8),
            torch.ones(4, 2),
            r"shape \(4, 2\) does not fit as the scale of a\.weight",
        ),
        (
            torch.zeros(4, 32, dtype=FP8),
            torch.ones(4, 1, dtype=torch.float8_e8m0fnu),
            r"a\.weight_scale of shape \(4, 1\) does not fit as the scale of a\.weight of shape \(4, 32\)",
        ),
    ],
)
def test_scales_that_do_not_fit_are_refused(
    save: Callable[[State], Path], weight: Tensor, scale: Tensor, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(save({"a.weight": weight, "a.weight_scale": scale}))
    with open_checkpoint(save({"a.weight": weight, "a.weight_scale": scale}), keep_unread=True) as checkpoint:
        assert "None" not in checkpoint.dequantised["a.weight"]


def quant_state(**facts: object) -> Tensor:
    return torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)


def comfy_quant(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


@pytest.mark.parametrize("scale", [torch.tensor(0.5), torch.tensor([[0.5], [2.0]])], ids=["tensor", "row"])
def test_int8_is_multiplied_by_its_scale(save: Callable[[State], Path], scale: Tensor) -> None:
    codes = torch.tensor([[-128, 1, 2], [3, 4, 127]], dtype=torch.int8)
    state = {
        "a.weight": codes,
        "a.weight_scale": scale,
        "a.comfy_quant": comfy_quant('{"format": "int8_tensorwise"}'),
    }
    with open_checkpoint(save(state)) as checkpoint:
        assert list(checkpoint) == ["a.weight"]
        assert torch.equal(checkpoint.tensor("a.weight"), codes.float() * scale)


def test_bitsandbytes_codes_are_places_in_a_map(save: Callable[[State], Path]) -> None:
    """Two in a byte, the first above, times the largest magnitude of their block."""
    values = torch.linspace(-1, 1, 16)
    state = {
        "a.weight": torch.tensor([[0x0F], [0x12], [0x3F], [0xF0]], dtype=torch.uint8),
        "a.weight.absmax": torch.tensor([2.0, 10.0]),
        "a.weight.quant_map": values,
        "a.weight.quant_state.bitsandbytes__nf4": quant_state(quant_type="nf4", blocksize=4, shape=[2, 4]),
    }
    with open_checkpoint(save(state)) as checkpoint:
        places = torch.tensor([[0, 15, 1, 2], [3, 15, 15, 0]])
        assert torch.equal(checkpoint.tensor("a.weight"), values[places] * torch.tensor([[2.0], [10.0]]))
        assert dict(checkpoint.dequantised) == {"a.weight": "bitsandbytes NF4"}


def test_bitsandbytes_int8_has_the_largest_magnitude_of_each_row(save: Callable[[State], Path]) -> None:
    """LLM.int8(): the codes of a row are 127ths of it."""
    rows, largest = torch.tensor([[127, -127, 0], [1, 2, 3]], dtype=torch.int8), torch.tensor([2.0, 12.7])
    state = {"a.weight": rows, "a.SCB": largest, "a.weight_format": torch.tensor(0, dtype=torch.uint8)}
    with open_checkpoint(save(state)) as checkpoint:
        assert list(checkpoint) == ["a.weight"]
        expected = torch.tensor([[2.0, -2.0, 0.0], [0.1, 0.2, 0.3]])
        assert torch.allclose(checkpoint.tensor("a.weight"), expected)
        assert dict(checkpoint.dequantised) == {"a.weight": "bitsandbytes int8"}


@pytest.mark.parametrize(
    ("state", "names"),
    [
        ({"a.SCB": torch.ones(5)}, r"a\.SCB of shape \(5,\) does not fit"),
        (
            {"a.weight_format": torch.tensor(0, dtype=torch.uint8)},
            r"a\.SCB, the scale of a\.weight, is missing",
        ),
        (
            {"a.SCB": torch.ones(4), "a.weight_format": torch.tensor(2, dtype=torch.uint8)},
            "in the layout 2 of an old GPU kernel",
        ),
    ],
    ids=["shape", "missing", "layout"],
)
def test_what_is_wrong_with_int8_of_bitsandbytes_names_itself(
    save: Callable[[State], Path], state: State, names: str
) -> None:
    path = save({"a.weight": torch.zeros(4, 6, dtype=torch.int8), **state})
    with pytest.raises(CheckpointError, match=names):
        open_checkpoint(path)
    with open_checkpoint(path, keep_unread=True) as checkpoint:
        assert checkpoint.info("a.weight").shape == (4, 6)


@pytest.mark.parametrize(
    ("state", "names"),
    [
        ({"a.comfy_quant": comfy_quant('{"format": "float8_e4m3fn"}')}, r"a\.weight_scale, .*is missing"),
        (
            {"a.comfy_quant": comfy_quant('{"format": "nvfp4"}'), "a.weight_scale": torch.ones(128, 4)},
            "a.weight is float8_e4m3fn",
        ),
        ({"a.comfy_quant": comfy_quant("nonsense")}, r"a\.comfy_quant' is no JSON text"),
        ({"a.comfy_quant": comfy_quant("{}")}, r"'a\.comfy_quant' gives no format for a\.weight\."),
        ({"a.comfy_quant": comfy_quant('{"format": null}')}, r"'a\.comfy_quant' gives no format"),
        (
            {"a.comfy_quant": comfy_quant('{"format": 3}')},
            r"gives the format 3, which is no name, for a\.weight\.",
        ),
        (
            {"a.comfy_quant": comfy_quant('{"format": "fp2"}')},
            "a.weight is stored in ComfyUI's format 'fp2'",
        ),
        ({"a.weight.absmax": torch.ones(2)}, "a.weight is float8_e4m3fn"),
    ],
    ids=[
        "scale missing",
        "other codes",
        "no text",
        "no format",
        "format null",
        "format no name",
        "unknown format",
        "bitsandbytes",
    ],
)
def test_what_is_wrong_with_a_scale_names_itself(
    save: Callable[[State], Path], state: State, names: str
) -> None:
    path = save({"a.weight": torch.zeros(4, 64, dtype=FP8), **state})
    with pytest.raises(CheckpointError, match=names) as caught:
        open_checkpoint(path)
    assert caught.value.message.count(str(path)) == 1
    next_step = (
        "Use the checkpoint that it was made from" if "fp2" in names else "Download the checkpoint again"
    )
    assert (caught.value.hint or "").startswith(next_step)


@pytest.mark.parametrize(
    ("state", "shape"),
    [
        ({"a.qweight": torch.zeros(6, 4, dtype=torch.int8), "a.wscales": torch.ones(2, 6)}, (6, 8)),
        (
            {
                "a.qweight": torch.zeros(2, 6, dtype=torch.int32),
                "a.qzeros": torch.ones(1),
                "a.scales": torch.ones(1, 6),
            },
            (6, 16),
        ),
        ({"a.weight_packed": torch.zeros(6, 2, dtype=torch.int32)}, (6, 16)),
        (
            {"a.weight": torch.zeros(6, 8, dtype=FP8), "a.comfy_quant": comfy_quant('{"format": "fp2"}')},
            (6, 8),
        ),
        ({"a.W_q": torch.zeros(4, 8, dtype=torch.uint8), "a.shape": torch.tensor([6, 10])}, (6, 10)),
        ({"a._weight_qdata": torch.zeros(6, 8, dtype=torch.int8), "a._weight_scale": torch.ones(6)}, (6, 8)),
    ],
    ids=["SVDQuant", "GPTQ", "compressed-tensors", "unknown format", "HQQ", "torchao"],
)
def test_a_weight_without_a_reader_has_its_name_and_shape_when_asked_for(
    save: Callable[[State], Path], state: State, shape: tuple[int, ...]
) -> None:
    with open_checkpoint(save(state), keep_unread=True) as checkpoint:
        assert checkpoint.info("a.weight").shape == shape
        with pytest.raises(CheckpointError, match="has no reader here"):
            checkpoint.tensor("a.weight")


@pytest.mark.parametrize("shape", [[4, 6], [4, 99999], [-4, -8], ["4", 8], 32])
def test_a_shape_that_the_codes_do_not_hold_is_a_damaged_description(
    save: Callable[[State], Path], shape: object
) -> None:
    facts = {"quant_type": "nf4", "blocksize": 64, "shape": shape}
    state = {
        "a.weight": torch.zeros(16, 1, dtype=torch.uint8),
        "a.weight.absmax": torch.ones(1),
        "a.weight.quant_map": torch.ones(16),
        "a.weight.quant_state.bitsandbytes__nf4": comfy_quant(json.dumps(facts)),
    }
    with open_checkpoint(save(state), keep_unread=True) as checkpoint:
        (why,) = checkpoint.undescribed.values()
        assert f"the shape {shape}, but its codes hold 32 numbers" in why
        with pytest.raises(CheckpointError, match="hold 32 numbers"):
            checkpoint.tensor("a.weight")


@pytest.mark.parametrize(("bias", "rows"), [(100, 100), (112, 112), (95, 112), (None, 112)])
def test_rows_that_fill_a_weight_up_are_not_its_own(
    save: Callable[[State], Path], bias: int | None, rows: int
) -> None:
    """NVFP4 has a multiple of 16. A bias of 95 would have made 96."""
    state = {
        "a.weight": torch.zeros(112, 32, dtype=torch.uint8),
        "a.weight_scale": torch.ones(128, 4).to(FP8),
        "a.weight_scale_2": torch.tensor(1.0),
        "a.comfy_quant": comfy_quant('{"format": "nvfp4"}'),
    }
    state |= {} if bias is None else {"a.bias": torch.zeros(bias)}
    with open_checkpoint(save(state), keep_unread=True) as checkpoint:
        assert checkpoint.info("a.weight").shape == (rows, 64)


@pytest.mark.parametrize("place", ["tensor", "header"])
def test_a_damaged_description_leaves_names_and_shapes(tmp_path: Path, place: str) -> None:
    state = {"a.weight": torch.zeros(6, 8, dtype=FP8)}
    if place == "tensor":
        state["a.comfy_quant"] = comfy_quant("{nonsense")
    metadata = {"_quantization_metadata": "{nonsense"} if place == "header" else None
    save_file(state, tmp_path / "model.safetensors", metadata)
    with pytest.raises(CheckpointError, match="is no JSON text"):
        open_checkpoint(tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path / "model.safetensors", keep_unread=True) as checkpoint:
        assert checkpoint.info("a.weight").shape == (6, 8)
        with pytest.raises(CheckpointError, match="is no JSON text"):
            checkpoint.tensor("a.weight")


def test_a_format_that_the_header_does_not_give_names_the_header(tmp_path: Path) -> None:
    header = {"_quantization_metadata": json.dumps({"layers": {"a": {}}})}
    save_file({"a.weight": torch.zeros(6, 8, dtype=FP8)}, tmp_path / "model.safetensors", header)
    with pytest.raises(
        CheckpointError, match=r"_quantization_metadata in the header gives no format for a\.weight"
    ):
        open_checkpoint(tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path / "model.safetensors", keep_unread=True) as checkpoint:
        assert checkpoint.dequantised == {"a.weight": "unknown"}
