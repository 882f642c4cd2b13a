"""A model that runs something else than its layers: whether a LoRA acts is unknown, and the reason says what runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
TRACE: Any = torch.jit.trace
X = torch.randn(3, 24, generator=torch.Generator().manual_seed(0))


def _inject(model: Any) -> None:
    torch.manual_seed(0)
    inject_adapter_in_model(
        LoraConfig(target_modules=["0"], r=4, lora_alpha=8, init_lora_weights=False), model, "a"
    )


def _scale(model: Any) -> None:
    model[0].set_scale("a", 0.25)


def _fuse(model: Any) -> None:
    model[0].merge()


def _leave(model: Any) -> None:
    pass


def made(*, adapted: bool, traced: bool) -> Any:
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Linear(24, 32), nn.SiLU()).requires_grad_(False)
    if adapted:
        _inject(model)
    if traced:
        model.requires_grad_(False)
        graph = TRACE(model, X)
        model.forward = lambda values: graph(values)
    return model


def told(act: Callable[[Any], None], *, traced: bool) -> tuple[dict[str, Any], bool]:
    """The analysis, and whether the output moved."""
    model = made(adapted=act is not _inject, traced=traced)
    before: Tensor = model(X)
    baseline = capture_lora_baseline(model, None)
    act(model)
    moved = not torch.allclose(model(X), before, atol=1e-6)
    return dict(analyze_lora_application_results(baseline, model, None, model)), moved


@pytest.mark.parametrize(
    ("act", "moves"), [(_inject, False), (_scale, False), (_fuse, True)], ids=["load", "scale", "fuse"]
)
def test_what_a_traced_model_makes_of_a_change_is_unknown(act: Callable[[Any], None], moves: bool) -> None:
    analysis, moved = told(act, traced=True)
    assert moved is moves
    assert analysis["effective"] is None
    assert "the forward pass of the model is a TopLevelTracedModule" in analysis["unavailable"]["effective"]
    assert [finding["id"] for finding in analysis["findings"]] == ["lora_not_seen"]
    checks = analysis["unet_weight_changes"]["checked"].values()
    assert {check["result"] for check in checks} == {"unavailable"}


@pytest.mark.parametrize(
    ("act", "acts"), [(_inject, True), (_scale, True), (_fuse, False)], ids=["load", "scale", "fuse"]
)
def test_without_a_trace_the_same_is_known(act: Callable[[Any], None], acts: bool) -> None:
    analysis, moved = told(act, traced=False)
    assert moved is acts is analysis["effective"]


def test_where_nothing_changed_a_traced_model_computes_as_before() -> None:
    analysis, moved = told(_leave, traced=True)
    assert moved is analysis["effective"] is False


def test_only_what_is_inside_of_the_replaced_layer_is_unknown() -> None:
    model = made(adapted=False, traced=False)
    block: Any = nn.Sequential(model, nn.Flatten(), nn.Linear(32, 32)).requires_grad_(False)
    graph = TRACE(model, X)
    model.forward = lambda values: graph(values)
    baseline = capture_lora_baseline(block, None)
    inject_adapter_in_model(LoraConfig(target_modules=["0.0", "2"], init_lora_weights=False), block, "a")
    analysis = analyze_lora_application_results(baseline, block, None, block)
    assert analysis["effective"] is True
    results = {key: check["result"] for key, check in analysis["unet_weight_changes"]["checked"].items()}
    assert results == {"0.0.weight": "unavailable", "2.weight": "confirmed"}
