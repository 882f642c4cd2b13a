"""Attention, fused projections, compiling and flags: where they are planned."""

import torch
from tests.families import make_pipeline
from tests.families.group_offload import needs_group_offload
from tests.pipeline.optimized import (
    CPU,
    H100,
    T4,
    automatic,
    chosen,
    optimizer,
    reason,
    warm_pipeline,
)


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
    assert "LoRAs loaded later" in reason(automatic(H100).plan(warm_pipeline("flux")), "fused_qkv")


def test_fusing_is_refused_where_a_lora_is_loaded() -> None:
    from tests.families.loras import lora_state

    pipeline = make_pipeline("sd15")
    pipeline.load_lora_weights(lora_state(pipeline, ["unet"], only="attn1.to_q"))
    assert "LoRA is loaded" in reason(optimizer(fuse_qkv=True).plan(pipeline), "fused_qkv")


def test_compiling_is_left_where_few_generations_are_planned() -> None:
    plan = automatic(H100, generations=2).plan(warm_pipeline("flux"))
    assert reason(plan, "compile") == "compiling takes longer than 2 generations would save"


def test_weights_in_float32_take_tensorfloat_where_they_stay_so() -> None:
    (choice,) = chosen(automatic(H100, dtype=None).plan(warm_pipeline("flux")), "fast_matmul")
    assert choice.call == 'torch.set_float32_matmul_precision("high")'


def test_unets_let_cudnn_try_its_algorithms() -> None:
    (choice,) = chosen(automatic(H100).plan(warm_pipeline("sdxl")), "fast_matmul")
    assert choice.call == "torch.backends.cudnn.benchmark = True"


def test_what_is_cast_layer_by_layer_is_neither_fused_nor_compiled() -> None:
    """Whoever cast it, and whenever."""
    transformer = make_pipeline("flux").transformer
    transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    assert "cannot be joined" in reason(optimizer(fuse_qkv=True).plan(transformer), "fused_qkv")
    assert "hooks that widen each layer" in reason(automatic(H100).plan(transformer), "compile")


def test_what_moves_layer_by_layer_is_not_compiled() -> None:
    needs_group_offload()
    pipeline = make_pipeline("flux")
    pipeline.enable_group_offload(onload_device=torch.device("cpu"), offload_type="leaf_level")
    assert "layers move in and out" in reason(automatic(H100).plan(pipeline), "compile")
