"""Query, key and value by one product instead of three."""

from typing import Any, Final

from torch import nn

from sigmascope.pipeline.optimizing.circumstances import Circumstances
from sigmascope.pipeline.optimizing.kind import Considered, Kind
from sigmascope.pipeline.optimizing.plan import Choice, NotTaken
from sigmascope.pipeline.optimizing.quantisation import is_quantised
from sigmascope.pipeline.optimizing.subject import models_of
from sigmascope.probes.set_up import layerwise_casting

NAME: Final = "fused_qkv"


def consider(found: Circumstances) -> Considered:
    """On request only: LoRAs loaded afterwards would change layers that no longer work."""
    for name, model in found.subject.of_role("denoiser").items():
        yield _consider(found, name, model)


def apply(pipeline: Any, choice: Choice) -> None:
    """Fuse. The layers of their own stay, so that undoing it takes the fused ones away."""
    model: Any = models_of(pipeline)[choice.component]
    model.fuse_qkv_projections()


def _consider(found: Circumstances, name: str, model: nn.Module) -> Choice | NotTaken:
    if found.config.fuse_qkv is False:
        return NotTaken(NAME, name, "switched off")
    if not can_fuse(model):
        return NotTaken(NAME, name, f"{type(model).__name__} does not offer it")
    if any(getattr(part, "fused_projections", False) is True for part in model.modules()):
        return NotTaken(NAME, name, "they are fused already")
    if any(hasattr(part, "lora_A") for part in model.modules()):
        return NotTaken(NAME, name, "a LoRA is loaded, which fused layers would leave out")
    if found.has("quantisation", "layerwise_casting") or layerwise_casting(model) or is_quantised(model):
        return NotTaken(NAME, name, "the weights are not of one kind that could be put together")
    if found.config.fuse_qkv == "auto":
        reason = "it gains little, and LoRAs that are loaded later would change layers that no longer work"
        return NotTaken(NAME, name, f"{reason}; ask for it by fuse_qkv=True")
    return Choice(
        NAME,
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


KIND: Final = Kind(NAME, consider, apply)
