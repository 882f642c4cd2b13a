from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL

from sigmascope.pipeline.peak_prediction import (
    Experience,
    Kind,
    Planned,
    Prediction,
    dry_run,
    fits,
    predict_peak,
)
from sigmascope.pipeline.tile_plan import plan
from sigmascope.records.latents import Direction
from sigmascope.records.memory import AcceleratorMemory, MemorySnapshot

MIB = 1024 * 1024
PICTURE = Planned((1, 3, 256, 256))


@pytest.fixture(scope="module")
def vae() -> Any:
    return AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
    ).eval()


def known(vae: object, wanted: Planned, experience: Experience | None = None) -> int:
    found = predict_peak(vae, wanted, experience).bytes
    assert found is not None
    return found


def test_it_is_the_dry_run_and_a_copy_of_the_input(vae: Any) -> None:
    counted = dry_run(vae, PICTURE.shape, "encoding")
    found = predict_peak(vae, PICTURE)
    assert found.bytes == counted.peak_bytes + 3 * 256 * 256 * 4
    assert found.tensor_bytes == counted.tensor_bytes + 3 * 256 * 256 * 4
    assert found.basis == "config"


def test_four_times_the_pixels_take_four_times_the_memory(vae: Any) -> None:
    larger = replace(PICTURE, shape=(1, 3, 512, 512))
    assert known(vae, larger) / known(vae, PICTURE) == pytest.approx(4, rel=0.01)


def test_tiles_take_one_tile_and_the_output(vae: Any) -> None:
    tiled = replace(PICTURE, strategy="tiled", tile=plan(256, 256, 64, 16, 2))
    sums = 8 * 128 * 128 * 4  # mean and log-variance of 4 channels, in float32
    assert known(vae, tiled) == known(vae, replace(PICTURE, shape=(1, 3, 64, 64))) + sums


@pytest.mark.parametrize("direction", ["encoding", "decoding"])
def test_tiles_of_half_a_side_take_under_a_third_of_a_stable_diffusion_vaes_direct_way(
    direction: Direction,
) -> None:
    with torch.device("meta"):
        full = AutoencoderKL(
            block_out_channels=(128, 256, 512, 512),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=2,
        )
    direct = Planned((1, 3, 1024, 1024) if direction == "encoding" else (1, 4, 128, 128), direction)
    tiled = replace(direct, strategy="tiled", tile=plan(1024, 1024, 512, 128, 8))
    assert known(full, tiled) < known(full, direct) / 3


def test_tiles_of_latents_are_in_latent_elements(vae: Any) -> None:
    wanted = Planned((1, 4, 128, 128), "decoding", "tiled", plan(256, 256, 64, 16, 2))
    assert wanted.part == (1, 4, 32, 32)
    assert known(vae, wanted) > 3 * 256 * 256 * 4


def test_pictures_of_a_batch_are_tiled_one_by_one(vae: Any) -> None:
    tiled = replace(PICTURE, strategy="tiled", tile=plan(256, 256, 64, 16, 2))
    more = known(vae, replace(tiled, shape=(3, 3, 256, 256))) - known(vae, tiled)
    assert more == 3 * 8 * 128 * 128 * 4


def test_weights_that_move_are_added(vae: Any) -> None:
    moving = replace(PICTURE, strategy="cpu", moved_weights_bytes=1000)
    found = predict_peak(vae, moving)
    assert (found.bytes, found.weights_bytes) == (known(vae, PICTURE) + 1000, 1000)


def test_what_is_no_module_is_unknown_with_the_reason() -> None:
    found = predict_peak(object(), PICTURE)
    assert found.bytes is None
    assert "not a module" in found.unavailable["bytes"]


def test_comfyuis_own_estimate_serves_where_layers_cannot_be_run() -> None:
    theirs = SimpleNamespace(
        first_stage_model=None,
        vae_dtype=torch.float16,
        downscale_ratio=8,
        memory_used_encode=lambda shape, dtype: 1767 * shape[2] * shape[3] * dtype.itemsize,
    )
    found = predict_peak(theirs, PICTURE)
    assert (found.bytes, found.basis) == (1767 * 256 * 256 * 2, "config")
    assert "tensor_bytes" in found.unavailable


def test_past_runs_correct_what_was_counted(vae: Any) -> None:
    past = Experience({Kind("AutoencoderKL", "encoding", "direct", "cuda"): (1.5,)})
    found = predict_peak(vae, replace(PICTURE, device_type="cuda"), past)
    assert (found.bytes, found.basis) == (round(1.5 * known(vae, PICTURE)), "learned")
    assert predict_peak(vae, PICTURE, past).basis == "config"


def test_past_runs_tell_of_vaes_that_tell_nothing() -> None:
    past = Experience(rates={Kind("object", "encoding", "direct", "cpu"): (10.0,)})
    assert known(object(), PICTURE, past) == 10 * 3 * 256 * 256


def test_a_peak_fits_with_a_quarter_to_spare_in_ram() -> None:
    expected = Prediction(100 * MIB, "config")
    assert fits(expected, MemorySnapshot(ram_available_bytes=125 * MIB))[0]
    assert fits(expected, MemorySnapshot(ram_available_bytes=124 * MIB)) == (
        False,
        "A peak of 100 MB is expected (config); only 124 MB of RAM are free.",
    )


def test_what_the_allocator_holds_unused_is_free_on_a_device() -> None:
    there = AcceleratorMemory("cuda:0", 100 * MIB, 160 * MIB, free_bytes=50 * MIB)
    memory = MemorySnapshot(accelerators=(there,))
    assert fits(Prediction(100 * MIB, "config"), memory, "cuda:0")[0]
    assert not fits(Prediction(101 * MIB, "config"), memory, "cuda:0")[0]


def test_a_device_without_a_number_is_the_current_one() -> None:
    there = AcceleratorMemory("cuda:1", 0, 0, free_bytes=50 * MIB)
    memory = MemorySnapshot(accelerators=(there,), current_device="cuda:1")
    assert not fits(Prediction(100 * MIB, "config"), memory, "cuda")[0]


def test_a_shape_without_all_axes_is_unknown_with_the_reason(vae: Any) -> None:
    found = predict_peak(vae, Planned((256, 256)), Experience())
    assert found.unavailable["bytes"] == "a shape of 2 axes does not have batch, channels, height and width"


def test_what_is_unknown_is_no_reason_to_skip() -> None:
    unknown = Prediction(unavailable={"bytes": "no config"})
    assert fits(unknown, MemorySnapshot()) == (True, "Its peak could not be predicted: no config.")
    room, reason = fits(Prediction(100, "config"), MemorySnapshot(), "cuda:0")
    assert room
    assert "could not be read" in reason
