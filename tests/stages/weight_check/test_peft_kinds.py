"""PEFT's other kinds: the weight that a layer uses is the one that its own forward pass shows."""

from typing import Any

import peft
import pytest
import torch
from peft import (
    AdaLoraConfig,
    BOFTConfig,
    FourierFTConfig,
    GraloraConfig,
    HRAConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    MissConfig,
    OFTConfig,
    inject_adapter_in_model,
)
from torch import Tensor, nn

from sigmascope.probes.used_weight import UsedWeights
from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
TARGET = {"target_modules": ["layer"]}
KINDS: dict[str, Any] = {
    "dora": lambda: LoraConfig(r=2, use_dora=True, **TARGET),
    "loha": lambda: LoHaConfig(r=2, init_weights=False, **TARGET),
    "lokr": lambda: LoKrConfig(r=2, init_weights=False, **TARGET),
    "oft": lambda: OFTConfig(r=0, oft_block_size=4, init_weights=False, **TARGET),
    "boft": lambda: BOFTConfig(boft_block_size=4, init_weights=False, **TARGET),
    "hra": lambda: HRAConfig(r=2, init_weights=False, **TARGET),
    "ia3": lambda: IA3Config(feedforward_modules=[], init_ia3_weights=False, **TARGET),
    "adalora": lambda: AdaLoraConfig(init_r=4, target_r=2, total_step=10, **TARGET),
    "miss": lambda: MissConfig(r=4, init_weights=False, **TARGET),
    "gralora": lambda: GraloraConfig(r=4, gralora_k=2, init_weights=False, **TARGET),
    "fourier": lambda: FourierFTConfig(n_frequency=10, init_weights=False, **TARGET),
}
LAYERS: dict[str, Any] = {
    "linear": lambda: nn.Linear(8, 12),
    "conv": lambda: nn.Conv2d(8, 12, 3, padding=1),
    "1 × 1": lambda: nn.Conv2d(8, 12, 1),
    "video": lambda: nn.Conv3d(8, 12, 3, padding=1),
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
            output = output.flatten(2)[:, :, (output[0, 0].numel() - 1) // 2]
    return output.double().mT.reshape(shape)


def found_of(model: Any, baseline: Any) -> dict[str, Any]:
    """The analysis, which leaves every tensor of the model where and as it is."""
    state = {name: (held.clone(), held.data_ptr()) for name, held in model.state_dict().items()}
    found = dict(analyze_lora_application_results(baseline, model, None, model))
    after = model.state_dict()
    assert all(torch.equal(after[n], old) and after[n].data_ptr() == at for n, (old, at) in state.items())
    return found


@pytest.mark.parametrize(
    ("kind", "of", "adapters", "result"),
    [
        *[("dora", of, ["one", "two"], "confirmed") for of in LAYERS],
        *[(kind, of, ["one", "two"], "confirmed") for kind in ("loha", "lokr") for of in ("linear", "conv")],
        *[("oft", of, ["one", "two"], "measured") for of in ("linear", "1 × 1")],
        *[(kind, "conv", ["one"], "measured") for kind in ("boft", "hra", "ia3", "adalora")],
        *[(kind, "linear", ["one"], "measured") for kind in ("boft", "miss", "gralora", "fourier")],
        ("ia3", "video", ["one"], "measured"),
    ],
)
def test_a_kind_is_the_weight_of_the_forward_pass(
    kind: str, of: str, adapters: list[str], result: str
) -> None:
    torch.manual_seed(0)
    model: Any = nn.ModuleDict({"layer": LAYERS[of]()}).eval()
    before = model["layer"].weight.detach().double().clone()
    baseline = capture_lora_baseline(model, None)
    for adapter in adapters:
        inject_adapter_in_model(KINDS[kind](), model, adapter)
    for name, parameter in model.named_parameters():
        if any(f".{adapter}" in name for adapter in adapters):
            parameter.data += 0.1 * torch.randn_like(parameter)
    model["layer"].set_adapter(adapters)
    found = found_of(model.eval(), baseline)
    norm = float((by_forward(model["layer"], before.shape) - before).norm())
    changes = found["unet_weight_changes"]
    assert changes["checked"]["layer.weight"]["result"] == result
    assert changes["checked"]["layer.weight"]["used_norm"] == pytest.approx(norm, rel=1e-3)
    assert changes["keys_value_changed"]["layer.weight"]["delta_norm"] == pytest.approx(norm, rel=1e-3)
    assert found["effective"] is True


@pytest.mark.parametrize("kind", ["oft", "ia3", "hra"])
def test_what_was_merged_is_told_by_the_content_and_merging_what_acted_before_is_not_called_a_change(
    kind: str,
) -> None:
    """(IA)³ scales the bias too, of which no adapter's change says so."""
    torch.manual_seed(0)
    model: Any = nn.ModuleDict({"layer": nn.Linear(8, 12)}).eval()
    bare = capture_lora_baseline(model, None)
    before = model["layer"].weight.detach().double().clone()
    inject_adapter_in_model(KINDS[kind](), model, "one")
    adapted, inputs = capture_lora_baseline(model, None), torch.randn(3, 8)
    output = model["layer"](inputs)
    model["layer"].merge()
    assert torch.allclose(model["layer"](inputs), output, atol=1e-5)
    since_adapted, since_bare = found_of(model, adapted), found_of(model, bare)
    assert since_adapted["effective"] is None
    assert since_bare["effective"] is True
    change = since_bare["unet_weight_changes"]["keys_value_changed"]["layer.weight"]
    norm = float((by_forward(model["layer"], before.shape) - before).norm())
    assert change["delta_norm"] == pytest.approx(norm, rel=1e-3)


@pytest.mark.skipif(not hasattr(peft, "BeftConfig"), reason="this PEFT has no BEFT")
def test_an_adapter_of_the_bias_alone_acts_by_it() -> None:
    model: Any = nn.ModuleDict({"layer": nn.Linear(8, 12)}).eval()
    baseline = capture_lora_baseline(model, None)
    inject_adapter_in_model(peft.BeftConfig(**TARGET), model, "one")
    with torch.no_grad():
        model["layer"].beft_bias["one"] += torch.randn(12)
    norm = float(model["layer"].beft_bias["one"].detach().double().norm())
    for merged in (False, True):
        if merged:
            model["layer"].merge()
        found = found_of(model, baseline)
        assert found["effective"] is True
        assert found["unet_weight_changes"]["delta_norm"] == pytest.approx(norm, rel=1e-3)


def test_two_of_a_kind_that_only_peft_merges_are_not_known() -> None:
    model: Any = nn.ModuleDict({"layer": nn.Linear(8, 12)}).eval()
    baseline = capture_lora_baseline(model, None)
    for adapter in ("one", "two"):
        inject_adapter_in_model(KINDS["hra"](), model, adapter)
    model["layer"].set_adapter(["one", "two"])
    found = found_of(model, baseline)
    assert found["unet_weight_changes"]["checked"]["layer.weight"]["result"] == "unavailable"
    assert found["effective"] is None


def test_an_untrained_rotation_is_known_to_change_nothing() -> None:
    model: Any = nn.ModuleDict({"layer": nn.Linear(8, 12)})
    baseline = capture_lora_baseline(model, None)
    inject_adapter_in_model(OFTConfig(r=0, oft_block_size=4, **TARGET), model, "one")
    analysis = analyze_lora_application_results(baseline, model, None, model, is_untrained=True)
    assert analysis["effective"] is False
    assert [(one["id"], one["severity"]) for one in analysis["findings"]] == [("lora_untrained", "info")]
    assert ": its change is zero in 1 weight, as before training" in analysis["findings"][0]["message"]


def test_a_rotation_of_windows_has_a_reason() -> None:
    model: Any = nn.ModuleDict({"layer": nn.Conv2d(8, 12, 3)})
    baseline = capture_lora_baseline(model, None)
    inject_adapter_in_model(KINDS["oft"](), model, "one")
    found = analyze_lora_application_results(baseline, model, None, model)
    check = found["unet_weight_changes"]["checked"]["layer.weight"]
    assert check["result"] == "unavailable"
    assert "windows" in check["unavailable"]["used_norm"]
    assert found["effective"] is None


@pytest.mark.parametrize("kind", KINDS)
def test_asking_in_bfloat16_leaves_every_parameter_where_it_is(kind: str) -> None:
    """PEFT's merges of some kinds put copies in the place of an adapter's tensors, on a CPU in bfloat16."""
    model = nn.ModuleDict({"layer": nn.Linear(8, 12)}).to(torch.bfloat16)
    inject_adapter_in_model(KINDS[kind](), model)
    before = {name: (id(own), own.data_ptr(), own.detach().clone()) for name, own in model.named_parameters()}

    UsedWeights(model).of("layer.weight")

    for name, own in model.named_parameters():
        assert (id(own), own.data_ptr()) == before[name][:2], name
        assert torch.equal(own, before[name][2]), name
