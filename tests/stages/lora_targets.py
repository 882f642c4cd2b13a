"""ComfyUI's patchers of a U-Net and a text encoder, and a LoRA for both."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tests.comfy_shapes.adapters import lora_adapter, lora_parts
from tests.comfy_shapes.modules import CLIP_Q, BaseModel, Q, SDClipModel
from tests.comfy_shapes.patchers import ModelPatcher
from tests.comfy_shapes.versions import CLIP

from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline

Analysis = dict[str, Any]
Apply = Callable[..., Analysis]


@pytest.fixture
def unet() -> ModelPatcher:
    return ModelPatcher(BaseModel())


@pytest.fixture
def clip() -> CLIP:
    return CLIP(ModelPatcher(SDClipModel()))


@pytest.fixture
def apply(unet: ModelPatcher, clip: CLIP) -> Apply:
    """`applied` to these two."""
    return partial(applied, unet, clip)


def applied(
    unet: ModelPatcher,
    clip: CLIP,
    patches: dict[str, Any],
    *,
    strength: float = 1.0,
    load: bool = False,
    lowvram: bool = False,
) -> Analysis:
    """The analysis of a LoRA that is applied as ComfyUI's loader does, to clones."""
    baseline = capture_lora_baseline(unet, clip)
    new_unet, new_clip = unet.clone(), clip.clone()
    new_unet.add_patches(patches, strength)
    new_clip.add_patches(patches, strength)
    if load:
        new_unet.load(lowvram=lowvram)
        new_clip.patcher.load(lowvram=lowvram)
    return dict(analyze_lora_application_results(baseline, new_unet, new_clip, (new_unet, new_clip)))


def patches() -> dict[str, Any]:
    return {Q: lora_adapter(), CLIP_Q: lora_adapter(seed=5)}


def delta_norm(alpha: float = 1.0, rank: int = 2, seed: int = 0, strength: float = 1.0) -> float:
    up, down, *_ = lora_parts(seed=seed)
    return float((strength * alpha / rank * up @ down).norm())
