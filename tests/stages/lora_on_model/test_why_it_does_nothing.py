"""The first sentence of the first finding names why a LoRA does nothing."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_file
from tests.stages.lora_application.test_random_programs import Tiny, file_of
from tests.stages.lora_on_model.idle_loras import PLANTS, Plant

from sigmascope.lora.verdict import VERDICTS
from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline


def test_there_are_a_hundred_for_at_least_fifteen_reasons() -> None:
    assert len(PLANTS) >= 100
    assert len({plant.reason for plant in PLANTS}) >= 15
    assert {plant.reason for plant in PLANTS} <= VERDICTS.keys()


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: f"{plant.reason} {plant.variation}")
def test_first_sentence_names_the_reason(plant: Plant, tmp_path_factory: pytest.TempPathFactory) -> None:
    first = plant.findings(tmp_path_factory.mktemp("file"))[0]
    assert plant.reason in (first["id"], first["evidence"].get("reason"))
    assert re.search(plant.phrase, re.split(r"\.\s", first["message"])[0]), first["message"]


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_beside_one_that_acts_a_lora_that_is_off_is_told_by_its_name_and_once(tmp_path: Path) -> None:
    model = Tiny().requires_grad_(False)
    told = []
    for name in "abc":
        baseline = capture_lora_baseline(model, None)
        model.add_adapter(LoraConfig(r=2, init_lora_weights=False, target_modules=["two"]), name)
        model.set_adapter("a")
        found = analyze_lora_application_results(baseline, model, None, model)
        told.append({finding["id"]: finding["message"] for finding in found["findings"]})
    assert told[0] == {}
    for number, name in enumerate("bc", 1):
        words = f"The LoRA {name} changes nothing: its adapter is not active on 1 weight."
        assert told[number]["lora_not_active"] == words
        assert "lora_as_before" in told[number]


SWITCHES: dict[str, Callable[[Any], object]] = {
    "disabled": lambda model: model.disable_adapters(),
    "strength 0": lambda model: model.set_adapters(["a"], [0.0]),
    "zeros": lambda model: model.two.lora_B["a"].weight.data.zero_(),
}


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize(
    "changes", [{"bias": "lora_only"}, {"bias": "all"}, {"init_lora_weights": "pissa"}, {}], ids=str
)
def test_a_lora_that_changed_the_model_itself_is_open_where_it_is_off(
    switch: str, changes: dict[str, Any]
) -> None:
    """PEFT trains biases of the model in place, and PiSSA takes the first directions out of its weights."""
    model: Any = Tiny().requires_grad_(False).eval()
    inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    bare = model.two(inputs)
    config = {"r": 2, "target_modules": ["two"], "init_lora_weights": False, **changes}
    model.add_adapter(LoraConfig(**config), "a")
    if "bias" in changes:
        model.two.base_layer.bias.data += 1.0  # as training does
    SWITCHES[switch](model)
    baseline = capture_lora_baseline(model, None)
    SWITCHES[switch](model)
    found = analyze_lora_application_results(baseline, model, None, model)
    acts = not torch.allclose(model.two(inputs), bare, atol=1e-6)
    assert acts is bool(changes)
    assert ("lora_in_base" in {one["id"] for one in found["findings"]}) is acts
    assert any("changes nothing" in one["message"] for one in found["findings"]) is not acts


def test_a_lora_that_trains_biases_of_layers_without_any_does_nothing_where_it_is_off() -> None:
    model: Any = Tiny().requires_grad_(False)
    model.add_adapter(LoraConfig(r=2, target_modules=["one"], bias="lora_only", init_lora_weights=False), "a")
    model.disable_adapters()
    found = analyze_lora_application_results(capture_lora_baseline(model, None), model, None, model)
    assert [one["id"] for one in found["findings"]] == ["lora_disabled"]


def test_a_new_adapter_that_trains_biases_changes_nothing_yet() -> None:
    model: Any = Tiny().requires_grad_(False)
    baseline = capture_lora_baseline(model, None)
    model.add_adapter(LoraConfig(r=2, target_modules=["two"], bias="lora_only"), "a")
    found = analyze_lora_application_results(baseline, model, None, model, is_untrained=True)
    assert found["effective"] is False
    assert [one["id"] for one in found["findings"]] == ["lora_untrained"]


@pytest.mark.parametrize("size", [1e-12, 1e-3])
def test_a_change_that_moves_no_bit_is_lost_in_rounding(size: float) -> None:
    model = Tiny().requires_grad_(False).eval()
    inputs = torch.randn(64, 24, generator=torch.Generator().manual_seed(0))
    baseline, before = capture_lora_baseline(model, None), model.one(inputs)
    state = {name: size * tensor for name, tensor in file_of(model, 3).items() if name.startswith("one.")}
    model.load_lora_adapter(state, prefix=None)
    found = analyze_lora_application_results(baseline, model, None, model)
    moved = not torch.equal(model.one(inputs), before)
    assert found["effective"] is moved is (size > 1e-6)
    ids = [finding["id"] for finding in found["findings"]]
    assert ids == ([] if moved else ["lora_lost_in_rounding"])


def test_factors_that_the_loader_found_no_values_for_are_told_as_such(tmp_path: Path) -> None:
    """A state dict of PEFT's layers as it is: diffusers looks for the names without the adapter's."""
    model = Tiny().requires_grad_(False)
    state = {
        f"transformer.{name.replace('.weight', '.default.weight')}": tensor
        for name, tensor in file_of(model, 3).items()
    }
    save_file(state, tmp_path / "style.safetensors")
    models = {"transformer": model}
    baseline = capture_lora_baseline(models, None, tmp_path / "style.safetensors")
    model.load_lora_adapter(str(tmp_path), weight_name="style.safetensors", low_cpu_mem_usage=True)
    assert any(parameter.is_meta for parameter in model.parameters())
    found = analyze_lora_application_results(baseline, models, None, model)
    assert found["effective"] is True
    assert not [one for one in found["findings"] if one["id"] in ("lora_unreadable", "lora_changes_failed")]
    first = found["findings"][0]
    assert (first["id"], first["severity"]) == ("lora_not_loaded", "critical")
    assert "has no values" in first["message"]
    without = next(one for one in found["findings"] if one["id"] == "lora_without_values")
    assert "3 changes are without values" in without["message"]


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_a_lora_that_takes_the_place_of_its_like_does_not_count_as_off(tmp_path: Path) -> None:
    """diffusers makes the adapter that was loaded last the only active one."""
    model = Tiny().requires_grad_(False)
    state = {f"transformer.{name}": tensor for name, tensor in file_of(model, 3).items()}
    save_file(state, tmp_path / "style.safetensors")
    load = {"weight_name": "style.safetensors"}
    model.load_lora_adapter(str(tmp_path), adapter_name="a", **load)
    models = {"transformer": model}
    baseline = capture_lora_baseline(models, None, tmp_path / "style.safetensors")
    model.load_lora_adapter(str(tmp_path), adapter_name="b", **load)
    found = analyze_lora_application_results(baseline, models, None, model)
    assert found["effective"] is False
    assert [finding["id"] for finding in found["findings"]] == ["lora_as_before"]
