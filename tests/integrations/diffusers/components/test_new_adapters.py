"""Adapters that a script makes in place of loading them: `add_adapter`, and PEFT's functions."""

from collections.abc import Callable
from math import sqrt
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, get_peft_model, inject_adapter_in_model
from tests.families import generate, make_pipeline
from tests.integrations.diffusers.marks import left_behind
from torch import nn

import sigmascope

pytestmark = pytest.mark.slow
WAYS: dict[str, Callable[[nn.Module, LoraConfig], Any]] = {
    "add_adapter": lambda model, config: model.add_adapter(config),  # type: ignore[operator]
    "inject_adapter_in_model": lambda model, config: inject_adapter_in_model(config, model),
    "get_peft_model": get_peft_model,
}


@torch.no_grad()
def norm_of(model: nn.Module) -> float:
    """√Σ‖scale · BA‖² by the factors, in float64."""
    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "lora_B")]
    products = (
        scale * layer.lora_B[name].weight.double() @ layer.lora_A[name].weight.double()
        for layer in layers
        for name, scale in layer.scaling.items()
    )
    return sqrt(sum(float(product.square().sum()) for product in products))


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_an_adapter_that_is_made_is_a_stage(way: str, trained: bool) -> None:
    pipeline = make_pipeline("sd15")
    before = generate(pipeline, "sd15", num_inference_steps=1)
    with sigmascope.watch(pipeline) as run:
        WAYS[way](pipeline.unet, LoraConfig(r=2, init_lora_weights=not trained, target_modules=["to_q"]))
        elsewhere = nn.ModuleDict({"to_q": nn.Linear(4, 4)})
        inject_adapter_in_model(LoraConfig(r=2, target_modules=["to_q"]), elsewhere)
    (stage,) = (stage for stage in run.record().walk() if stage.name == "lora_application")
    analysis = stage.facts["lora_application"]
    moved = not torch.equal(generate(pipeline, "sd15", num_inference_steps=1), before)
    assert analysis["effective"] is moved is trained
    assert analysis["unet_weight_changes"]["delta_norm"] == pytest.approx(norm_of(pipeline.unet), rel=1e-3)
    found = [(finding["id"], finding["severity"]) for finding in analysis["findings"]]
    assert found == ([] if trained else [("lora_untrained", "info")])
    assert left_behind() == []


ZEROS = {
    "lora_B": LoraConfig(r=2, target_modules=["to_q"]),
    "hada_w2_b": LoHaConfig(r=2, target_modules=["to_q"]),
    "lokr_w1": LoKrConfig(r=2, target_modules=["to_q"]),
    "lora_B and lora_B.bias": LoraConfig(r=2, lora_bias=True, target_modules=["to_out.0"]),
}
"""What PEFT sets to zero of each kind before training."""


@pytest.mark.parametrize("factor", ZEROS)
def test_an_untrained_adapter_names_the_factor_that_is_zero(factor: str) -> None:
    pipeline = make_pipeline("sd15")
    with sigmascope.watch(pipeline) as run:
        pipeline.unet.add_adapter(ZEROS[factor])
    for name in factor.split(" and "):
        module, _, bias = name.partition(".")
        layers: list[Any] = [layer for layer in pipeline.unet.modules() if hasattr(layer, module)]
        held = [getattr(layer, module)["default"] for layer in layers if "default" in getattr(layer, module)]
        tensors = [one if isinstance(one, torch.Tensor) else getattr(one, bias or "weight") for one in held]
        assert tensors
        assert not any(tensor.any() for tensor in tensors)
    (finding,) = run.stage("lora_application").facts["lora_application"]["findings"]
    assert finding["id"] == "lora_untrained"
    assert f": {factor} is zero in " in finding["message"]


def test_a_text_encoders_adapter_is_its_own() -> None:
    pipeline = make_pipeline("sd15")
    with sigmascope.watch(pipeline) as run:
        pipeline.text_encoder.add_adapter(
            LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"]), "style"
        )
        pipeline.text_encoder.disable_adapters()
    stages = [stage for stage in run.record().walk() if stage.name == "lora_application"]
    assert [stage.facts["method"] for stage in stages] == ["add_adapter", "disable_adapters"]
    norms = [stage.facts["lora_application"]["clip_weight_changes"]["delta_norm"] for stage in stages]
    assert norms == pytest.approx([norm_of(pipeline.text_encoder)] * 2, rel=1e-3)


def test_a_vaes_adapter_is_a_stage() -> None:
    pipeline = make_pipeline("sd15")
    latent = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = pipeline.vae.decode(latent).sample
        with sigmascope.watch(pipeline) as run:
            pipeline.vae.add_adapter(
                LoraConfig(r=2, init_lora_weights=False, target_modules=["to_q"]), "skip"
            )
        moved = not torch.equal(pipeline.vae.decode(latent).sample, before)
    analysis = run.stage("lora_application").facts["lora_application"]
    assert analysis["effective"] is moved is True
    assert analysis["unet_weight_changes"]["delta_norm"] == pytest.approx(norm_of(pipeline.vae), rel=1e-3)
