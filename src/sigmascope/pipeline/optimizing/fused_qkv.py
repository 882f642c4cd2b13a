"""Query, key and value by one product instead of three."""

from typing import Any, Final

from torch import nn

from sigmascope.pipeline.optimizing.circumstances import Circumstances
from sigmascope.pipeline.optimizing.kind import Considered, Kind
from sigmascope.pipeline.optimizing.plan import Choice, NotTaken
from sigmascope.pipeline.optimizing.quantisation import is_quantised
from sigmascope.pipeline.optimizing.subject import models_of
from sigmascope.probes.set_up import layerwise_casting

FUSED_QKV: Final = "fused_qkv"


def consider_fused_qkv(found: Circumstances) -> Considered:
    """On request only: LoRAs loaded afterwards would change layers that no longer work."""
    for name, model in found.subject.of_role("denoiser").items():
        yield _fused_qkv_of(found, name, model)


def apply_fused_qkv(pipeline: Any, choice: Choice) -> None:
    """Fuse. The layers of their own stay, so that undoing it takes the fused ones away."""
    model: Any = models_of(pipeline)[choice.component]
    model.fuse_qkv_projections()


def _fused_qkv_of(found: Circumstances, name: str, model: nn.Module) -> Choice | NotTaken:
    if found.config.fuse_qkv is False:
        return NotTaken(FUSED_QKV, name, "switched off")
    if not can_fuse(model):
        return NotTaken(FUSED_QKV, name, f"{type(model).__name__} does not offer it")
    if any(getattr(part, "fused_projections", False) is True for part in model.modules()):
        return NotTaken(FUSED_QKV, name, "they are fused already")
    if any(hasattr(part, "lora_A") for part in model.modules()):
        return NotTaken(FUSED_QKV, name, "a LoRA is loaded, which fused layers would leave out")
    if found.has("quantisation", "layerwise_casting") or layerwise_casting(model) or is_quantised(model):
        return NotTaken(FUSED_QKV, name, "the weights are not of one kind that could be put together")
    if found.config.fuse_qkv == "auto":
        reason = "it gains little, and LoRAs that are loaded later would change layers that no longer work"
        return NotTaken(FUSED_QKV, name, f"{reason}; ask for it by fuse_qkv=True")
    return Choice(
        FUSED_QKV,
        name,
        f"pipe.{name}.fuse_qkv_projections()",
        "Asked for. Load no LoRA afterwards: it would change layers that no longer work.",
        "one product where there are three, for a copy of these weights",
        "speed",
        "rounding",
    )


def can_fuse(model: nn.Module) -> bool:
    """Whether fusing does anything to a model: some classes inherit the method and have nothing to fuse by it."""
    if not hasattr(model, "fuse_qkv_projections"):
        return False
    method: Any = type(model).fuse_qkv_projections  # type: ignore[attr-defined]
    overridden = "AttentionMixin" not in method.__qualname__
    own = any(getattr(part, "_supports_qkv_fusion", False) is True for part in model.modules())
    return overridden or own


FUSED_QKV_KIND: Final = Kind(FUSED_QKV, consider_fused_qkv, apply_fused_qkv)
