"""Names that begin with ComfyUI's `diffusion_model.`: which families' loaders in diffusers know them."""

from pathlib import Path

import pytest
from tests.families import FAMILIES, make_pipeline
from tests.families.loras import lora_state, write
from tests.families.mismatches import renamed, with_alphas

from sigmascope.lora.compatibility import judge_lora
from sigmascope.probes.peft import read_adapters


@pytest.mark.parametrize(
    ("family", "loads"),
    [("sd15", False), ("sdxl", False), ("sd3", False), ("flux", False), ("qwen_image", True)],
)
def test_verdict_warns_where_diffusers_finds_nothing(family: str, loads: bool, tmp_path: Path) -> None:
    pipeline = make_pipeline(family)
    denoiser = FAMILIES[family].denoiser
    state = renamed(f"{denoiser}.", "diffusion_model.")(lora_state(pipeline, (denoiser,), only="to_k"))
    path = write(state, tmp_path / "lora.safetensors")
    found = {finding.id for finding in judge_lora(path, pipeline).findings}
    pipeline.load_lora_weights(str(path))
    assert bool(read_adapters(pipeline).value) is loads
    assert ("lora_comfyui_names" in found) is not loads


@pytest.mark.parametrize("family", ["sd15", "sd3", "flux"])
@pytest.mark.parametrize("has_alphas", [True, False])
def test_verdict_says_whether_diffusers_raises_or_is_silent(
    family: str, has_alphas: bool, tmp_path: Path
) -> None:
    pipeline = make_pipeline(family)
    denoiser = FAMILIES[family].denoiser
    state = renamed(f"{denoiser}.", "diffusion_model.")(lora_state(pipeline, (denoiser,), only="to_k"))
    if has_alphas:
        state = with_alphas(state)
    path = write(state, tmp_path / "lora.safetensors")
    (said,) = (one.message for one in judge_lora(path, pipeline).findings if one.id == "lora_comfyui_names")
    if has_alphas and family != "flux":
        with pytest.raises(ValueError, match="Make sure all LoRA param names contain `'lora'`"):
            pipeline.load_lora_weights(str(path))
        assert "diffusers refuses" in said
        assert ".alpha, does not contain “lora”" in said
    else:
        pipeline.load_lora_weights(str(path))
        assert "reports no error" in said
    assert not read_adapters(pipeline).value


@pytest.mark.parametrize("family", ["sd15", "sd3", "flux", "wan"])
def test_verdict_says_where_diffusers_refuses_a_file_with_alphas(family: str, tmp_path: Path) -> None:
    pipeline = make_pipeline(family)
    path = write(
        with_alphas(lora_state(pipeline, (FAMILIES[family].denoiser,), only="to_k")),
        tmp_path / "a.safetensors",
    )
    findings = [one for one in judge_lora(path, pipeline).findings if one.id == "lora_alpha_refused"]
    if family == "flux":
        pipeline.load_lora_weights(str(path))
        ranks = [patch.rank or 0 for patch in read_adapters(pipeline).value or ()]
        layers = [layer for layer in pipeline.transformer.modules() if hasattr(layer, "scaling")]
        assert layers
        assert {float(scale) for layer in layers for scale in layer.scaling.values()} == {1.0 / max(ranks)}
        assert not findings
    else:
        (finding,) = findings
        with pytest.raises(ValueError, match="'lora'"):
            pipeline.load_lora_weights(str(path))
        assert "diffusers refuses the file because of" in finding.message
        assert finding.severity == "warning"
        assert "Convert" in (finding.advice or "")
