"""PEFT's layers: base and adapters by PEFT's own functions, beside what the adapters say."""

from typing import Any

import pytest
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.loaders import PeftAdapterMixin
from peft.tuners.lora import layer as peft_layers
from torch import nn

from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline
from sigmascope.stages.weight_check import MOST_LAYERS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
Analysis = dict[str, Any]
LAYERS = 10


class Tiny(ModelMixin, ConfigMixin, PeftAdapterMixin):  # type: ignore[misc]
    """Ten layers with the adapters of diffusers' models."""

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(40, 32) for _ in range(LAYERS)])


def with_lora(model: Any) -> Any:
    """With a LoRA, which is stronger from layer to layer."""
    torch.manual_seed(0)
    state = {}
    for number in range(LAYERS):
        size = 0.01 * (1 + number)
        state[f"layers.{number}.lora_A.weight"] = torch.randn(4, 40)
        state[f"layers.{number}.lora_B.weight"] = size * torch.randn(32, 4)
    model.load_lora_adapter(state, prefix=None, adapter_name="style")
    return model.requires_grad_(False)


@pytest.fixture
def unet() -> Any:
    return with_lora(Tiny())


def layers_of(unet: nn.Module) -> dict[str, Any]:
    return {
        f"{name}.weight": layer
        for name, layer in unet.named_modules()
        if isinstance(layer, peft_layers.LoraLayer)
    }


def change(layer: Any, strength: float) -> float:
    """‖strength · BA‖ from the factors, in float64."""
    up, down = (held["style"].weight.double() for held in (layer.lora_B, layer.lora_A))
    return float((strength * up @ down).norm())


def analysed(baseline: Any, unet: nn.Module) -> tuple[Analysis, dict[str, Any]]:
    found: Analysis = dict(analyze_lora_application_results(baseline, unet, None, unet))
    return found, found["unet_weight_changes"]["checked"]


def test_the_strongest_eight_are_confirmed_with_their_norms(unet: Any) -> None:
    baseline = capture_lora_baseline(unet, None)
    unet.set_adapters(["style"], [0.25])
    found, checks = analysed(baseline, unet)
    norms = {key: change(layer, 0.75) for key, layer in layers_of(unet).items()}
    strongest = sorted(norms, key=lambda key: -norms[key])[:MOST_LAYERS]
    assert [*checks] == strongest
    assert {check["result"] for check in checks.values()} == {"confirmed"}
    assert {key: check["used_norm"] for key, check in checks.items()} == pytest.approx(
        {key: norms[key] for key in strongest}, rel=1e-3
    )
    assert found["effective"] is True


def test_a_merged_adapter_is_compared_by_elements_of_the_old_weight(unet: Any) -> None:
    unet.disable_lora()
    baseline = capture_lora_baseline(unet, None)
    unet.enable_lora()
    unet.fuse_lora()
    _, checks = analysed(baseline, unet)
    unet.unfuse_lora()
    key, check = next(iter(checks.items()))
    assert check["result"] == "confirmed"
    assert check["elements"] == min(1024, layers_of(unet)[key].weight.numel())
    assert check["used_norm"] == pytest.approx(change(layers_of(unet)[key], 1.0), rel=0.15)


def test_an_adapter_that_is_fused_at_strength_0_is_told_so(unet: Any) -> None:
    unet.set_adapters(["style"], [0.0])
    baseline = capture_lora_baseline(unet, None)
    old = {key: layer.weight.clone() for key, layer in layers_of(unet).items()}
    unet.fuse_lora()
    assert all(torch.equal(layer.weight, old[key]) for key, layer in layers_of(unet).items())
    found, _ = analysed(baseline, unet)
    assert found["effective"] is False
    assert [finding["id"] for finding in found["findings"]] == ["lora_strength_zero"]


def test_an_adapter_that_gives_nothing_contradicts(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    unet.disable_lora()
    baseline = capture_lora_baseline(unet, None)
    unet.enable_lora()
    monkeypatch.setattr(
        peft_layers.Linear,
        "get_delta_weight",
        lambda layer, _adapter: torch.zeros_like(layer.base_layer.weight),
    )
    found, checks = analysed(baseline, unet)
    assert {check["result"] for check in checks.values()} == {"contradicted"}
    key, check = next(iter(checks.items()))
    assert (check["used_norm"], check["difference_norm"]) == (
        0.0,
        pytest.approx(change(layers_of(unet)[key], 1.0)),
    )
    assert found["effective"] is None  # of the two weakest layers nothing is known
    (finding,) = (one for one in found["findings"] if one["id"] == "lora_weights_disagree")
    assert key in finding["message"]


def test_an_adapter_that_is_off_and_acts_all_the_same_is_effective(
    unet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    unet.set_adapters(["style"], [0.0])
    baseline = capture_lora_baseline(unet, None)
    key, layer = next(iter(layers_of(unet).items()))
    monkeypatch.setattr(layer, "get_delta_weight", lambda _adapter: torch.ones_like(layer.base_layer.weight))
    found, checks = analysed(baseline, unet)
    assert checks[key]["result"] == "contradicted"
    assert found["effective"] is True
    told = found["unet_weight_changes"]["keys_value_changed"][key]
    assert told["measured_from"] == "used"
    assert told["delta_norm"] == pytest.approx(layer.weight.numel() ** 0.5)


def test_nothing_of_the_host_is_changed(unet: Any) -> None:
    baseline = capture_lora_baseline(unet, None)
    unet.set_adapters(["style"], [0.5])
    state = {name: (tensor.clone(), tensor.data_ptr()) for name, tensor in unet.state_dict().items()}
    names = {name: sorted(vars(module)) for name, module in unet.named_modules()}
    random_state = torch.get_rng_state()
    analysed(baseline, unet)
    after = unet.state_dict()
    assert all(
        torch.equal(after[name], old) and after[name].data_ptr() == at for name, (old, at) in state.items()
    )
    assert {name: sorted(vars(module)) for name, module in unet.named_modules()} == names
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_function_of_the_host_that_raises_is_a_reason(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("not today")

    baseline = capture_lora_baseline(unet, None)
    unet.set_adapters(["style"], [0.5])
    monkeypatch.setattr(peft_layers.Linear, "get_delta_weight", fail)
    found, checks = analysed(baseline, unet)
    assert {check["result"] for check in checks.values()} == {"unavailable"}
    assert "not today" in next(iter(checks.values()))["unavailable"]["used_norm"]
    assert found["effective"] is True
