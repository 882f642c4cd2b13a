"""A file of which a module is broken, beside a model."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from sigmascope.lora.applied_verdict import judge_applied
from sigmascope.lora.compatibility import judge_lora


def test_a_broken_module_is_named_and_the_rest_is_held_to_the_model(tmp_path: Path) -> None:
    model = nn.ModuleDict({"one": nn.Linear(8, 8), "two": nn.Linear(8, 8)})
    path = tmp_path / "lora.safetensors"
    state = {f"{name}.lora_up.weight": torch.ones(8, 2) for name in ("one", "two")}
    save_file(state | {"one.lora_down.weight": torch.ones(2, 8)}, path)
    verdict = judge_lora(path, {"denoiser": model})
    assert verdict.error is None
    assert [(module.name, module.reason, module.norm) for module in verdict.modules] == [
        ("one", None, 16.0),
        ("two", "broken", None),
    ]
    assert not verdict.fits
    assert [finding.message for finding in verdict.findings if finding.id == "lora_broken"] == [
        "1 of 2 modules cannot be read: two (has lora_up.weight but no lora_down.weight)."
    ]
    assert judge_applied(path, (), {"denoiser": model}).error is None
