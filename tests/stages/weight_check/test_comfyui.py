"""ComfyUI's patchers in the shapes of their versions: packed weights, functions, and what is not to be had."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.comfy_shapes.adapters import lora_adapter, lora_parts
from tests.comfy_shapes.modules import BaseModel, Q
from tests.comfy_shapes.patchers import LowVramPatch, ModelPatcher, merged
from tests.comfy_shapes.versions import DynamicModelPatcher
from torch import Tensor, nn

from sigmascope.probes.used_weight import UsedWeights
from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline

STEP = 0.01
UP, DOWN, *_ = lora_parts()
NORM = 0.5 * float((UP.double() @ DOWN.double()).norm()) / UP.shape[1]


class Packed(Tensor):
    """As ComfyUI-GGUF's tensor: codes, with the patches on it, that gives itself for a copy."""

    patches: list[Any]

    def detach(self) -> "Packed":
        return self

    def clone(self) -> "Packed":  # type: ignore[override]
        return self


class PackedLinear(nn.Module):
    """A layer that dequantises in each forward pass, and puts the weight's patches on it then."""

    def __init__(self, codes: Tensor) -> None:
        super().__init__()
        self.weight_function: list[Any] = []
        packed = codes.as_subclass(Packed)
        packed.patches = []
        weight: Any = nn.Parameter(packed, requires_grad=False)
        weight.patches = []
        self.weight = weight

    def get_weight(self, weight: Any, dtype: torch.dtype) -> Tensor:
        numbers: Tensor = weight.as_subclass(Tensor).to(dtype) * STEP
        for entries, _key in weight.patches:
            numbers = merged(entries, numbers)
        return numbers

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.get_weight(self.weight, x.dtype))


@pytest.fixture
def packed() -> tuple[ModelPatcher, PackedLinear]:
    model = BaseModel()
    codes = torch.randint(-127, 128, (8, 8), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    layer = PackedLinear(codes)
    model.diffusion_model.middle_block[0]["to_q"] = layer  # type: ignore[operator]
    return ModelPatcher(model), layer


def checked(baseline: Any, patcher: ModelPatcher) -> tuple[dict[str, Any], dict[str, Any]]:
    found: dict[str, Any] = dict(analyze_lora_application_results(baseline, patcher, None, (patcher, None)))
    return found, found["unet_weight_changes"]["checked"][Q]


def test_a_packed_weight_is_dequantised_by_its_layer_with_and_without_patches(
    packed: tuple[ModelPatcher, PackedLinear],
) -> None:
    patcher, layer = packed
    baseline, before = capture_lora_baseline(patcher, None), layer(torch.eye(8))
    clone = patcher.clone()
    clone.add_patches({Q: lora_adapter()}, 0.5)
    layer.weight.patches = [(clone.patches[Q], Q)]
    change = layer(torch.eye(8)).double() - before.double()
    found, check = checked(baseline, clone)
    assert check["result"] == "confirmed"
    assert check["used_norm"] == pytest.approx(float(change.norm()), rel=1e-4)
    assert check["weight_norm"] == pytest.approx(float(before.double().norm()), rel=1e-6)
    told = found["unet_weight_changes"]["keys_value_changed"][Q]
    assert told["relative_change"] == pytest.approx(NORM / float(before.norm()), rel=1e-4)
    assert layer.weight.patches == [(clone.patches[Q], Q)]
    assert torch.equal(layer(torch.eye(8)).double() - before.double(), change)


def test_a_function_that_a_packed_layer_ignores_contradicts(
    packed: tuple[ModelPatcher, PackedLinear],
) -> None:
    """ComfyUI makes it where ComfyUI-GGUF's model is loaded in part (its pull request 469)."""
    patcher, layer = packed
    baseline = capture_lora_baseline(patcher, None)
    clone = patcher.clone()
    clone.add_patches({Q: lora_adapter()}, 0.5)
    layer.weight_function = [LowVramPatch(Q, clone.patches)]
    found, check = checked(baseline, clone)
    assert (check["result"], check["used_norm"]) == ("contradicted", 0.0)
    assert found["effective"] is False


@pytest.mark.parametrize("kind", [ModelPatcher, DynamicModelPatcher])
def test_functions_around_a_weight_get_a_copy_of_it(kind: type[ModelPatcher]) -> None:
    patcher = kind(BaseModel())
    baseline = capture_lora_baseline(patcher, None)
    clone = patcher.clone()
    clone.add_patches({Q: lora_adapter()}, 0.5)
    clone.load(lowvram=True)
    stored = clone.model.get_parameter(Q).clone()
    _, check = checked(baseline, clone)
    assert check["result"] == "confirmed"
    assert check["used_norm"] == pytest.approx(NORM, rel=1e-4)
    assert torch.equal(clone.model.get_parameter(Q), stored)


@pytest.mark.parametrize("second", [-0.5, 0.3])
@pytest.mark.parametrize("kind", [ModelPatcher, DynamicModelPatcher])
def test_of_a_stack_of_loras_with_little_memory_the_first_is_not_held_to_the_changes_of_both(
    kind: type[ModelPatcher], second: float
) -> None:
    patcher = kind(BaseModel())
    baseline = capture_lora_baseline(patcher, None)
    first = patcher.clone()
    first.add_patches({Q: lora_adapter()}, 0.5)
    both = first.clone()
    both.add_patches({Q: lora_adapter()}, second)
    both.load(lowvram=True)
    found, check = checked(baseline, first)
    assert (check["result"], found["effective"]) == ("unavailable", True)
    assert "lora_weights_disagree" not in {one["id"] for one in found["findings"]}


@pytest.mark.parametrize("second", [-0.5, 0.3])
def test_of_a_stack_on_a_packed_weight_the_first_is_not_held_to_the_changes_of_both(
    packed: tuple[ModelPatcher, PackedLinear], second: float
) -> None:
    patcher, layer = packed
    baseline = capture_lora_baseline(patcher, None)
    first = patcher.clone()
    first.add_patches({Q: lora_adapter()}, 0.5)
    both = first.clone()
    both.add_patches({Q: lora_adapter()}, second)
    layer.weight.patches = [(both.patches[Q], Q)]
    found, check = checked(baseline, first)
    assert (check["result"], found["effective"]) == ("unavailable", True)
    assert "lora_weights_disagree" not in {one["id"] for one in found["findings"]}


def wrong(self: LowVramPatch, weight: Tensor) -> Tensor:
    return merged(self.patches[self.key], weight) * 0.5


@pytest.mark.parametrize(("function", "is_effective"), [(wrong, True), (lambda _self, weight: weight, False)])
def test_what_a_function_really_gives_is_the_verdict(
    function: Callable[..., Tensor], is_effective: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    patcher = ModelPatcher(BaseModel())
    original = patcher.model.get_parameter(Q).double()
    baseline = capture_lora_baseline(patcher, None)
    clone = patcher.clone()
    clone.add_patches({Q: lora_adapter()}, 0.5)
    clone.load(lowvram=True)
    monkeypatch.setattr(LowVramPatch, "__call__", function)
    found, check = checked(baseline, clone)
    change = 0.25 * UP.double() @ DOWN.double()  # strength 0.5, alpha 1, rank 2
    really = 0.5 * (original + change) - original if is_effective else torch.zeros_like(original)
    assert check["result"] == "contradicted"
    assert check["used_norm"] == pytest.approx(float(really.norm()), rel=1e-4, abs=1e-6)
    assert found["effective"] is is_effective
    (finding,) = found["findings"]
    assert finding["id"] == "lora_weights_disagree"
    assert Q in finding["message"]


def test_a_weight_that_was_overwritten_after_it_was_merged_contradicts() -> None:
    patcher = ModelPatcher(BaseModel())
    baseline, original = capture_lora_baseline(patcher, None), patcher.model.get_parameter(Q).clone()
    clone = patcher.clone()
    clone.add_patches({Q: lora_adapter()}, 0.5)
    clone.load()
    clone.model.get_parameter(Q).data.copy_(original)
    found, check = checked(baseline, clone)
    assert (check["result"], check["used_norm"]) == ("contradicted", 0.0)
    assert found["effective"] is False


def test_a_function_of_which_only_the_host_knows_is_not_called() -> None:
    def never(_weight: Tensor) -> Tensor:
        raise AssertionError("it was called")

    patcher = ModelPatcher(BaseModel())
    patcher.model.get_submodule(Q.removesuffix(".weight")).weight_function = [never]
    found = UsedWeights(patcher).of(Q)
    assert found.value is None
    assert "only the host knows" in (found.reason or "")


def test_changes_that_wait_for_sampling_are_not_to_be_had() -> None:
    patcher = ModelPatcher(BaseModel())
    baseline = capture_lora_baseline(patcher, None)
    clone = patcher.clone()
    clone.add_patches({Q: lora_adapter()}, 0.5)
    found, check = checked(baseline, clone)
    assert check["result"] == "unavailable"
    assert set(check["unavailable"].values()) == {"the model has not been loaded with any changes"}
    assert found["effective"] is True
