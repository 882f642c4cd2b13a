"""LoRAs merged into quantised checkpoints: what the gguf package and PyTorch read from the written files, in float64."""

import json
from pathlib import Path
from typing import Any

import diffusers
import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cli.lora.conftest import Terminal, terminal
from tests.lora.pairs.test_mixed_forms import as_gguf, in_original_form
from torch import Tensor

from sigmascope.checkpoints import open_checkpoint, safetensors
from sigmascope.errors import CheckpointError, ConfigError, NonFiniteError, WriteError
from sigmascope.lora.checkpoint_merge import CheckpointMergeReport, merge_into_checkpoint
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.writer import save_lora

__all__ = ["terminal"]  # a fixture
LAYER, OTHER = "denoiser.mid_block.proj_in", "denoiser.mid_block.proj_out"
ROWS, COLUMNS = 160, 256
KINDS: Any = gguf.GGMLQuantizationType
WRITTEN = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16", "F32")


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    return write_lora(tmp_path / "lora.safetensors")


def factors(strength: float = 0.05) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    up, down = torch.randn(ROWS, 4, generator=generator), torch.randn(4, COLUMNS, generator=generator)
    return up * strength, down


def write_lora(path: Path, strength: float = 0.05) -> Path:
    up, down = factors(strength)
    save_lora(path, LoraFile({LAYER: LoraFactors(up, down, 4.0, (ROWS, COLUMNS))}))
    return path


def change(strength: float = 0.05) -> np.ndarray:
    up, down = factors(strength)
    wanted: np.ndarray = (up.double() @ down.double()).numpy()
    return wanted


def weights(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((ROWS, COLUMNS)).astype(np.float32)


def write_gguf(path: Path, kind: str) -> Path:
    """Two layers of one type, a vector, and fields of several types, one of them longer than is kept of an array."""
    writer = gguf.GGUFWriter(path, "flux")
    writer.add_array("tokenizer.list", [f"word {number}" for number in range(200)])
    writer.add_float32("a.number", 0.1)
    writer.add_quantization_version(2)
    for name, seed in ((LAYER, 0), (OTHER, 1)):
        if kind.endswith("_K"):
            _, size = gguf.GGML_QUANT_SIZES[KINDS[kind]]
            codes = np.random.default_rng(seed).integers(
                0, 256, (ROWS, COLUMNS // 256 * size), dtype=np.uint8
            )
            # Scale and minimum are first in Q4_K; in Q6_K the scale is last, and it has no minimum.
            place, scale = (slice(0, 4), 0.01) if kind == "Q4_K" else (slice(-2, None), 1e-4)
            codes.reshape(-1, size)[:, place] = np.resize(
                np.array([scale], dtype=np.float16).view(np.uint8), place.stop or 2
            )
        else:
            codes = gguf.quants.quantize(weights(seed), KINDS[kind])
        writer.add_tensor(f"{name}.weight", codes, raw_dtype=KINDS[kind])
        writer.add_tensor(f"{name}.bias", np.arange(5, dtype=np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return path


def read_gguf(path: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def numbers(tensor: Any) -> np.ndarray:
    read: np.ndarray = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
    return read.reshape(ROWS, COLUMNS)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def check_arrival(
    report: CheckpointMergeReport, before: np.ndarray, after: np.ndarray, wanted: np.ndarray
) -> None:
    real, size = after - before, float((wanted**2).sum())
    share = float((real * wanted).sum()) / size
    noise = float(np.linalg.norm(real - share * wanted)) / size**0.5
    assert report.arrival.share == pytest.approx(share, abs=1e-5)
    assert report.arrival.noise == pytest.approx(noise, abs=1e-4)
    (tensor,) = report.tensors
    assert tensor.lost_norm == pytest.approx(np.linalg.norm(real - wanted), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("kind", WRITTEN)
def test_the_sum_is_what_the_gguf_package_reads(kind: str, lora: Path, tmp_path: Path) -> None:
    base = write_gguf(tmp_path / "base.gguf", kind)
    report = merge_into_checkpoint([lora], base, tmp_path / "merged.gguf")
    old, new = read_gguf(base), read_gguf(tmp_path / "merged.gguf")
    before, after = numbers(old[f"{LAYER}.weight"]), numbers(new[f"{LAYER}.weight"])
    assert new[f"{LAYER}.weight"].tensor_type == KINDS[kind]
    wanted = gguf.quants.quantize((before + change()).astype(np.float32), KINDS[kind])
    again = gguf.quants.dequantize(wanted, KINDS[kind]).reshape(ROWS, COLUMNS)
    # A float32 sum is off by its last bit, and then a code by one.
    assert np.mean(np.abs(again - after) > 1e-6) < 0.001
    check_arrival(report, before, after, change())
    assert report.copied == 3
    assert report.stored_otherwise == ()


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K", "BF16"])
def test_other_tensors_and_all_fields_of_a_gguf_file_stay_byte_for_byte(
    kind: str, lora: Path, tmp_path: Path
) -> None:
    base = write_gguf(tmp_path / "base.gguf", kind)
    merge_into_checkpoint([lora], base, tmp_path / "merged.gguf")
    merge_into_checkpoint([lora], tmp_path / "merged.gguf", tmp_path / "twice.gguf")
    old = gguf.GGUFReader(base)
    for name in ("merged.gguf", "twice.gguf"):
        new = gguf.GGUFReader(tmp_path / name)
        assert [tensor.name for tensor in new.tensors] == [tensor.name for tensor in old.tensors]
        for one, other in zip(old.tensors, new.tensors, strict=True):
            assert list(one.shape) == list(other.shape)
            if one.name != f"{LAYER}.weight":
                assert bytes(one.data) == bytes(other.data)
                assert one.tensor_type == other.tensor_type
        for key, field in old.fields.items():
            if not key.startswith("GGUF."):
                assert [bytes(part) for part in field.parts] == [
                    bytes(part) for part in new.fields[key].parts
                ]
        assert "lora.safetensors" in new.fields["sigmascope.merged_loras"].contents()


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_a_type_that_is_only_read_becomes_q8_0_and_says_so(kind: str, lora: Path, tmp_path: Path) -> None:
    base = write_gguf(tmp_path / "base.gguf", kind)
    report = merge_into_checkpoint([lora], base, tmp_path / "merged.gguf")
    old, new = read_gguf(base), read_gguf(tmp_path / "merged.gguf")
    assert new[f"{LAYER}.weight"].tensor_type == KINDS.Q8_0
    assert new[f"{OTHER}.weight"].tensor_type == KINDS[kind]
    check_arrival(report, numbers(old[f"{LAYER}.weight"]), numbers(new[f"{LAYER}.weight"]), change())
    (finding,) = [one for one in report.findings if one.id == "lora.stored_otherwise"]
    assert finding.evidence["added_bytes"] == new[f"{LAYER}.weight"].n_bytes - old[f"{LAYER}.weight"].n_bytes
    assert f"GGUF {kind}" in finding.message


def in_fp8(kind: str, scale: str, base: np.ndarray, room: float) -> dict[str, Tensor]:
    """The codes and scale of a weight; `room` is how much larger numbers the scale allows."""
    dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    limit = 127.0 if kind == "int8" else 448.0
    weight = torch.from_numpy(base)
    if scale == "tensor":
        step = weight.abs().amax() * room / limit
    elif scale == "channel":
        step = weight.abs().amax(1, keepdim=True) * room / limit
    else:
        blocks = torch.nn.functional.pad(weight, (0, 0, 0, -ROWS % 128)).reshape(-1, 128, COLUMNS // 128, 128)
        step = blocks.abs().amax((1, 3)) * room / limit
    whole = step.repeat_interleave(128, 0)[:ROWS].repeat_interleave(128, 1) if scale == "blocks" else step
    codes = weight / whole
    return {
        f"{LAYER}.weight": (codes.round() if kind == "int8" else codes).to(dtype),
        f"{LAYER}.weight_scale": step,
    }


def decoded(state: dict[str, Tensor]) -> np.ndarray:
    step = state[f"{LAYER}.weight_scale"].double()
    if step.ndim == 2 and step.shape[1] > 1:
        step = step.repeat_interleave(128, 0)[:ROWS].repeat_interleave(128, 1)
    read: np.ndarray = (state[f"{LAYER}.weight"].double() * step).numpy()
    return read


@pytest.mark.parametrize("scale", ["tensor", "channel", "blocks"])
@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("room", [1.0, 3.0], ids=["grows", "fits"])
def test_a_scale_is_kept_unless_the_sum_grows_beyond_it(
    kind: str, scale: str, room: float, lora: Path, tmp_path: Path
) -> None:
    state = in_fp8(kind, scale, weights(), room)
    state |= {
        "denoiser.conv_in.weight": torch.randn(4, 4, 3, 3),
        "scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn),
    }
    save_file(state, tmp_path / "base.safetensors", {"made": "here"})
    report = merge_into_checkpoint([lora], tmp_path / "base.safetensors", tmp_path / "merged.safetensors")
    after = load_file(tmp_path / "merged.safetensors")
    assert after.keys() == state.keys()
    for key in ("denoiser.conv_in.weight", "scaled_fp8"):
        assert same_bits(after[key], state[key])
    total = torch.from_numpy(decoded(state) + change())
    assert torch.equal(after[f"{LAYER}.weight_scale"], state[f"{LAYER}.weight_scale"]) == (room > 1.0)
    assert report.tensors[0].has_new_scale == (room == 1.0)
    step = torch.from_numpy(np.abs(total.numpy())) / 8 + after[f"{LAYER}.weight_scale"].amax()
    assert bool((torch.from_numpy(decoded(after)) - total).abs().le(step).all())
    check_arrival(report, decoded(state), decoded(after), change())


def test_a_change_of_zero_keeps_every_code(tmp_path: Path) -> None:
    state = in_fp8("fp8", "channel", weights(), 1.0)
    save_file(state, tmp_path / "base.safetensors")
    write_lora(tmp_path / "zero.safetensors", 0.0)
    merge_into_checkpoint(
        [tmp_path / "zero.safetensors"], tmp_path / "base.safetensors", tmp_path / "merged.safetensors"
    )
    after = load_file(tmp_path / "merged.safetensors")
    assert all(same_bits(after[key], value) for key, value in state.items())


def test_8_bit_floats_without_a_scale_are_rounded_to_the_nearest(lora: Path, tmp_path: Path) -> None:
    state = {f"{LAYER}.weight": torch.from_numpy(weights()).to(torch.float8_e4m3fn)}
    save_file(state, tmp_path / "base.safetensors")
    report = merge_into_checkpoint([lora], tmp_path / "base.safetensors", tmp_path / "merged.safetensors")
    before = state[f"{LAYER}.weight"].double()
    after = load_file(tmp_path / "merged.safetensors")[f"{LAYER}.weight"]
    assert torch.equal(
        after.float(), (before + torch.from_numpy(change())).float().to(torch.float8_e4m3fn).float()
    )
    check_arrival(report, before.numpy(), after.double().numpy(), change())


def test_a_weak_change_is_a_finding_in_the_report_and_in_json(tmp_path: Path, terminal: Terminal) -> None:
    base = write_gguf(tmp_path / "base.gguf", "Q4_0")
    lora = write_lora(tmp_path / "weak.safetensors", 1e-4)
    arguments = ["lora", "merge", lora, "--into", base, "--save_to", tmp_path / "merged.gguf"]
    report = json.loads(terminal(*arguments, "--json").out)
    assert "lora_arrives_weak" in [finding["id"] for finding in report["findings"]]
    assert report["share"] < 0.8
    assert report["tensors"][0]["stored"] == "GGUF Q4_0"
    shown = terminal(*arguments).out
    assert "Arrives" in shown
    assert "GGUF Q4_0" in shown


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_an_interrupted_merge_leaves_nothing_and_the_old_file(kind: str, lora: Path, tmp_path: Path) -> None:
    base = tmp_path / f"base.{kind}"
    if kind == "gguf":
        write_gguf(base, "Q8_0")
    else:
        save_file(in_fp8("fp8", "tensor", weights(), 1.0) | {"denoiser.a.bias": torch.ones(2)}, base)
    target = tmp_path / f"merged.{kind}"
    target.write_bytes(b"old")
    before = sorted(tmp_path.iterdir())

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_into_checkpoint([lora], base, target, progress=stop)
    assert sorted(tmp_path.iterdir()) == before
    assert target.read_bytes() == b"old"


def test_a_disk_without_room_is_an_error_before_anything_is_written(
    lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_gguf(tmp_path / "base.gguf", "Q6_K")
    room = base.stat().st_size  # enough for a copy, and not for Q8_0
    monkeypatch.setattr(safetensors, "free_bytes", lambda folder: room)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(WriteError, match="the disk is full"):
        merge_into_checkpoint([lora], base, tmp_path / "merged.gguf")
    assert sorted(tmp_path.iterdir()) == before


def test_a_sum_beyond_the_type_is_refused(tmp_path: Path) -> None:
    base = write_gguf(tmp_path / "base.gguf", "Q8_0")
    lora = write_lora(tmp_path / "strong.safetensors", 1e8)
    with pytest.raises(NonFiniteError, match="would hold NaN or Inf in GGUF Q8_0"):
        merge_into_checkpoint([lora], base, tmp_path / "merged.gguf")
    assert not (tmp_path / "merged.gguf").exists()


def test_a_gguf_file_is_written_under_a_name_of_its_kind(lora: Path, tmp_path: Path) -> None:
    base = write_gguf(tmp_path / "base.gguf", "Q8_0")
    with pytest.raises(ConfigError, match="is written as GGUF") as caught:
        merge_into_checkpoint([lora], base, tmp_path / "merged.safetensors")
    assert caught.value.hint == "Name it merged.gguf."


def test_a_changed_weight_that_cannot_be_stored_is_refused_by_its_name(lora: Path, tmp_path: Path) -> None:
    state = {
        f"{LAYER}.weight": torch.zeros(ROWS * COLUMNS // 2, 1, dtype=torch.uint8),
        f"{LAYER}.weight.absmax": torch.ones(ROWS * COLUMNS // 64),
        f"{LAYER}.weight.quant_map": torch.linspace(-1, 1, 16),
        f"{LAYER}.weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(
                json.dumps(
                    {"shape": [ROWS, COLUMNS], "blocksize": 64, "dtype": "bfloat16", "quant_type": "nf4"}
                ).encode()
            ),
            dtype=torch.uint8,
        ),
    }
    save_file(state, tmp_path / "nf4.safetensors")
    with open_checkpoint(tmp_path / "nf4.safetensors") as checkpoint:
        assert checkpoint.info(f"{LAYER}.weight").shape == (ROWS, COLUMNS)
    with pytest.raises(CheckpointError, match=rf"{LAYER}\.weight.*NF4"):
        merge_into_checkpoint([lora], tmp_path / "nf4.safetensors", tmp_path / "merged.safetensors")


def test_an_unchanged_part_keeps_its_quantisation(lora: Path, tmp_path: Path) -> None:
    """A file of two ways of storing: only the changed weight is stored anew."""
    state = in_fp8("fp8", "tensor", weights(), 1.0)
    other = {key.replace(LAYER, OTHER): value.clone() for key, value in state.items()}
    save_file(state | other, tmp_path / "base.safetensors")
    report = merge_into_checkpoint([lora], tmp_path / "base.safetensors", tmp_path / "merged.safetensors")
    after = load_file(tmp_path / "merged.safetensors")
    assert all(same_bits(after[key], value) for key, value in other.items())
    assert report.copied == 2


@pytest.mark.slow
def test_diffusers_runs_a_merged_gguf_file_as_the_merged_float_model(tmp_path: Path) -> None:
    """The usual case: a LoRA in diffusers' names, and WAN in its original names as GGUF."""
    model, prompt = diffusers.WanTransformer3DModel, torch.randn(1, 4, 256)
    torch.manual_seed(0)
    whole: Any = model(
        num_layers=1, attention_head_dim=64, num_attention_heads=4, text_dim=256, ffn_dim=512, freq_dim=64, in_channels=4,
        out_channels=4,
    )  # fmt: skip
    whole.save_pretrained(tmp_path / "model")
    state = {key: value.detach().clone() for key, value in whole.state_dict().items()}
    base = as_gguf(tmp_path / "base.gguf", in_original_form("wan", state), "Q8_0")
    tensors: dict[str, Tensor] = {}
    for layer in ("blocks.0.attn1.to_q", "blocks.0.attn2.to_k", "blocks.0.ffn.net.0.proj"):
        weight = whole.get_submodule(layer).weight
        up, down = (0.1 * torch.randn(size) for size in ((weight.shape[0], 4), (4, weight.shape[1])))
        tensors |= {f"transformer.{layer}.lora_A.weight": down, f"transformer.{layer}.lora_B.weight": up}
        weight.data += up @ down
    save_file(tensors, tmp_path / "lora.safetensors")
    merge_into_checkpoint([tmp_path / "lora.safetensors"], base, tmp_path / "merged.gguf")
    quantised = diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32)
    how: dict[str, Any] = {"config": str(tmp_path / "model"), "quantization_config": quantised}
    inputs = {"timestep": torch.tensor([3]), "encoder_hidden_states": prompt, "return_dict": False}
    latents = torch.randn(1, 4, 1, 8, 8)
    with torch.no_grad():
        (wanted,) = whole(latents, **inputs)
        (unmerged,), (merged,) = (
            model.from_single_file(str(file), torch_dtype=torch.float32, **how)(latents, **inputs)
            for file in (base, tmp_path / "merged.gguf")
        )
    assert (merged - wanted).norm() < 0.2 * (unmerged - wanted).norm()
