"""Adapters that a script makes in place of loading them: `add_adapter`, and PEFT's functions."""

from collections.abc import Callable
from copy import deepcopy
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline
from diffusers.models.controlnets.multicontrolnet import MultiControlNetModel
from peft import (
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftModel,
    get_peft_model,
    inject_adapter_in_model,
)
from safetensors.torch import load_file, save_file
from tests.families import generate, make_pipeline
from tests.integrations.diffusers.marks import left_behind
from tests.integrations.diffusers.other_pipelines import controlnet
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

import sigmascope
from sigmascope.analysis.lora_acting import acting_lora
from sigmascope.analysis.lora_state import standing

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


@pytest.mark.parametrize("trained", [False, True])
def test_a_lora_whose_gradients_alone_are_others_is_read_as_one(trained: bool) -> None:
    """VeLoRA runs up · down, and keeps less of the activations for the backward pass."""
    velora: Any = pytest.importorskip("peft.tuners.lora.config")
    if not hasattr(velora, "VeloraConfig"):
        pytest.skip("this PEFT has no VeLoRA")
    options: dict[str, Any] = {"velora_config": velora.VeloraConfig()}
    config = LoraConfig(r=2, init_lora_weights=not trained, target_modules=["to_q"], **options)
    pipeline = make_pipeline("sd15")
    before = generate(pipeline, "sd15", num_inference_steps=1)
    with sigmascope.watch(pipeline) as run:
        pipeline.unet.add_adapter(config)
        moved = not torch.equal(generate(pipeline, "sd15", num_inference_steps=1), before)
    (stage,) = (stage for stage in run.record().walk() if stage.name == "lora_application")
    analysis = stage.facts["lora_application"]
    assert analysis["effective"] is moved is trained
    assert analysis["unet_weight_changes"]["delta_norm"] == pytest.approx(norm_of(pipeline.unet), rel=1e-3)


@pytest.mark.parametrize("way", ["from_pretrained", "load_adapter"])
def test_an_adapter_that_peft_loads_is_judged_by_the_values_of_its_file(way: str, tmp_path: Path) -> None:
    """PEFT injects it first, with a B of zeros."""
    pipeline, config = make_pipeline("sd15"), LoraConfig(r=2, target_modules=["to_q"])
    for name in ("one", "two"):
        trained = get_peft_model(deepcopy(pipeline.unet), config, name)
        for key, parameter in trained.named_parameters():
            parameter.data += 0.1 * torch.randn_like(parameter) * ("lora_B" in key)
        trained.save_pretrained(str(tmp_path))
    before = generate(pipeline, "sd15", num_inference_steps=1)
    with sigmascope.watch(pipeline) as run:
        model = PeftModel.from_pretrained(pipeline.unet, tmp_path / "one", "one")
        if way == "load_adapter":
            model.load_adapter(tmp_path / "two", "two")
            model.set_adapter("two")
            model.delete_adapter("one")
        pipeline.unet = model
        moved = not torch.equal(generate(pipeline, "sd15", num_inference_steps=1), before)
    stages = [stage for stage in run.record().walk() if stage.name == "lora_application"]
    analysis = stages[0].facts["lora_application"]
    assert analysis["effective"] is moved is True
    assert "adapter_model.safetensors" in stages[0].facts["file"]
    if way == "from_pretrained":
        norm = norm_of(model)
        assert analysis["unet_weight_changes"]["delta_norm"] == pytest.approx(norm, rel=1e-3)
    else:
        assert [stage.facts["method"] for stage in stages[:2]] == ["load_adapter"] * 2
        assert "lora_untrained" not in {one["id"] for one in stages[1].facts["lora_application"]["findings"]}
    assert left_behind() == []


TRAINED = {
    "lora": LoraConfig(r=2, init_lora_weights=False, target_modules=["to_q"]),
    "loha": LoHaConfig(r=2, init_weights=False, target_modules=["to_q"]),
    "lokr": LoKrConfig(r=2, init_weights=False, target_modules=["to_q"]),
}
"""LoHa and LoKr have alpha 8 where nothing is said: a scale of 4."""


@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.parametrize("way", ["merge_and_unload", "merge_adapter", "unload"])
def test_what_peft_merges_or_takes_off_is_a_stage(way: str, kind: str) -> None:
    pipeline = make_pipeline("sd15")
    before = generate(pipeline, "sd15", num_inference_steps=1)
    with sigmascope.watch(pipeline) as run:
        pipeline.unet = get_peft_model(pipeline.unet, deepcopy(TRAINED[kind]))
        made = getattr(pipeline.unet, way)()
        pipeline.unet = made or pipeline.unet
        picture = generate(pipeline, "sd15", num_inference_steps=1)
    moved = not torch.allclose(picture, before, atol=1e-6)
    assert moved is (way != "unload")
    record = run.record()
    stages = [stage for stage in record.walk() if stage.name == "lora_application"]
    assert [stage.facts["method"] for stage in stages] == ["inject_adapter", way]
    assert stages[1].facts["lora_application"]["effective"] is not moved
    assert "model.lora_elsewhere" not in {finding.id for finding in record.findings}
    acts = acting_lora(record)
    assert acts is not None
    assert acts.startswith("The LoRA acts: " if moved else f"No LoRA acts: {way} took off what was on")
    assert ("It is merged into the weights." in str(acts)) is (way == "merge_and_unload")
    assert left_behind() == []


@pytest.mark.parametrize("way", WAYS)
def test_a_dora_that_is_made_has_its_strength(way: str) -> None:
    pipeline = make_pipeline("sd15")
    base = deepcopy(pipeline.unet)
    with sigmascope.watch(pipeline) as run:
        WAYS[way](
            pipeline.unet, LoraConfig(r=2, use_dora=True, init_lora_weights=False, target_modules=["to_q"])
        )
        generate(pipeline, "sd15", num_inference_steps=1)
    squares = [0.0, 0.0]
    for name, layer in pipeline.unet.named_modules():
        if hasattr(layer, "lora_A"):
            weight = base.get_submodule(name).weight.detach().double()
            units = torch.eye(weight.shape[1], dtype=torch.float64)
            used = deepcopy(layer).double()(units).detach().T
            squares[0] += float((used - weight).square().sum())
            squares[1] += float(weight.square().sum())
    share = 100 * sqrt(squares[0] / squares[1])
    acts = acting_lora(run.record()) or ""
    assert acts.startswith(f"The LoRA acts: ‖ΔW‖ / ‖W‖ is {share:.0f} % in the denoiser.")


def test_no_figure_is_told_of_a_kind_that_only_some_weights_are_known_of() -> None:
    pipeline = make_pipeline("sd15")
    with sigmascope.watch(pipeline) as run:
        get_peft_model(
            pipeline.unet, OFTConfig(r=2, oft_block_size=0, target_modules=["to_q"], init_weights=False)
        )
        generate(pipeline, "sd15", num_inference_steps=1)
    assert acting_lora(run.record()) == "The LoRA acts."


@pytest.mark.parametrize("kind", TRAINED)
def test_an_adapter_of_another_kind_acts_at_the_strength_that_was_set(kind: str) -> None:
    pipeline = make_pipeline("sd15")
    with sigmascope.watch(pipeline) as run:
        get_peft_model(pipeline.unet, deepcopy(TRAINED[kind]))
        generate(pipeline, "sd15", num_inference_steps=1)
    assert (acting_lora(run.record()) or "").startswith("The LoRA acts: ")


def test_merging_in_a_peft_model_that_was_there_before_the_watch_is_a_stage() -> None:
    pipeline = make_pipeline("sd15")
    pipeline.unet = get_peft_model(pipeline.unet, deepcopy(TRAINED["lora"]))
    with sigmascope.watch(pipeline) as run:
        pipeline.unet.merge_adapter()
        pipeline.unet.unload()
        generate(pipeline, "sd15", num_inference_steps=1)
    assert acting_lora(run.record()) == "The LoRA acts in the denoiser: it is merged into the weights."


MERGES: dict[str, Callable[[PeftModel], nn.Module]] = {
    "both": lambda model: model.merge_and_unload(adapter_names=["one", "two"]),
    "the one that is off": lambda model: model.merge_and_unload(adapter_names=["two"]),
    "one that was disabled": lambda model: (
        model.base_model.disable_adapter_layers(),
        model.merge_and_unload(),
    )[1],
}


@pytest.mark.parametrize("which", MERGES)
def test_what_was_off_and_is_merged_stays_in_the_weights(which: str) -> None:
    pipeline = make_pipeline("sd15")
    before = generate(pipeline, "sd15", num_inference_steps=1)
    with sigmascope.watch(pipeline) as run:
        model = get_peft_model(pipeline.unet, deepcopy(TRAINED["lora"]), adapter_name="one")
        model.add_adapter("two", deepcopy(TRAINED["lora"]))
        pipeline.unet = MERGES[which](model)
        picture = generate(pipeline, "sd15", num_inference_steps=1)
    assert not torch.allclose(picture, before, atol=1e-4)
    assert standing(run.record()) == (
        "acts",
        "The LoRA acts in the denoiser: it is merged into the weights.",
        True,
    )


@pytest.mark.parametrize(
    ("tiny", "words"), [(("blocks",), "unknown"), (("up_blocks",), "acts"), ((), "acts")], ids=str
)
def test_what_rounding_swallows_as_it_is_merged_is_not_said_to_act(tiny: tuple[str, ...], words: str) -> None:
    pipeline = make_pipeline("sd15")
    pipeline.to(torch.bfloat16)
    before = generate(pipeline, "sd15", num_inference_steps=1)
    with sigmascope.watch(pipeline) as run:
        torch.manual_seed(0)
        model = get_peft_model(pipeline.unet, deepcopy(TRAINED["lora"]))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name and any(part in name for part in tiny):
                    parameter.mul_(1e-3)
        pipeline.unet = model.merge_and_unload()
        picture = generate(pipeline, "sd15", num_inference_steps=1)
    assert torch.equal(picture, before) is (words == "unknown")
    said = standing(run.record())
    assert said is not None
    assert said.words == words
    if words == "unknown":
        assert "because merging changed 20 weights by no more than rounding" in said.says


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
def test_a_file_whose_names_peft_does_not_find_is_not_held_to_the_loaders_of_diffusers(
    tmp_path: Path,
) -> None:
    """PEFT leaves the adapter as it was made, with zeros."""
    trained = get_peft_model(make_pipeline("sd15").unet, LoraConfig(r=2, target_modules=["to_q"]))
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    trained.save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file({name.replace("model.", "model.inner.", 1): one for name, one in load_file(file).items()}, file)
    pipeline = make_pipeline("sd15")
    before = generate(pipeline, "sd15", num_inference_steps=1)
    with sigmascope.watch(pipeline) as run:
        pipeline.unet = PeftModel.from_pretrained(pipeline.unet, tmp_path)
        picture = generate(pipeline, "sd15", num_inference_steps=1)
    assert torch.equal(picture, before)
    record = run.record()
    said = standing(record)
    assert said is not None
    assert said.words == "does nothing"
    findings = {finding.id: finding.message for finding in record.findings}
    assert findings["lora_not_loaded"].startswith("None of the file's 20 modules is on the model: ")
    assert "lora_part_unnamed" not in findings
    assert not any("load_lora_weights" in message for message in findings.values())


@pytest.mark.parametrize("use_dora", [False, True], ids=["LoRA", "DoRA"])
def test_what_was_trained_in_the_watch_stays_in_the_weights_it_is_merged_into(use_dora: bool) -> None:
    pipeline = make_pipeline("sd15")
    before = generate(pipeline, "sd15", num_inference_steps=1)
    with sigmascope.watch(pipeline) as run:
        model = get_peft_model(pipeline.unet, LoraConfig(r=2, target_modules=["to_q"], use_dora=use_dora))
        for name, factor in model.named_parameters():
            if "lora_B" in name:  # stands for a training loop
                nn.init.normal_(factor, std=0.3)
        trained = generate(pipeline, "sd15", num_inference_steps=1)
        pipeline.unet = model.merge_and_unload()
        picture = generate(pipeline, "sd15", num_inference_steps=1)
    assert torch.allclose(picture, trained, atol=1e-5)
    assert not torch.allclose(picture, before, atol=1e-4)
    record = run.record()
    last = [stage for stage in record.walk() if stage.name == "lora_application"][-1]
    assert last.facts["lora_application"]["effective"] is (None if use_dora else False)
    assert standing(record) == (
        "acts",
        "The LoRA acts in the denoiser: it is merged into the weights.",
        True,
    )


@pytest.mark.parametrize("way", ["linear", "cat"])
def test_an_adapter_that_peft_makes_of_others_acts_with_its_own_strength(way: str) -> None:
    """PEFT injects it with a B of zeros, fills it, and leaves it off until `set_adapter`."""
    pipeline = make_pipeline("sd15")
    base = sqrt(
        sum(
            float(w.detach().double().square().sum())
            for n, w in pipeline.unet.named_parameters()
            if "to_q" in n
        )
    )
    with sigmascope.watch(pipeline) as run:
        model = get_peft_model(pipeline.unet, deepcopy(TRAINED["lora"]), adapter_name="one")
        model.add_adapter("two", deepcopy(TRAINED["lora"]))
        model.add_weighted_adapter(["one", "two"], [0.7, 0.3], "both", combination_type=way)
        model.set_adapter("both")
        pipeline.unet = model
        generate(pipeline, "sd15", num_inference_steps=1)
    both = [
        layer.get_delta_weight("both").detach().double()
        for layer in model.modules()
        if hasattr(layer, "lora_B")
    ]
    true = sqrt(sum(float(delta.square().sum()) for delta in both)) / base
    last = [stage for stage in run.record().walk() if stage.name == "lora_application"][-1]
    assert last.facts["method"] == "set_adapter"
    patches = last.facts["lora_application"]["unet_lora_patches"]
    assert patches["loras"]["both"]["relative_change"] == pytest.approx(true, rel=1e-3)
    acts = acting_lora(run.record()) or ""
    assert acts.startswith(f"The LoRA acts: ‖ΔW‖ / ‖W‖ is {100 * true:.0f} % in the denoiser.")


def test_a_bias_of_the_factors_has_the_strength_of_its_lora() -> None:
    pipeline = make_pipeline("sd15")
    config = LoraConfig(
        r=2, lora_alpha=8, lora_bias=True, init_lora_weights=False, target_modules=["to_out.0"]
    )
    with sigmascope.watch(pipeline) as run:
        pipeline.unet.add_adapter(config)
        generate(pipeline, "sd15", num_inference_steps=1)
    record = run.record()
    patches = record.stage("lora_application").facts["lora_application"]["unet_lora_patches"]
    assert patches["loras"]["default"]["strengths"] == [1.0]
    assert (acting_lora(record) or "").startswith("The LoRA acts: ")


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


def _one_controlnet() -> tuple[Any, nn.Module, str]:
    pipeline, _ = controlnet()
    return pipeline, pipeline.controlnet, "to_q"


def _several_controlnets() -> tuple[Any, nn.Module, str]:
    pipeline, _ = controlnet()
    pipeline.controlnet = MultiControlNetModel([pipeline.controlnet, deepcopy(pipeline.controlnet)])
    return pipeline, pipeline.controlnet.nets[1], "to_q"


def _image_encoder() -> tuple[Any, nn.Module, str]:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    encoder = CLIPVisionModelWithProjection(
        CLIPVisionConfig(image_size=16, patch_size=8, projection_dim=8, **sizes)
    )
    parts = make_pipeline("sd15").components
    pipeline = StableDiffusionPipeline(**parts | {"image_encoder": encoder, "requires_safety_checker": False})
    return pipeline, pipeline.image_encoder, "q_proj"


@pytest.mark.parametrize(
    ("make", "component"),
    [
        (_one_controlnet, "controlnet"),
        (_several_controlnets, "controlnet"),
        (_image_encoder, "image_encoder"),
    ],
)
def test_any_components_adapter_is_a_stage(make: Callable[[], tuple[Any, Any, str]], component: str) -> None:
    pipeline, model, layer = make()
    with sigmascope.watch(pipeline) as run:
        model.add_adapter(LoraConfig(r=2, init_lora_weights=False, target_modules=[layer]), "style")
        model.disable_adapters()
    stages = [stage for stage in run.record().walk() if stage.name == "lora_application"]
    assert [stage.facts["method"] for stage in stages] == ["add_adapter", "disable_adapters"]
    analyses = [stage.facts["lora_application"] for stage in stages]
    assert [analysis["effective"] for analysis in analyses] == [True, True]
    assert [stage.facts["component"] for stage in stages] == [component] * 2
    norms = [analysis["unet_weight_changes"]["delta_norm"] for analysis in analyses]
    assert norms == pytest.approx([norm_of(model)] * 2, rel=1e-3)
    assert left_behind() == []


def test_a_pipelines_loader_may_load_into_more_than_denoisers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As LTX 2's does into what connects the text encoder with the transformer."""
    pipeline = make_pipeline("sd15")
    monkeypatch.setattr(type(pipeline), "_lora_loadable_modules", ["unet", "text_encoder", "vae"])
    pipeline.vae.add_adapter(LoraConfig(r=2, init_lora_weights=False, target_modules=["to_q"]), "style")
    with sigmascope.watch(pipeline) as run:
        pipeline.disable_lora()
    analysis = run.stage("lora_application").facts["lora_application"]
    assert analysis["effective"]
    assert analysis["unet_weight_changes"]["delta_norm"] == pytest.approx(norm_of(pipeline.vae), rel=1e-3)


def test_a_lora_that_acts_in_a_call_that_makes_nan_is_not_called_well() -> None:
    """As one that is far too strong in fp16."""
    pipeline = make_pipeline("sd15")
    with sigmascope.watch(pipeline) as run:
        pipeline.unet.add_adapter(deepcopy(TRAINED["lora"]))
        torch.nn.init.constant_(pipeline.unet.conv_out.bias, torch.nan)
        generate(pipeline, "sd15", num_inference_steps=1)
    said = standing(run.record())
    assert said is not None
    assert said.says.startswith("The LoRA acts: ")
    assert said.says.endswith(" The last call made NaN or Inf, which may come from it.")
    assert said.is_well is None


def test_what_was_fused_at_zero_and_taken_off_acts_no_more() -> None:
    pipeline = make_pipeline("sd15")
    before = generate(pipeline, "sd15", num_inference_steps=1)
    with sigmascope.watch(pipeline) as run:
        pipeline.unet.add_adapter(deepcopy(TRAINED["lora"]))
        pipeline.fuse_lora(lora_scale=0.0)
        pipeline.unload_lora_weights()
        assert torch.equal(generate(pipeline, "sd15", num_inference_steps=1), before)
    says = "No LoRA acts: unload_lora_weights took off what was on, before the last call."
    assert standing(run.record()) == ("taken off", says, None)


def test_taking_off_where_nothing_is_says_nothing_of_loras() -> None:
    pipeline = make_pipeline("sd15")
    with sigmascope.watch(pipeline) as run:
        pipeline.unload_lora_weights()
        generate(pipeline, "sd15", num_inference_steps=1)
    assert standing(run.record()) is None


def test_an_adapter_beside_a_merged_one_is_not_said_to_be_off_alone() -> None:
    pipeline = make_pipeline("sd15")
    with sigmascope.watch(pipeline) as run:
        model = get_peft_model(pipeline.unet, deepcopy(TRAINED["lora"]), adapter_name="w")
        model.add_adapter("b", deepcopy(TRAINED["lora"]))
        model.merge_adapter(["b"])
        generate(pipeline, "sd15", num_inference_steps=1)
    said = standing(run.record())
    assert said is not None
    assert " LoRA w is off, at strength 0, or left out beside what is merged." in said.says


def test_what_is_left_of_one_model_alone_is_not_said_to_act_twice(tmp_path: Path) -> None:
    """diffusers takes nothing off a U-Net that is compiled."""
    made = make_pipeline("sd15")
    state = {}
    for name, target in (("unet", "to_q"), ("text_encoder", "q_proj")):
        layers = {path for path, one in getattr(made, name).named_modules() if path.endswith(target)}
        for path in layers:
            layer = getattr(made, name).get_submodule(path)
            state[f"{name}.{path}.lora_A.weight"] = torch.full((2, layer.in_features), 0.1)
            state[f"{name}.{path}.lora_B.weight"] = torch.full((layer.out_features, 2), 0.1)
    save_file(state, tmp_path / "style.safetensors")
    pipeline = make_pipeline("sd15")
    pipeline.unet = torch.compile(pipeline.unet, backend="eager")
    with sigmascope.watch(pipeline) as run:
        pipeline.load_lora_weights(tmp_path, weight_name="style.safetensors")
        pipeline.fuse_lora()
        pipeline.unload_lora_weights()
        generate(pipeline, "sd15", num_inference_steps=1)
    said = standing(run.record())
    assert said is not None
    assert " in the text encoders. What acts in the text encoders is merged into the weights." in said.says
    assert "What was fused before" not in said.says
