"""The first sentence of the first finding names why a LoRA does nothing."""

import re

import pytest
from tests.stages.lora_on_model.idle_loras import PLANTS, Plant

from sigmascope.lora.verdict import VERDICTS


def test_there_are_a_hundred_for_at_least_fifteen_reasons() -> None:
    assert len(PLANTS) >= 100
    assert len({plant.reason for plant in PLANTS}) >= 15
    assert {plant.reason for plant in PLANTS} <= VERDICTS.keys()


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: f"{plant.reason} {plant.variation}")
def test_first_sentence_names_the_reason(plant: Plant, tmp_path_factory: pytest.TempPathFactory) -> None:
    first = plant.findings(tmp_path_factory.mktemp("file"))[0]
    assert plant.reason in (first["id"], first["evidence"].get("reason"))
    assert re.search(plant.phrase, re.split(r"\.\s", first["message"])[0]), first["message"]
