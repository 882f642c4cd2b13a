"""PEFT's other kinds: the weight that a layer uses is the one that its own forward pass shows."""

from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, OFTConfig, inject_adapter_in_model
from torch import Tensor, nn

from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
TARGET = {"target_modules": ["layer"]}
KINDS: dict[str, Any] = {
    "dora": lambda: LoraConfig(r=2, use_dora=True, **TARGET),
    "loha": lambda: LoHaConfig(r=2, init_weights=False, **TARGET),
    "lokr": lambda: LoKrConfig(r=2, init_weights=False, **TARGET),
    "oft": lambda: OFTConfig(r=0, oft_block_size=4, init_weights=False, **TARGET),
}
LAYERS: dict[str, Any] = {
    "linear": lambda: nn.Linear(8, 12),
    "conv": lambda: nn.Conv2d(8, 12, 3, padding=1),
    "1 × 1": lambda: nn.Conv2d(8, 12, 1),
    "words": lambda: nn.Embedding(12, 8),
}


def by_forward(layer: nn.Module, shape: torch.Size) -> Tensor:
    """The layer's output for the unit vectors, in the weight's shape."""
    with torch.no_grad():
        if len(shape) == 2 and "Embedding" in type(layer).__name__:
            words: Tensor = layer(torch.arange(shape[0]))
            return words.double()
        units = torch.eye(shape[1:].numel()).reshape(-1, *shape[1:])
        output: Tensor = layer(units) - layer(torch.zeros_like(units))
        if units.ndim > 2:
            middle = (shape[-1] - 1) // 2
            output = output[:, :, middle, middle]
    return output.double().mT.reshape(shape)


@pytest.mark.parametrize(
    ("kind", "of", "result"),
    [
        *[("dora", of, "confirmed") for of in LAYERS],
        *[(kind, of, "confirmed") for kind in ("loha", "lokr") for of in ("linear", "conv")],
        *[("oft", of, "measured") for of in ("linear", "1 × 1")],
    ],
)
def test_two_of_a_kind_are_the_weight_of_the_forward_pass(kind: str, of: str, result: str) -> None:
    torch.manual_seed(0)
    model: Any = nn.ModuleDict({"layer": LAYERS[of]()}).eval()
    before = model["layer"].weight.detach().double().clone()
    baseline = capture_lora_baseline(model, None)
    for adapter in ("one", "two"):
        inject_adapter_in_model(KINDS[kind](), model, adapter)
    for name, parameter in model.named_parameters():
        if ".one" in name or ".two" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model["layer"].set_adapter(["one", "two"])
    state = {name: (held.clone(), held.data_ptr()) for name, held in model.state_dict().items()}
    found = analyze_lora_application_results(baseline, model, None, model)
    after = model.state_dict()
    assert all(torch.equal(after[n], old) and after[n].data_ptr() == at for n, (old, at) in state.items())
    norm = float((by_forward(model["layer"].eval(), before.shape) - before).norm())
    changes = found["unet_weight_changes"]
    assert changes["checked"]["layer.weight"]["result"] == result
    assert changes["checked"]["layer.weight"]["used_norm"] == pytest.approx(norm, rel=1e-3)
    assert changes["keys_value_changed"]["layer.weight"]["delta_norm"] == pytest.approx(norm, rel=1e-3)
    assert found["effective"] is True


def test_an_untrained_rotation_is_known_to_change_nothing() -> None:
    model: Any = nn.ModuleDict({"layer": nn.Linear(8, 12)})
    baseline = capture_lora_baseline(model, None)
    inject_adapter_in_model(OFTConfig(r=0, oft_block_size=4, **TARGET), model, "one")
    assert analyze_lora_application_results(baseline, model, None, model)["effective"] is False


def test_a_rotation_of_windows_has_a_reason() -> None:
    model: Any = nn.ModuleDict({"layer": nn.Conv2d(8, 12, 3)})
    baseline = capture_lora_baseline(model, None)
    inject_adapter_in_model(KINDS["oft"](), model, "one")
    found = analyze_lora_application_results(baseline, model, None, model)
    check = found["unet_weight_changes"]["checked"]["layer.weight"]
    assert check["result"] == "unavailable"
    assert "windows" in check["unavailable"]["used_norm"]
    assert found["effective"] is None
