"""Where weights go, and how decoding is made to fit, on devices of any size."""

from dataclasses import replace

from tests.families import make_pipeline
from tests.pipeline.optimized import (
    GIB,
    H100,
    automatic,
    chosen,
    optimizer,
    reason,
    warm_pipeline,
)

from sigmascope.pipeline.optimizer import Hardware


def test_a_device_of_unknown_size_is_said_to_be_unknown() -> None:
    plan = automatic(Hardware("mps")).plan(warm_pipeline("sd15"))
    assert reason(plan, "placement") == "how much memory mps has is not known"
    assert plan.memory.room_mb is None
    assert "room_mb" in plan.memory.unavailable


def _of_mib(count: int) -> Hardware:
    return replace(H100, total_bytes=count * 2**20, free_bytes=count * 2**20)


def test_slicing_is_taken_for_batches_that_do_not_fit() -> None:
    plan = automatic(_of_mib(4), batch_size=8, height=128, width=128, headroom=0.0).plan(
        warm_pipeline("sdxl")
    )
    (choice,) = chosen(plan, "vae_slicing")
    assert choice.necessary


def test_one_image_is_not_sliced() -> None:
    plan = automatic(_of_mib(4), height=128, width=128, headroom=0.0).plan(warm_pipeline("sdxl"))
    assert reason(plan, "vae_slicing") == "one image at a time is planned"


def test_tiling_is_taken_for_an_image_that_does_not_fit() -> None:
    plan = automatic(_of_mib(16), height=512, width=512).plan(warm_pipeline("sdxl"))
    (choice,) = chosen(plan, "vae_tiling")
    assert choice.necessary


def test_weights_stay_on_the_device_where_tiles_make_room() -> None:
    pipeline = warm_pipeline("flux")
    sizes = {"height": 512, "width": 512, "headroom": 0.0}
    plan = automatic(_of_mib(16), **sizes).plan(pipeline)
    assert plan.memory.vae_mb is not None
    assert plan.memory.vae_mb > 16
    assert [choice.options["how"] for choice in chosen(plan, "placement")] == ["device"]
    assert chosen(plan, "vae_tiling")
    without = automatic(_of_mib(16), **sizes, vae_tiling=False).plan(pipeline)
    assert [choice.options["how"] for choice in chosen(without, "placement")] != ["device"]


def test_an_image_that_is_one_tile_is_not_tiled() -> None:
    plan = automatic(H100, height=32, width=32).plan(warm_pipeline("sdxl"))
    assert reason(plan, "vae_tiling") == "an image of this size is one tile of 32 pixels"


def test_room_is_what_is_free_and_what_the_pipeline_holds_there() -> None:
    there = Hardware("cpu", total_bytes=10 * GIB, free_bytes=4 * GIB)
    plan = automatic(replace(there, device="cuda:0"), headroom=0.0).plan(warm_pipeline("sd15"))
    assert plan.memory.room_mb == 4096


def test_weights_that_accelerate_holds_elsewhere_are_left_alone() -> None:
    pipeline = make_pipeline("sd15")
    pipeline.enable_sequential_cpu_offload(device="cpu")
    plan = optimizer(dtype="bfloat16", channels_last=True, vae_slicing=True).plan(pipeline)
    assert [choice.kind for choice in plan.choices] == ["vae_slicing"]
    assert "sequential offloading" in reason(plan, "precision")
