"""PEFT takes the weights of `nn.MultiheadAttention` out of the module while it merges, and puts them back when asked."""

from typing import Any

import pytest
import torch
from torch import nn

from sigmascope.probes.models import module_facts
from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline

pytestmark = pytest.mark.filterwarnings("ignore:All adapters are already merged", "ignore:Already unmerged")
KEYS = {"0.in_proj_weight", "0.out_proj.weight"}


@pytest.fixture
def merged() -> Any:
    """The model, its baseline, and what PEFT put around it, merged."""
    import peft

    torch.manual_seed(0)
    model = nn.Sequential(nn.MultiheadAttention(8, 2))
    baseline = capture_lora_baseline(model, None)
    config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config)
    wrapped.merge_adapter()
    return model, baseline


def test_merged_weights_of_attention_are_changed_and_not_gone(merged: Any) -> None:
    model, baseline = merged
    weights = analyze_lora_application_results(baseline, model, None, model)["unet_weight_changes"]
    assert weights["keys_removed"] == []
    assert weights["keys_value_changed"].keys() == KEYS
    assert not weights["not_as_predicted"]


def test_weights_of_attention_stay_the_objects_that_they_are(merged: Any) -> None:
    model, baseline = merged
    inner = model[0].base_layer
    before = (inner.in_proj_weight, set(vars(inner)))
    analyze_lora_application_results(baseline, model, None, model)
    facts = module_facts(model)
    assert inner.in_proj_weight is before[0]
    assert set(vars(inner)) == before[1]
    assert facts.parameters == 4 * 8 * 8 + 4 * 8 + 2 * 2 * 8 + 2 * (
        8 + 24
    )  # the layer's own and both adapters'
