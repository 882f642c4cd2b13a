"""Eight-bit linear layers by torchao, where it is installed; without it, a stand-in that does the same to weights."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.families import generate, make_pipeline
from tests.pipeline.deep_snapshot import deep_snapshot, differences
from tests.pipeline.optimized import CPU, RTX_4090, T4, automatic, chosen, optimizer, reason, warm_pipeline
from torch import nn

from sigmascope.pipeline import memory_optimizations as precision


def _round_to_127(module: nn.Module, config: object) -> None:
    """New parameters in the place of the old, as torchao's `quantize_` has it."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            scale = part.weight.abs().amax(1, keepdim=True).clamp(min=1e-9) / 127
            rounded = (part.weight / scale).round() * scale
            part.weight = nn.Parameter(rounded, requires_grad=False)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    package, inner = ModuleType("torchao"), ModuleType("torchao.quantization")
    package.__spec__ = ModuleSpec("torchao", None)
    for name in (
        "Int8WeightOnlyConfig",
        "Float8WeightOnlyConfig",
        "Float8DynamicActivationFloat8WeightConfig",
    ):
        setattr(inner, name, type(name, (), {}))
    inner.quantize_ = _round_to_127  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchao", package)
    monkeypatch.setitem(sys.modules, "torchao.quantization", inner)


def test_without_torchao_it_is_left_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(precision, "find_spec", lambda name: None)
    plan = optimizer(quantisation="int8").plan(warm_pipeline("flux"))
    assert reason(plan, "quantisation").startswith("torchao is not installed (")
    assert reason(plan, "quantisation").endswith("pip install torchao)")


@pytest.mark.usefixtures("stand_in")
def test_replaced_parameters_come_back_bit_for_bit() -> None:
    pipeline = make_pipeline("flux")
    first = generate(pipeline, "flux")
    before = deep_snapshot(pipeline)
    tool = optimizer(quantisation="int8")
    tool.apply(pipeline)
    assert not torch.equal(generate(pipeline, "flux"), first)
    assert tool.undo() == []
    assert differences(before, deep_snapshot(pipeline)) == []
    assert torch.equal(generate(pipeline, "flux"), first)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("hardware", "config"), [
    (RTX_4090, "Float8DynamicActivationFloat8WeightConfig"),
    (T4, "Float8WeightOnlyConfig"),
    (CPU, "Float8WeightOnlyConfig"),
])  # fmt: skip
def test_products_are_in_float8_where_the_device_has_them(hardware: Any, config: str) -> None:
    (choice,) = chosen(optimizer(hardware, quantisation="float8").plan(warm_pipeline("flux")), "quantisation")
    assert choice.options["config"] == config


@pytest.mark.usefixtures("stand_in")
def test_by_itself_it_is_taken_only_where_the_denoiser_does_not_fit() -> None:
    plan = automatic(RTX_4090, quantisation="auto").plan(warm_pipeline("flux"))
    assert reason(plan, "quantisation") == "it fits as it is, as far as is known"


@pytest.mark.usefixtures("stand_in")
def test_weights_are_not_narrowed_twice() -> None:
    plan = optimizer(quantisation="int8", layerwise_casting=True).plan(warm_pipeline("flux"))
    assert reason(plan, "layerwise_casting") == "the weights are quantised"


@pytest.mark.parametrize("family", ["sd15", "flux", "wan"])
def test_torchaos_own_weights_are_undone_exactly(family: str) -> None:
    pytest.importorskip("torchao")
    pipeline = make_pipeline(family)
    first = generate(pipeline, family)
    before = deep_snapshot(pipeline)
    tool = optimizer(quantisation="int8")
    tool.apply(pipeline)
    assert not torch.equal(generate(pipeline, family), first)
    tool.undo()
    assert differences(before, deep_snapshot(pipeline)) == []
