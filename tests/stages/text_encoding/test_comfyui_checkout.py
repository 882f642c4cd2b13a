"""The text encoders of a real ComfyUI, built without their weights, as wide as their authors publish them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.comfy_shapes.checkout import Checkout

from sigmascope.stages.conditioning import find_encoders, identify

pytestmark = [
    pytest.mark.comfyui,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]


def clip_of(comfy: Checkout, module: str, name: str, **options: Any) -> SimpleNamespace:
    """What ComfyUI calls a CLIP, with one of its classes on the meta device."""
    kind = getattr(comfy.module(f"comfy.{module}"), name)
    with torch.device("meta"):
        return SimpleNamespace(cond_stage_model=kind(dtype=torch.float16, **options))


MODELS = [
    ("sd1_clip", "SD1ClipModel", {"CLIP-L": 768}),
    ("sdxl_clip", "SDXLClipModel", {"CLIP-L": 768, "OpenCLIP-G": 1280}),
    ("text_encoders.sd2_clip", "SD2ClipModel", {"OpenCLIP-H": 1024}),
    ("text_encoders.sd3_clip", "SD3ClipModel", {"CLIP-L": 768, "OpenCLIP-G": 1280, "T5-XXL": 4096}),
    ("text_encoders.flux", "FluxClipModel", {"CLIP-L": 768, "T5-XXL": 4096}),
    ("text_encoders.wan", "WanT5Model", {"UMT5-XXL": 4096}),
    ("text_encoders.cosmos", "CosmosT5XXL", {"T5": 1024}),
    ("text_encoders.aura_t5", "AuraT5Model", {"T5-XL": 2048}),
    ("text_encoders.sa_t5", "SAT5Model", {"T5-Base": 768}),
    ("text_encoders.ace", "AceT5Model", {"UMT5-Base": 768}),
    ("text_encoders.hydit", "HyditModel", {"BERT": 1024, "mT5-XL": 2048}),
    ("text_encoders.hunyuan_image", "HunyuanImageTEModel", {"Qwen2.5-VL": 3584, "ByT5": 1472}),
    ("text_encoders.lumina2", "LuminaModel", {"Gemma 2": 2304}),
]


@pytest.mark.parametrize(("module", "name", "widths"), MODELS, ids=[name for _, name, _ in MODELS])
def test_families_and_widths(comfy: Checkout, module: str, name: str, widths: dict[str, int]) -> None:
    found = find_encoders(clip_of(comfy, module, name))
    assert {encoder.family: encoder.width for encoder in found} == widths


def test_sd3_without_its_t5_is_not_sdxl(comfy: Checkout) -> None:
    encoders = find_encoders(clip_of(comfy, "text_encoders.sd3_clip", "SD3ClipModel", t5=False))
    assert identify((1, 77, 4096), encoders)["clip_variant"] == "SD 3 CLIP"
