"""The first sentence of the first finding names why a LoRA does nothing."""

import re
from pathlib import Path

import pytest
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
