"""What is planned, and why not, by hardware, size and wishes; on devices that are not here."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.families import FAMILIES, make_pipeline
from tests.pipeline.deep_snapshot import deep_snapshot, differences
from tests.pipeline.optimized import (
    ALONE,
    CPU,
    GIB,
    H100,
    NOT_OFFERED,
    T4,
    automatic,
    chosen,
    optimizer,
    reason,
    warm_pipeline,
)

from sigmascope.errors import ConfigError
from sigmascope.pipeline.optimizer import Hardware, OptimizationConfig, PipelineOptimizer
from sigmascope.pipeline.optimizing.config import refuse_unknown

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)


@EVERY_FAMILY
def test_on_a_cpu_nothing_is_done_by_itself(family: str) -> None:
    assert automatic(CPU).plan(warm_pipeline(family)).choices == ()


@pytest.mark.parametrize("kind", ["placement", "attention", "compile", "fast_matmul", "layerwise_casting"])
def test_on_a_cpu_the_reason_is_that_there_is_no_accelerator(kind: str) -> None:
    plan = automatic(CPU).plan(warm_pipeline("flux"))
    assert reason(plan, kind).startswith("no accelerator")


@EVERY_FAMILY
def test_planning_changes_nothing(family: str) -> None:
    pipeline = warm_pipeline(family)
    before = deep_snapshot(pipeline)
    automatic(H100, image="approximation", quantisation="auto").plan(pipeline)
    assert differences(before, deep_snapshot(pipeline)) == []


@pytest.mark.parametrize("name", NOT_OFFERED)
def test_what_a_family_does_not_offer_is_left_with_a_reason(name: str) -> None:
    for family in NOT_OFFERED[name]:
        plan = optimizer(**ALONE[name]).plan(warm_pipeline(family))
        assert plan.choices == ()
        assert all(one.reason for one in plan.not_taken)


def test_a_recent_device_takes_bfloat16() -> None:
    (choice,) = chosen(automatic(H100).plan(warm_pipeline("sdxl")), "precision")
    assert choice.options["dtype"] == "bfloat16"


def test_an_older_device_takes_float16() -> None:
    (choice,) = chosen(automatic(T4).plan(warm_pipeline("sdxl")), "precision")
    assert choice.options["dtype"] == "float16"


def test_a_cpu_that_multiplies_bfloat16_takes_it() -> None:
    plan = automatic(replace(CPU, cpu_bfloat16=True)).plan(warm_pipeline("sdxl"))
    assert [choice.kind for choice in plan.choices] == ["precision"]


@EVERY_FAMILY
def test_planned_weights_are_what_applying_makes_of_them(family: str) -> None:
    pipeline = make_pipeline(family)
    tool = optimizer(dtype="bfloat16", layerwise_casting=True)
    plan = tool.apply(pipeline)
    for name, planned in plan.memory.planned_weights_mb.items():
        model = pipeline.components[name]
        nbytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        assert planned * 2**20 == nbytes, name


def test_wans_vae_stays_in_float32() -> None:
    plan = automatic(H100).plan(warm_pipeline("wan"))
    assert reason(plan, "precision", "vae") == "AutoencoderKLWan is made to run in float32"


def test_what_is_in_half_precision_is_left() -> None:
    pipeline = make_pipeline("sd15").to(torch.bfloat16)
    assert "nothing in it is wider than bfloat16" in reason(automatic(H100).plan(pipeline), "precision")


def test_tables_that_are_not_saved_keep_their_precision() -> None:
    pipeline = make_pipeline("qwen_image")
    optimizer(dtype="bfloat16").apply(pipeline)
    assert pipeline.text_encoder.model.language_model.rotary_emb.inv_freq.dtype == torch.float32


def test_layers_that_wan_keeps_in_float32_stay_so() -> None:
    pipeline = make_pipeline("wan")
    optimizer(dtype="bfloat16").apply(pipeline)
    assert pipeline.transformer.scale_shift_table.dtype == torch.float32
    assert pipeline.transformer.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(("image", "kinds"), [
    ("none", {"placement"} - {"placement"}),
    ("rounding", {"attention", "compile"}),
    ("precision", {"precision", "attention", "compile", "channels_last"}),
    ("approximation", {"precision", "attention", "compile", "channels_last", "cache"}),
])  # fmt: skip
def test_the_image_may_change_by_no_more_than_allowed(image: Any, kinds: set[str]) -> None:
    plan = automatic(H100, image=image).plan(warm_pipeline("flux"))
    assert {choice.kind for choice in plan.choices} - {"placement", "fast_matmul"} == kinds


def test_what_is_asked_for_is_done_whatever_the_image_may_be() -> None:
    plan = automatic(H100, image="none", dtype="bfloat16").plan(warm_pipeline("flux"))
    assert chosen(plan, "precision")


def test_cudnn_is_chosen_from_hopper_on() -> None:
    (choice,) = chosen(automatic(H100).plan(warm_pipeline("flux")), "attention")
    assert choice.call == 'pipe.transformer.set_attention_backend("_native_cudnn")'


def test_older_devices_leave_attention_to_pytorch() -> None:
    assert "by itself" in reason(automatic(T4).plan(warm_pipeline("flux")), "attention")


def test_attention_that_builds_the_matrix_is_replaced_on_any_device() -> None:
    from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0

    pipeline = make_pipeline("sd15")
    pipeline.unet.set_attn_processor(AttnProcessor())
    tool = automatic(CPU)
    plan = tool.apply(pipeline)
    assert [choice.kind for choice in plan.choices] == ["attention"]
    assert {type(one) for one in pipeline.unet.attn_processors.values()} == {AttnProcessor2_0}
    tool.undo()
    assert {type(one) for one in pipeline.unet.attn_processors.values()} == {AttnProcessor}


def test_fusing_waits_to_be_asked_for() -> None:
    assert "LoRAs that are loaded later" in reason(automatic(H100).plan(warm_pipeline("flux")), "fused_qkv")


def test_fusing_is_refused_where_a_lora_is_loaded() -> None:
    from tests.families.loras import lora_state

    pipeline = make_pipeline("sd15")
    pipeline.load_lora_weights(lora_state(pipeline, ["unet"], only="attn1.to_q"))
    assert "LoRA is loaded" in reason(optimizer(fuse_qkv=True).plan(pipeline), "fused_qkv")


def test_compiling_is_left_where_few_generations_are_planned() -> None:
    plan = automatic(H100, generations=2).plan(warm_pipeline("flux"))
    assert reason(plan, "compile") == "compiling takes longer than 2 generations gain"


def test_weights_in_float32_take_tensorfloat_where_they_stay_so() -> None:
    (choice,) = chosen(automatic(H100, dtype=None).plan(warm_pipeline("flux")), "fast_matmul")
    assert choice.call == 'torch.set_float32_matmul_precision("high")'


def test_unets_let_cudnn_try_its_algorithms() -> None:
    (choice,) = chosen(automatic(H100).plan(warm_pipeline("sdxl")), "fast_matmul")
    assert choice.call == "torch.backends.cudnn.benchmark = True"


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


def test_a_choice_can_be_left_out_of_a_plan() -> None:
    plan = (
        automatic(H100)
        .plan(warm_pipeline("flux"))
        .without(["attention", "precision of pipeline"], "not today")
    )
    assert not chosen(plan, "attention") + chosen(plan, "precision")
    assert reason(plan, "attention") == "not today"


def test_a_plan_is_explained_in_words() -> None:
    text = str(automatic(H100).plan(warm_pipeline("flux")))
    assert "FluxPipeline (MMDiT) on cuda:0 (NVIDIA H100), 81,920.0 MB" in text
    assert "Not taken:" in text


def test_a_plan_is_json() -> None:
    plan = automatic(H100).plan(warm_pipeline("flux"))
    assert json.loads(json.dumps(plan.as_dict()))["hardware"]["device"] == "cuda:0"


@pytest.mark.parametrize("wrong", [{"dtype": "int3"}, {"image": "best"}, {"compile": "yes"}, {"compile": 1}])
def test_a_value_that_is_not_known_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Give one of"):
        refuse_unknown(wrong)


@pytest.mark.parametrize("wrong", [{"headroom": 1.0}, {"batch_size": 0}, {"generations": 0}])
def test_a_number_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        OptimizationConfig(**wrong)


def test_a_plan_holds_no_model() -> None:
    import gc
    import weakref

    pipeline = make_pipeline("sd15")
    unet = weakref.ref(pipeline.unet)
    plan = PipelineOptimizer(hardware=H100).plan(pipeline)
    del pipeline
    gc.collect()
    assert unet() is None
    assert plan.choices


def test_room_is_what_is_free_and_what_the_pipeline_holds_there() -> None:
    there = Hardware("cpu", total_bytes=10 * GIB, free_bytes=4 * GIB)
    plan = automatic(replace(there, device="cuda:0"), headroom=0.0).plan(warm_pipeline("sd15"))
    assert plan.memory.room_mb == 4096


def test_a_denoiser_alone_is_planned_for() -> None:
    plan = automatic(H100).plan(warm_pipeline("flux").transformer)
    assert {"precision", "attention", "placement"} <= {choice.kind for choice in plan.choices}


def test_a_denoiser_alone_is_applied_to_and_undone() -> None:
    transformer = make_pipeline("flux").transformer
    tool = optimizer(dtype="bfloat16", cache="pyramid", fuse_qkv=True)
    tool.apply(transformer)
    assert transformer.dtype == torch.bfloat16
    tool.undo()
    assert transformer.dtype == torch.float32
    assert not hasattr(transformer.transformer_blocks[0].attn, "to_qkv")


@pytest.mark.parametrize("thing", ["a name", object(), None])
def test_what_is_no_pipeline_is_refused(thing: object) -> None:
    with pytest.raises(ConfigError, match="is no diffusers pipeline"):
        automatic(H100).plan(thing)


def test_a_pipeline_without_a_denoiser_is_left_as_it_is() -> None:
    plan = automatic(CPU).plan(warm_pipeline("sd15").vae)
    assert plan.choices == ()


def test_weights_that_accelerate_holds_elsewhere_are_left_alone() -> None:
    pipeline = make_pipeline("sd15")
    pipeline.enable_sequential_cpu_offload(device="cpu")
    plan = optimizer(dtype="bfloat16", channels_last=True, vae_slicing=True).plan(pipeline)
    assert [choice.kind for choice in plan.choices] == ["vae_slicing"]
    assert "sequential offloading" in reason(plan, "precision")
