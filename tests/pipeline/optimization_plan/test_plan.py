"""What is planned by hardware, model and wishes, and what is refused; on devices that are not here."""

import json
from typing import Any

import pytest
import torch
from tests.families import FAMILIES, make_pipeline
from tests.pipeline.deep_snapshot import deep_snapshot, differences
from tests.pipeline.optimized import (
    ALONE,
    CPU,
    H100,
    NOT_OFFERED,
    SAMPLES_AND_SLOW_FAMILIES,
    automatic,
    chosen,
    optimizer,
    reason,
    warm_pipeline,
)

from sigmascope.errors import ConfigError
from sigmascope.pipeline.optimization_plan import refuse_unknown
from sigmascope.pipeline.optimizer import OptimizationConfig, PipelineOptimizer

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
MOST_FAMILIES_SLOWLY = pytest.mark.parametrize("family", SAMPLES_AND_SLOW_FAMILIES)


@EVERY_FAMILY
@pytest.mark.slow
def test_on_a_cpu_nothing_is_done_by_itself(family: str) -> None:
    assert automatic(CPU).plan(warm_pipeline(family)).choices == ()


@pytest.mark.parametrize("kind", ["placement", "attention", "compile", "fast_matmul", "layerwise_casting"])
def test_on_a_cpu_the_reason_is_that_there_is_no_accelerator(kind: str) -> None:
    plan = automatic(CPU).plan(warm_pipeline("flux"))
    assert reason(plan, kind).startswith("no accelerator")


@MOST_FAMILIES_SLOWLY
def test_planning_changes_nothing(family: str) -> None:
    pipeline = warm_pipeline(family)
    before = deep_snapshot(pipeline)
    automatic(H100, image="approximation", quantisation="auto").plan(pipeline)
    assert differences(before, deep_snapshot(pipeline)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_OFFERED)
def test_what_a_family_does_not_offer_is_left_with_a_reason(name: str) -> None:
    for family in NOT_OFFERED[name]:
        plan = optimizer(**ALONE[name]).plan(warm_pipeline(family))
        assert plan.choices == ()
        assert all(one.reason for one in plan.not_taken)


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
    with pytest.raises(ConfigError, match="is not a diffusers pipeline"):
        automatic(H100).plan(thing)


def test_a_pipeline_without_a_denoiser_is_left_as_it_is() -> None:
    plan = automatic(CPU).plan(warm_pipeline("sd15").vae)
    assert plan.choices == ()
