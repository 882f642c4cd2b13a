"""What a watch says of each LoRA step of a whole pipeline, beside its pictures and the files' numbers in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families import generate, make_pipeline
from tests.families.loras import lora_state, parts_of, write
from tests.stages.lora_application.test_after_minus_before import (
    DISABLE,
    FUSE,
    UNLOAD,
    Act,
    Host,
    load,
    norm_of,
    together,
    weigh,
)

import sigmascope
from sigmascope.analysis.lora_acting import acting_lora

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Already", "ignore:Adapter", "ignore:.*peft_config", "ignore:No LoRA"),
]
PROGRAM: tuple[tuple[Act, dict[str, float]], ...] = (
    (load("x", "a"), {"x": 1.0}),
    (load("y", "a", hotswap=True), {"x": -1.0, "y": 1.0}),
    (load("y", "b"), {}),  # diffusers makes the last one the only active one
    (weigh(a=0.25, b=0.25), {"y": -0.5}),
    (together(FUSE, UNLOAD), {}),
)


class FileHost(Host):
    """A host whose LoRAs are files."""

    def __init__(self, family: str, folder: Path) -> None:
        super().__init__(family)
        self.family = family
        self.paths = {
            name: write(state, folder / f"{name}.safetensors") for name, state in self.files.items()
        }

    def load(self, file: str, adapter: str, **options: Any) -> None:
        self.pipeline.load_lora_weights(str(self.paths[file]), adapter_name=adapter, **options)

    def picture(self, **arguments: Any) -> torch.Tensor:
        return generate(self.pipeline, self.family, num_inference_steps=1, **arguments)


@pytest.mark.parametrize("family", ["sdxl", "flux", "wan"])
def test_each_step_is_told_as_it_moves_the_picture(family: str, tmp_path: Path) -> None:
    host = FileHost(family, tmp_path)
    pictures = [host.picture()]
    with sigmascope.watch(host.pipeline) as watching:
        for act, _ in PROGRAM:
            act(host)
            pictures.append(host.picture())
    stages = [stage for stage in watching.record().walk() if stage.name == "lora_application"]
    for stage, (_, change), *around in zip(stages, PROGRAM, pictures, pictures[1:], strict=False):
        found = stage.facts["lora_application"]
        norm = norm_of(host.files, change) if change else 0.0
        assert (float((around[1] - around[0]).abs().max()) > 1e-4) is (norm > 0.0) is found["effective"]
        assert found["unet_weight_changes"]["delta_norm"] == pytest.approx(norm, rel=1e-3, abs=0.0)
    assert len(stages) == len(PROGRAM) + 1
    assert stages[-1].facts["lora_application"]["effective"] is False


X = load("x", "a")
IDLE: dict[str, tuple[Act, ...]] = {
    "lora_is_zero": (load("zero", "a"),),
    "lora_disabled": (X, DISABLE),
    "lora_strength_zero": (X, weigh(a=0.0)),
    "lora_cancelled": (X, load("x", "b"), weigh(a=0.5, b=-0.5)),
    "lora_opposite": (X, load("negation", "b"), weigh(a=0.5, b=0.5)),
    "lora_scaled_to_zero": (X,),
}


def test_a_watch_of_the_call_alone_says_why_the_lora_on_it_does_nothing(tmp_path: Path) -> None:
    host = FileHost("wan", tmp_path)
    zero = {name: factor * ("lora_A" in name) for name, factor in host.files["x"].items()}
    host.paths["zero"] = write(zero, tmp_path / "zero.safetensors")
    negation = {name: factor * (-1) ** ("lora_B" in name) for name, factor in host.files["x"].items()}
    host.paths["negation"] = write(negation, tmp_path / "negation.safetensors")
    bare, told = host.picture(), {}
    for cause, acts in IDLE.items():
        for act in acts:
            act(host)
        scale = {"attention_kwargs": {"scale": 0.0}} if cause == "lora_scaled_to_zero" else {}
        with sigmascope.watch(host.pipeline) as watching:
            picture = host.picture(**scale)
        assert torch.allclose(picture, bare, atol=1e-5)
        findings = [finding.id for finding in watching.record().findings]
        told[cause] = [finding for finding in findings if finding.startswith("lora_")]
        UNLOAD(host)
    assert told == {cause: [cause] for cause in IDLE}


def test_the_strength_on_one_of_two_text_encoders_is_not_called_that_of_both() -> None:
    """The pipeline that loads the LoRA is not the watched one, whose models it shares: each model has a stage of its own."""
    from diffusers import StableDiffusionXLImg2ImgPipeline

    loading = make_pipeline("sdxl")
    state = lora_state(loading, parts_of("sdxl"), size=0.1)
    changes, weights = 0.0, 0.0
    for name in (key.removesuffix(".lora_A.weight") for key in state if key.endswith(".lora_A.weight")):
        part, _, layer = name.partition(".")
        if part == "text_encoder_2":
            weight = getattr(loading, part).get_submodule(layer).weight
            delta = state[f"{name}.lora_B.weight"].double() @ state[f"{name}.lora_A.weight"].double()
            changes, weights = (
                changes + float(delta.square().sum()),
                weights + float(weight.double().square().sum()),
            )
    with sigmascope.watch(StableDiffusionXLImg2ImgPipeline.from_pipe(loading)) as watching:
        loading.load_lora_weights(state, adapter_name="style")
    said = acting_lora(watching.record()) or ""
    assert f" and {100 * (changes / weights) ** 0.5:.2g} % in text_encoder_2." in said
