"""A LoRA of ComfyUI's node `CreateHookLora`, in the conditioning of a run that its own sampler makes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.comfy_shapes.adapters import random
from tests.comfy_shapes.checkout import Checkout
from tests.comfy_shapes.real import kohya_file, real_clip, unet_patcher
from torch import Tensor

from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline

pytestmark = pytest.mark.comfyui

NEVER = {"lora_not_applied", "lora_not_loaded", "lora_partly_loaded", "lora_without_effect"}
Found = Mapping[str, Any]


@pytest.fixture
def run(comfy: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Samples two steps without the hook and with it; what was found while it sampled and afterwards."""
    unet, clip = unet_patcher(comfy), real_clip(comfy)
    path = tmp_path / "style.safetensors"
    save_file(kohya_file(comfy, unet, clip), path)
    comfy.module("folder_paths").add_model_folder_path("loras", str(tmp_path))
    node, hooks = comfy.module("comfy_extras.nodes_hooks").CreateHookLora(), comfy.module("comfy.hooks")
    sample = comfy.module("comfy.sample")

    def denoised(conditioning: Any, callback: Any = None) -> Tensor:
        latent = torch.zeros(1, 4, 8, 8)
        arguments = (unet, random(1, 4, 8, 8), 2, 1.0, "euler", "normal", conditioning, conditioning, latent)
        output: Tensor = sample.sample(*arguments, callback=callback, disable_pbar=True, seed=0)
        return output

    def sampled() -> tuple[Tensor, Tensor, list[Found], Found]:
        plain: Any = [[random(1, 7, 32, seed=1), {}]]
        without = denoised(plain)
        baseline = capture_lora_baseline(unet, clip, path)
        (group,) = node.create_hook("style.safetensors", 0.8, 0.8)
        hooked = hooks.set_hooks_for_conditioning(plain, group)
        meanwhile: list[Found] = []

        def look(*_: object) -> None:
            meanwhile.append(analyze_lora_application_results(baseline, unet, clip, (hooked,)))

        with_hook = denoised(hooked, look)
        return (
            without,
            with_hook,
            meanwhile,
            analyze_lora_application_results(baseline, unet, clip, (hooked,)),
        )

    return sampled


def test_it_acts_while_it_samples_and_is_never_said_not_to_be_applied(run: Any) -> None:
    without, with_hook, meanwhile, afterwards = run()
    assert not torch.equal(without, with_hook)
    assert len(meanwhile) == 2
    for found in (*meanwhile, afterwards):
        assert found["effective"] is not False
        assert not {finding["id"] for finding in found["findings"]} & NEVER
    assert {found["effective"] for found in meanwhile} == {True}
    assert afterwards["effective"] is None
    assert "conditioning" in afterwards["unavailable"]["effective"]
    assert "lora_in_conditioning" in [finding["id"] for finding in afterwards["findings"]]
