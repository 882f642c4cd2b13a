"""The right LoRA on a real pipeline of each family: every module matched, on the model, and its effect to the digit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families import FAMILIES, generate, make_pipeline
from tests.families.loras import as_kohya, lora_state, modules_of, parts_of, write
from tests.families.styled import Styled, styled
from torch import Tensor, nn

from sigmascope.lora.applied_verdict import judge_applied
from sigmascope.lora.compatibility import judge_lora
from sigmascope.probes.peft import read_adapters


@pytest.fixture(scope="module", params=["sdxl", "sd3", "flux", "qwen_image", "wan_vace"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Styled:
    """For tests that leave it as it is."""
    return styled(request.param, tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def analysis(loaded: Styled) -> dict[str, Any]:
    return loaded.analysis()


def test_every_module_matches(loaded: Styled) -> None:
    verdict = judge_lora(loaded.path, loaded.pipeline)
    assert verdict.fits
    assert {module.name for module in verdict.matched} == modules_of(loaded.state)


def test_every_module_is_found_on_the_model(loaded: Styled) -> None:
    patches = read_adapters(loaded.pipeline).value or ()
    verdict = judge_applied(loaded.path, patches, loaded.pipeline)
    assert verdict.complete
    assert verdict.strengths == {1.0: len(modules_of(loaded.state))}


@pytest.mark.slow
def test_analysis_of_the_right_lora_is_a_success(analysis: dict[str, Any]) -> None:
    assert analysis["success"]
    assert not [f for f in analysis["findings"] if f["severity"] in ("error", "critical")]


def test_analysis_finds_the_changes_of_every_weight(loaded: Styled, analysis: dict[str, Any]) -> None:
    start = f"{FAMILIES[loaded.family].denoiser}."
    denoiser = {f"{m.removeprefix(start)}.weight" for m in modules_of(loaded.state) if m.startswith(start)}
    encoders = {f"{m}.weight" for m in modules_of(loaded.state) if not m.startswith(start)}
    assert analysis["unet_weight_changes"]["keys_value_changed"].keys() == denoiser
    assert analysis["clip_weight_changes"]["keys_value_changed"].keys() == encoders


def test_norms_of_all_changes_are_those_of_up_times_down(loaded: Styled, analysis: dict[str, Any]) -> None:
    changes = analysis["unet_weight_changes"]["keys_value_changed"]
    start = FAMILIES[loaded.family].denoiser
    for key, change in changes.items():
        expected = torch.linalg.vector_norm(loaded.delta(f"{start}.{key.removesuffix('.weight')}"))
        assert change["delta_norm"] == pytest.approx(float(expected), rel=1e-6), key
        assert change["predicted"]


@pytest.fixture(scope="module")
def image(loaded: Styled, analysis: dict[str, Any]) -> Tensor:
    """What it makes after the analysis."""
    assert analysis["success"]
    return generate(loaded.pipeline, loaded.family)


def test_lora_changes_the_output(loaded: Styled, image: Tensor) -> None:
    assert not torch.equal(image, loaded.bare_image)


def test_names_are_those_that_diffusers_saves(loaded: Styled, tmp_path: Path) -> None:
    from peft.utils import get_peft_model_state_dict
    from safetensors.torch import load_file

    layers = {
        f"{name}_lora_layers": get_peft_model_state_dict(getattr(loaded.pipeline, name), adapter_name="style")
        for name in parts_of(loaded.family)
    }
    type(loaded.pipeline).save_lora_weights(tmp_path, **layers)
    saved = load_file(tmp_path / "pytorch_lora_weights.safetensors")
    assert saved.keys() == loaded.state.keys()
    assert judge_lora(tmp_path / "pytorch_lora_weights.safetensors", loaded.pipeline).fits


@pytest.mark.parametrize("loaded", ["sdxl", "flux", "wan_vace"], indirect=True)
def test_images_are_bit_identical_with_and_without_the_monitor(loaded: Styled, image: Tensor) -> None:
    plain = make_pipeline(loaded.family)
    plain.load_lora_weights(str(loaded.path), adapter_name="style")
    assert torch.equal(image, generate(plain, loaded.family))
    assert attributes(loaded.pipeline) == attributes(plain)


def attributes(pipeline: Any) -> dict[str, set[str]]:
    """What is set on every module of a pipeline, hooks included."""
    return {
        f"{part}.{name}": set(vars(module))
        | {f"{k} {len(v)}" for k, v in vars(module).items() if k.endswith("_hooks")}
        for part, component in pipeline.components.items()
        if isinstance(component, nn.Module)
        for name, module in component.named_modules()
    }


@pytest.mark.slow
def test_kohya_names_all_match_and_those_that_diffusers_drops_are_named(tmp_path: Path) -> None:
    pipeline = make_pipeline("sdxl")
    path = write(as_kohya(lora_state(pipeline, parts_of("sdxl"))), tmp_path / "kohya.safetensors")
    assert judge_lora(path, pipeline).fits
    pipeline.load_lora_weights(str(path), adapter_name="style")
    verdict = judge_applied(path, read_adapters(pipeline).value or (), pipeline)
    embedding = ["lora_unet_add_embedding_linear_1", "lora_unet_add_embedding_linear_2"]
    assert [module.name for module in verdict.missing] == embedding
    assert set(verdict.strengths) == {1.0}


@pytest.mark.parametrize("family", ["sd15", "flux"])
def test_encoder_names_of_before_transformers_5_match_and_load(family: str, tmp_path: Path) -> None:
    pipeline = make_pipeline(family)
    state = lora_state(pipeline, ("text_encoder",))
    older = {
        key.replace("text_encoder.", "text_encoder.text_model.", 1): value for key, value in state.items()
    }
    path = write(older, tmp_path / "lora.safetensors")
    assert judge_lora(path, pipeline).fits
    pipeline.load_lora_weights(str(path), adapter_name="style")
    assert judge_applied(path, read_adapters(pipeline).value or (), pipeline).complete


def test_a_vaes_lora_is_advised_to_be_loaded_as_it_can_be(tmp_path: Path) -> None:
    pipeline: Any = make_pipeline("sd15")
    path = write(lora_state(pipeline, ["vae"], only="conv1"), tmp_path / "vae.safetensors")
    finding = judge_lora(path, pipeline.unet).findings[0]
    assert finding.evidence["reason"] == "lora_part_missing"
    assert 'pipe.vae.load_lora_adapter(FILE, prefix="vae")' in (finding.advice or "")
    pipeline.vae.load_lora_adapter(str(path), prefix="vae")
    assert any(getattr(module, "lora_A", None) for module in pipeline.vae.modules())
