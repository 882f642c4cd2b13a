"""Number formats that are planned, and what applying makes of the weights."""

from dataclasses import replace

import pytest
import torch
from tests.families import FAMILIES, make_pipeline
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

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)


def test_a_recent_device_takes_bfloat16() -> None:
    (choice,) = chosen(automatic(H100).plan(warm_pipeline("sdxl")), "precision")
    assert choice.options["dtype"] == "bfloat16"


def test_an_older_device_takes_float16() -> None:
    (choice,) = chosen(automatic(T4).plan(warm_pipeline("sdxl")), "precision")
    assert choice.options["dtype"] == "float16"


def test_a_cpu_that_multiplies_bfloat16_takes_it() -> None:
    plan = automatic(replace(CPU, cpu_bfloat16=True)).plan(warm_pipeline("sdxl"))
    assert [choice.kind for choice in plan.choices] == ["precision"]


@pytest.mark.slow
@EVERY_FAMILY
def test_planned_weights_are_what_applying_makes_of_them(family: str) -> None:
    pipeline = make_pipeline(family)
    tool = optimizer(dtype="bfloat16", layerwise_casting=True)
    plan = tool.apply(pipeline)
    for name, planned in plan.memory.planned_weights_mb.items():
        model = pipeline.components[name]
        nbytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        assert planned * 2**20 == nbytes, name


@pytest.mark.slow
def test_wans_vae_stays_in_float32() -> None:
    plan = automatic(H100).plan(warm_pipeline("wan"))
    assert reason(plan, "precision", "vae") == "AutoencoderKLWan is meant to run in float32"


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
