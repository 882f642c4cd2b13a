"""LoRAs on projections that diffusers has joined: attentions then run copies of the weights without them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families import generate, make_pipeline
from tests.families.loras import lora_state, write

import sigmascope

pytestmark = pytest.mark.slow
DENOISERS = {"sd15": "unet", "flux": "transformer", "sd3": "transformer", "wan": "transformer"}


def made(family: str, folder: Path) -> tuple[Any, Any, str]:
    pipeline, part = make_pipeline(family), DENOISERS[family]
    state = lora_state(pipeline, [part], only=".to_k")
    return pipeline, getattr(pipeline, part), str(write(state, folder / "style.safetensors"))


@pytest.mark.parametrize("family", DENOISERS)
def test_a_lora_loaded_after_joining_does_nothing(family: str, tmp_path: Path) -> None:
    pipeline, denoiser, file = made(family, tmp_path)
    denoiser.fuse_qkv_projections()
    before = generate(pipeline, family)
    with sigmascope.watch(pipeline) as run:
        pipeline.load_lora_weights(file, adapter_name="style")
    assert torch.equal(generate(pipeline, family), before)
    analysis = run.stage("lora_application").facts["lora_application"]
    assert analysis["effective"] is False
    assert analysis["findings"][0]["id"] == "lora_bypassed"


@pytest.mark.parametrize("family", DENOISERS)
def test_joining_leaves_out_a_lora_until_they_are_separated(family: str, tmp_path: Path) -> None:
    pipeline, denoiser, file = made(family, tmp_path)
    plain = generate(pipeline, family)
    pictures, findings = [], []
    with sigmascope.watch(pipeline):
        pipeline.load_lora_weights(file, adapter_name="style")
    for change in (denoiser.fuse_qkv_projections, denoiser.unfuse_qkv_projections):
        change()
        with sigmascope.watch(pipeline) as run:
            pictures.append(generate(pipeline, family))
        findings.append([finding.id for finding in run.record().findings if finding.id.startswith("lora_")])
    assert [torch.allclose(picture, plain, atol=1e-6) for picture in pictures] == [True, False]
    assert findings == [["lora_bypassed"], []]
