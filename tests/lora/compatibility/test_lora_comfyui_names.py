"""Names that begin with ComfyUI's `diffusion_model.`: which families' loaders in diffusers know them."""

from pathlib import Path

import pytest
from tests.families import FAMILIES, make_pipeline
from tests.families.loras import lora_state, write
from tests.families.mismatches import renamed

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
