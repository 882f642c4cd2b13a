"""What computes the denoiser's attention: fused kernels, backends, and one product for query, key and value."""

import importlib
from typing import Any, Final

from torch import nn

from sigmascope.pipeline.optimizations.interface import Circumstances, Considered, Kind, ProcessSetting, Undo
from sigmascope.pipeline.optimizations.precision import is_quantised
from sigmascope.pipeline.pipeline_parts import models_of
from sigmascope.pipeline.plan import Choice, NotTaken
from sigmascope.probes.pipelines import layerwise_casting

ATTENTION: Final = "attention"
_EAGER_PROCESSORS: Final = ("AttnProcessor", "SlicedAttnProcessor")
"""They build the whole matrix of tokens by tokens."""
_FUSED_PROCESSOR: Final = "AttnProcessor2_0"
_CUDNN_IS_BEST: Final = (9, 0)
"""From Hopper on cuDNN's attention is ahead of FlashAttention 2, which PyTorch takes by itself; both allow masks."""
FUSED_QKV: Final = "fused_qkv"


def consider_attention(found: Circumstances) -> Considered:
    """Fused attention instead of the whole matrix; and a backend that suits the device."""
    for name, model in found.subject.of_role("denoiser").items():
        eager = _eager_modules(model)
        if eager and found.config.attention_backend is not None:
            yield _fused_attention_of(found, name, len(eager))
        yield _backend_of(found, name, model)


def _eager_modules(model: nn.Module) -> list[nn.Module]:
    return [
        part
        for part in model.modules()
        if type(getattr(part, "processor", None)).__name__ in _EAGER_PROCESSORS
    ]


def _fused_attention_of(found: Circumstances, name: str, count: int) -> Choice | NotTaken:
    refusal = found.too_much(ATTENTION, name, "rounding")
    return refusal or Choice(
        ATTENTION,
        name,
        f"pipe.{name}.set_attn_processor({_FUSED_PROCESSOR}())",
        f"{count} attention modules build the whole matrix of tokens by tokens.",
        "less memory, and faster from a few hundred tokens on",
        "speed",
        "rounding",
        {"backend": _FUSED_PROCESSOR},
    )


def _backend_of(found: Circumstances, name: str, model: nn.Module) -> Choice | NotTaken:
    asked = found.config.attention_backend
    if asked is None:
        return NotTaken(ATTENTION, name, "switched off")
    if not hasattr(model, "set_attention_backend") or not _switchable(model):
        return NotTaken(
            ATTENTION, name, "its processors call PyTorch's scaled_dot_product_attention, and have no switch"
        )
    backend = asked if asked != "auto" else "_native_cudnn"
    if asked == "auto":
        refusal = found.why_not(ATTENTION, name, "rounding") or _own_choice_is_best(found, name)
        if refusal is not None:
            return refusal
    return Choice(
        ATTENTION,
        name,
        f'pipe.{name}.set_attention_backend("{backend}")',
        "Asked for."
        if asked != "auto"
        else f"On {found.hardware} cuDNN's attention is ahead of FlashAttention 2.",
        "time in attention, which grows with the square of the number of tokens",
        "speed",
        "precision" if "sage" in backend else "rounding",
        {"backend": backend},
    )


def _switchable(model: nn.Module) -> bool:
    processors = (getattr(part, "processor", None) for part in model.modules())
    return any(hasattr(processor, "_attention_backend") for processor in processors)


def _own_choice_is_best(found: Circumstances, name: str) -> NotTaken | None:
    capability = found.hardware.capability
    if found.hardware.kind == "cuda" and capability is not None and capability >= _CUDNN_IS_BEST:
        return None
    return NotTaken(ATTENTION, name, "PyTorch chooses the fastest of its kernels by itself on this device")


def apply_attention(pipeline: Any, choice: Choice) -> Undo | None:
    """Set processors, or their backend; diffusers makes a backend the default of the whole process too."""
    model: Any = models_of(pipeline)[choice.component]
    if choice.options["backend"] == _FUSED_PROCESSOR:
        _set_fused(model)
        return None
    undo = _DEFAULT_BACKEND.hold()
    try:
        model.set_attention_backend(choice.options["backend"])
    except BaseException:
        undo()
        raise
    return undo


def _set_fused(model: nn.Module) -> None:
    fused = importlib.import_module("diffusers.models.attention_processor").AttnProcessor2_0
    for part in _eager_modules(model):
        processor: Any = fused()
        part.set_processor(processor)  # type: ignore[operator]


def _backend_registry() -> Any:
    return importlib.import_module("diffusers.models.attention_dispatch")._AttentionBackendRegistry


_DEFAULT_BACKEND: Final = ProcessSetting(
    lambda: _backend_registry()._active_backend,
    lambda backend: _backend_registry().set_active_backend(backend),
)
ATTENTION_KIND: Final = Kind(ATTENTION, consider_attention, apply_attention)


def consider_fused_qkv(found: Circumstances) -> Considered:
    """On request only: LoRAs loaded afterwards would change layers that no longer work."""
    for name, model in found.subject.of_role("denoiser").items():
        yield _fused_qkv_of(found, name, model)


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


def apply_fused_qkv(pipeline: Any, choice: Choice) -> None:
    """Fuse. The layers of their own stay, so that undoing it takes the fused ones away."""
    model: Any = models_of(pipeline)[choice.component]
    model.fuse_qkv_projections()


FUSED_QKV_KIND: Final = Kind(FUSED_QKV, consider_fused_qkv, apply_fused_qkv)
