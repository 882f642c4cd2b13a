"""Several optimizers at once: on one pipeline the last applied goes first; settings of the process wait for all."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.families import make_pipeline
from tests.pipeline.deep_snapshot import deep_snapshot, differences
from tests.pipeline.optimized import optimizer

from sigmascope.errors import OptimizationError
from sigmascope.pipeline.optimization_plan import ProcessSetting


@pytest.fixture
def by_backend() -> Iterator[None]:
    """Both backends' precisions are as they were once the test ends."""
    flags: Any = torch.backends
    backends = (flags.cuda.matmul, flags.mkldnn.matmul)
    before = [backend.fp32_precision for backend in backends]
    yield
    for backend, precision in zip(backends, before, strict=True):
        backend.fp32_precision = precision


@pytest.mark.slow
def test_what_another_applied_over_it_is_named_and_nothing_is_undone() -> None:
    pipeline = make_pipeline("flux")
    lower, upper = optimizer(vae_tiling=True, layerwise_casting=True), optimizer(dtype="bfloat16")
    lower.apply(pipeline)
    upper.apply(pipeline)
    before = deep_snapshot(pipeline)
    with pytest.raises(OptimizationError, match="precision of pipeline was applied after it") as failure:
        lower.undo(pipeline)
    assert "Undo that first" in str(failure.value.hint)
    assert differences(before, deep_snapshot(pipeline)) == []


def test_taken_off_from_above_all_is_as_it_was() -> None:
    pipeline = make_pipeline("flux")
    before = deep_snapshot(pipeline)
    lower, upper = optimizer(layerwise_casting=True), optimizer(dtype="bfloat16")
    lower.apply(pipeline)
    upper.apply(pipeline)
    upper.undo(pipeline)
    lower.undo(pipeline)
    assert differences(before, deep_snapshot(pipeline)) == []


@pytest.mark.slow
def test_choices_on_other_models_do_not_stand_in_the_way() -> None:
    pipeline = make_pipeline("flux")
    before = deep_snapshot(pipeline)
    lower, upper = optimizer(vae_tiling=True), optimizer(fuse_qkv=True)
    lower.apply(pipeline)
    upper.apply(pipeline)
    lower.undo(pipeline)
    upper.undo(pipeline)
    assert differences(before, deep_snapshot(pipeline)) == []


@pytest.mark.slow
def test_an_optimizer_that_is_gone_does_not_stand_in_the_way() -> None:
    pipeline = make_pipeline("flux")
    lower = optimizer(vae_tiling=True)
    lower.apply(pipeline)
    optimizer(vae_slicing=True).apply(pipeline)
    gc.collect()
    lower.undo(pipeline)
    assert pipeline.vae.use_tiling is False


@pytest.mark.usefixtures("by_backend")
def test_the_precision_of_products_is_as_it_was_by_each_backend() -> None:
    backends: Any = torch.backends
    backends.cuda.matmul.fp32_precision = backends.mkldnn.matmul.fp32_precision = "none"
    tool = optimizer(fast_matmul=True)
    tool.apply(make_pipeline("flux").transformer)
    assert backends.cuda.matmul.fp32_precision == "tf32"
    tool.undo()
    assert backends.cuda.matmul.fp32_precision == "none"
    assert backends.mkldnn.matmul.fp32_precision == "none"
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.usefixtures("by_backend")
def test_a_precision_that_was_set_for_one_backend_is_kept() -> None:
    backends: Any = torch.backends
    backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision = "tf32", "none"
    tool = optimizer(fast_matmul=True)
    tool.apply(make_pipeline("flux").transformer)
    tool.undo()
    assert backends.cuda.matmul.fp32_precision == "tf32"
    assert backends.mkldnn.matmul.fp32_precision == "none"


def test_flags_of_the_process_stay_until_the_last_pipeline_lets_go() -> None:
    first, second = optimizer(fast_matmul=True), optimizer(fast_matmul=True)
    first.apply(make_pipeline("flux").transformer)
    second.apply(make_pipeline("flux").transformer)
    first.undo()
    assert torch.get_float32_matmul_precision() == "high"
    second.undo()
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_a_setting_is_put_back_in_whatever_order_it_is_let_go(order: tuple[int, ...]) -> None:
    held = {"now": "first"}
    setting = ProcessSetting(lambda: held["now"], lambda value: held.update(now=value))
    undos = []
    for value in ("a", "b", "c"):
        undos.append(setting.hold())
        held["now"] = value
    for number in order:
        undos[number]()
    assert held["now"] == "first"


def test_a_plan_for_other_parts_is_refused_by_name() -> None:
    plan = optimizer(fuse_qkv=True).plan(make_pipeline("flux"))
    with pytest.raises(
        OptimizationError, match="planned for transformer, which StableDiffusionPipeline"
    ) as failure:
        optimizer().apply(make_pipeline("sd15"), plan)
    assert "Plan for this pipeline" in str(failure.value.hint)
