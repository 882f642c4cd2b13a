"""LoRAs on projections that diffusers has joined: attentions then run copies of the weights without them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families import generate, make_pipeline
from tests.families.loras import lora_state, write

import sigmascope

pytestmark = pytest.mark.slow
DENOISERS = {"sd15": "unet", "flux": "transformer", "sd3": "transformer", "wan": "transformer"}


PROGRAMS: dict[str, list[bool | None]] = {
    "load join separate": [True, True, True],
    "load fuse join unfuse separate": [True, False, False, False, False],
    "join load fuse separate": [None, False, False, True],
    "load join fuse separate unfuse": [True, True, False, True, False],
    "load fuse join separate unfuse": [True, False, False, False, False],
    "load fuse join unload separate": [True, False, False, False, None],
}
"""What a program does, and whether each step moves the picture; None: there is no LoRA, and so no stage."""


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


@pytest.mark.parametrize("family", ["sd15", "flux"])
def test_a_lora_fused_after_joining_is_as_little_used(family: str, tmp_path: Path) -> None:
    pipeline, denoiser, file = made(family, tmp_path)
    denoiser.fuse_qkv_projections()
    before = generate(pipeline, family)
    with sigmascope.watch(pipeline) as run:
        pipeline.load_lora_weights(file, adapter_name="style")
        pipeline.fuse_lora()
    assert torch.equal(generate(pipeline, family), before)
    analysis = run.stages[-1].facts["lora_application"]
    assert analysis["effective"] is False
    assert [finding["id"] for finding in analysis["findings"]] == ["lora_bypassed"]


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


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("family", ["sd15", "flux"])
def test_what_joined_projections_run_is_after_minus_before(family: str, program: str, tmp_path: Path) -> None:
    pipeline, denoiser, file = made(family, tmp_path)
    steps: dict[str, Callable[[], object]] = {  # a method is looked up when it is called: watched then
        "load": lambda: pipeline.load_lora_weights(file, adapter_name="style"),
        "fuse": lambda: pipeline.fuse_lora(),
        "unfuse": lambda: pipeline.unfuse_lora(),
        "unload": lambda: pipeline.unload_lora_weights(),
        "join": lambda: denoiser.fuse_qkv_projections(),
        "separate": lambda: denoiser.unfuse_qkv_projections(),
    }
    picture = generate(pipeline, family)
    moved: list[bool] = []
    told: list[list[Any]] = []
    for step in program.split():
        with sigmascope.watch(pipeline) as run:
            steps[step]()
        now = generate(pipeline, family)
        moved.append(not torch.allclose(now, picture, atol=1e-5))
        stages = [stage for stage in run.record().walk() if stage.name == "lora_application"]
        told.append([stage.facts["lora_application"]["effective"] for stage in stages])
        picture = now
    expected = PROGRAMS[program]
    assert moved == [bool(moves) for moves in expected]
    assert told == [[] if moves is None else [moves] for moves in expected]


def test_the_change_of_joining_is_all_that_the_lora_made(tmp_path: Path) -> None:
    pipeline, unet, file = made("sd15", tmp_path)
    pipeline.load_lora_weights(file, adapter_name="style")
    layers = [module for module in unet.modules() if hasattr(module, "get_delta_weight")]
    whole = torch.cat([layer.get_delta_weight("style").detach().double().flatten() for layer in layers])
    with sigmascope.watch(pipeline) as run:
        unet.fuse_qkv_projections()
    changes = run.stage("lora_application").facts["lora_application"]["unet_weight_changes"]
    assert changes["delta_norm"] == pytest.approx(float(whole.norm()), rel=1e-5)
    assert len(changes["keys_value_changed"]) == len(layers)


def test_of_joined_projections_beside_others_the_advice_separates_them(tmp_path: Path) -> None:
    pipeline = make_pipeline("sd15")
    file = write(lora_state(pipeline, ["unet"], only=".attn1.to_"), tmp_path / "style.safetensors")
    pipeline.unet.fuse_qkv_projections()
    with sigmascope.watch(pipeline) as run:
        pipeline.load_lora_weights(file, adapter_name="style")
    found = {finding.id: finding for finding in run.record().findings}
    assert (found["lora_not_acting"].advice or "").startswith("Separate them: unfuse_qkv_projections")
    assert found["lora_inactive"].message.endswith("on projections that are joined.")
    pipeline.unet.unfuse_qkv_projections()
    before = generate(pipeline, "sd15")
    with sigmascope.watch(pipeline) as run:
        pipeline.disable_lora()
    (off,) = (finding for finding in run.record().findings if finding.id == "lora_inactive")
    assert off.message.endswith("off or at strength 0.")
    assert not torch.equal(generate(pipeline, "sd15"), before)
