"""Faster steps of the denoiser: its attention, compiling, kernels, and results of earlier steps used again.

Attention is computed by fused kernels, another backend, or one product for query, key and value. Blocks that repeat
are compiled once for all of them. TensorFloat-32 makes products of float32 faster, and cuDNN's benchmark tries out
algorithms of convolution: these are flags of the whole process. Convolutions with channels last lie as tensor cores
read them. Results of earlier steps are used again by diffusers' hooks: FirstBlockCache, PAB, FasterCache, TaylorSeer.
"""

import importlib
import inspect
import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import nn

from sigmascope.pipeline.memory_optimizations import is_quantised
from sigmascope.pipeline.plan import (
    PIPELINE,
    Choice,
    Considered,
    Kind,
    NotTaken,
    PipelineParts,
    PlanningContext,
    ProcessSetting,
    Undo,
    model_of,
    of_each,
)
from sigmascope.probes.pipelines import channels_last, is_compiled, layerwise_casting
from sigmascope.probes.reading import attempt

ATTENTION: Final = "attention"
_EAGER_PROCESSORS: Final = ("AttnProcessor", "SlicedAttnProcessor")
"""They build the whole matrix of tokens by tokens."""
_FUSED_PROCESSOR: Final = "AttnProcessor2_0"
_CUDNN_IS_BEST: Final = (9, 0)
"""From Hopper on cuDNN's attention is ahead of FlashAttention 2, which PyTorch takes by itself; both allow masks."""
FUSED_QKV: Final = "fused_qkv"


def consider_attention(context: PlanningContext) -> Considered:
    """Fused attention instead of the whole matrix; and a backend that suits the device."""
    for name, model in context.parts.of_role("denoiser").items():
        eager = _eager_modules(model)
        if eager and context.config.attention_backend is not None:
            yield _fused_attention_of(context, name, len(eager))
        yield _backend_of(context, name, model)


def _eager_modules(model: nn.Module) -> list[nn.Module]:
    return [
        part
        for part in model.modules()
        if type(getattr(part, "processor", None)).__name__ in _EAGER_PROCESSORS
    ]


def _fused_attention_of(context: PlanningContext, name: str, count: int) -> Choice | NotTaken:
    refusal = context.too_much(ATTENTION, name, "rounding")
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


def _backend_of(context: PlanningContext, name: str, model: nn.Module) -> Choice | NotTaken:
    asked = context.config.attention_backend
    if asked is None:
        return NotTaken(ATTENTION, name, "switched off")
    if not hasattr(model, "set_attention_backend") or not _switchable(model):
        return NotTaken(
            ATTENTION, name, "its processors call PyTorch's scaled_dot_product_attention, and have no switch"
        )
    backend = asked if asked != "auto" else "_native_cudnn"
    if asked == "auto":
        refusal = context.why_not(ATTENTION, name, "rounding") or _own_choice_is_best(context, name)
        if refusal is not None:
            return refusal
    return Choice(
        ATTENTION,
        name,
        f'pipe.{name}.set_attention_backend("{backend}")',
        "Asked for."
        if asked != "auto"
        else f"On {context.hardware} cuDNN's attention is ahead of FlashAttention 2.",
        "time in attention, which grows with the square of the number of tokens",
        "speed",
        "precision" if "sage" in backend else "rounding",
        {"backend": backend},
    )


def _switchable(model: nn.Module) -> bool:
    processors = (getattr(part, "processor", None) for part in model.modules())
    return any(hasattr(processor, "_attention_backend") for processor in processors)


def _own_choice_is_best(context: PlanningContext, name: str) -> NotTaken | None:
    capability = context.hardware.capability
    if context.hardware.kind == "cuda" and capability is not None and capability >= _CUDNN_IS_BEST:
        return None
    return NotTaken(ATTENTION, name, "PyTorch chooses the fastest of its kernels by itself on this device")


def apply_attention(pipeline: Any, choice: Choice) -> Undo | None:
    """Set processors, or their backend; diffusers makes a backend the default of the whole process too."""
    model = model_of(pipeline, choice)
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


def consider_fused_qkv(context: PlanningContext, name: str, model: nn.Module) -> Choice | NotTaken:
    """On request only: LoRAs loaded afterwards would change layers that no longer work."""
    if context.config.fuse_qkv is False:
        return NotTaken(FUSED_QKV, name, "switched off")
    if not can_fuse(model):
        return NotTaken(FUSED_QKV, name, f"{type(model).__name__} does not offer it")
    if any(getattr(part, "fused_projections", False) is True for part in model.modules()):
        return NotTaken(FUSED_QKV, name, "they are fused already")
    if any(hasattr(part, "lora_A") for part in model.modules()):
        return NotTaken(FUSED_QKV, name, "a LoRA is loaded, which fused layers would leave out")
    if context.has("quantisation", "layerwise_casting") or layerwise_casting(model) or is_quantised(model):
        return NotTaken(FUSED_QKV, name, "the weights are not of one kind that could be put together")
    if context.config.fuse_qkv == "auto":
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
    model_of(pipeline, choice).fuse_qkv_projections()


FUSED_QKV_KIND: Final = Kind(FUSED_QKV, of_each("denoiser", consider_fused_qkv), apply_fused_qkv)


COMPILE: Final = "compile"
_FEWEST_GENERATIONS: Final = 5
"""Compiling blocks takes some ten to sixty seconds; what a generation gains is seconds."""
FAST_MATMUL: Final = "fast_matmul"
_TF32: Final = (8, 0)
"""The compute capability from which NVIDIA's devices have TensorFloat-32."""
_MATMUL_BACKENDS: Final[tuple[Any, ...]] = (
    torch.backends.cuda.matmul,
    getattr(torch.backends.mkldnn, "matmul", None),
)
CHANNELS_LAST: Final = "channels_last"


def consider_compile(context: PlanningContext, name: str, model: nn.Module) -> Choice | NotTaken:
    """On an accelerator, where enough is generated for it to pay."""
    asked, backend = context.config.compile, context.config.compile_backend
    if asked is False:
        return NotTaken(COMPILE, name, "switched off")
    blocks = _repeated_blocks(model)
    reason = None
    if not blocks:
        reason = f"{type(model).__name__} does not tell which of its blocks repeat"
    elif is_compiled(model):
        reason = "it is compiled already"
    elif asked == "auto":
        refusal = context.why_not(COMPILE, name, "rounding")
        if refusal is not None:
            return refusal
        reason = _compiling_gains_nothing(context, name, model, backend)
    if reason is not None:
        return NotTaken(COMPILE, name, reason)
    classes = ", ".join(sorted({type(block).__name__ for block in blocks}))
    return Choice(
        COMPILE,
        name,
        f'pipe.{name}.compile_repeated_blocks(backend="{backend}")',
        f"{len(blocks)} blocks of {classes} are compiled once for each class.",
        f"faster steps after a first one that compiles; {context.config.generations} generations are planned",
        "speed",
        "rounding",
        {"backend": backend},
        {"blocks": len(blocks), "generations": context.config.generations},
    )


def _repeated_blocks(model: nn.Module) -> list[nn.Module]:
    repeated = getattr(model, "_repeated_blocks", None) or ()
    return [part for part in model.modules() if type(part).__name__ in repeated]


def _compiling_gains_nothing(
    context: PlanningContext, name: str, model: nn.Module, backend: str
) -> str | None:
    if context.config.generations < _FEWEST_GENERATIONS:
        return f"compiling takes longer than {context.config.generations} generations gain"
    part = context.parts.facts.components.get(name)
    is_moved = part is not None and part.offload in ("group", "sequential")
    if is_moved or any(choice.options.get("how") == "group" for choice in context.chosen):
        return "layers move in and out, and waiting for them is what takes the time"
    if context.has("layerwise_casting") or layerwise_casting(model):
        return "the hooks that widen each layer make torch.compile compile again and again, up to its limit"
    if backend == "inductor" and torch.version.cuda is not None and find_spec("triton") is None:
        return "Inductor needs Triton, which is not installed"
    return None


def apply_compile(pipeline: Any, choice: Choice) -> None:
    """Set each block to be compiled at its first call. Undone, blocks run as written; Dynamo keeps its cache."""
    model_of(pipeline, choice).compile_repeated_blocks(backend=choice.options["backend"])


COMPILE_KIND: Final = Kind(COMPILE, of_each("denoiser", consider_compile), apply_compile)


def consider_fast_matmul(context: PlanningContext) -> Considered:
    """TensorFloat-32 where weights stay in float32; cuDNN's trying where there are convolutions."""
    asked = context.config.fast_matmul
    if asked is False:
        yield NotTaken(FAST_MATMUL, PIPELINE, "switched off")
        return
    is_unet = context.parts.facts.architecture == "UNet"
    wide = torch.float32 in context.dtypes.values()
    if asked == "auto":
        refusal = context.why_not(
            FAST_MATMUL, PIPELINE, "precision" if wide else "rounding"
        ) or _tf32_gains_nothing(context, wide, is_unet)
        if refusal is not None:
            yield refusal
            return
    yield Choice(
        FAST_MATMUL,
        PIPELINE,
        'torch.set_float32_matmul_precision("high")' * wide
        + "; " * (wide and is_unet)
        + "torch.backends.cudnn.benchmark = True" * is_unet,
        "Some weights are in float32."
        if wide
        else "Its convolutions are of the same few sizes in every step.",
        "faster products where inputs of ten bits are enough; it holds for the whole process",
        "speed",
        "precision" if wide else "rounding",
        {"matmul": wide or not is_unet, "benchmark": is_unet},
    )


def _tf32_gains_nothing(context: PlanningContext, wide: bool, is_unet: bool) -> NotTaken | None:
    capability = context.hardware.capability
    if context.hardware.kind != "cuda" or (capability is not None and capability < _TF32):
        return NotTaken(FAST_MATMUL, PIPELINE, "this device has no TensorFloat-32")
    if not wide and not is_unet:
        return NotTaken(
            FAST_MATMUL, PIPELINE, "nothing in it computes in float32, and it has few convolutions"
        )
    return None


def apply_fast_matmul(pipeline: Any, choice: Choice) -> Undo:
    """Set the flags."""
    undo = _PROCESS_FLAGS.hold()
    if choice.options["matmul"]:
        torch.set_float32_matmul_precision("high")
    if choice.options["benchmark"]:
        torch.backends.cudnn.benchmark = True
    return undo


def _read_flags() -> Mapping[str, Any]:
    """The flags. The precision has an old name for all and newer ones by backend, which may say what the old cannot."""
    return {
        "precision": attempt(torch.get_float32_matmul_precision).value or "highest",
        "by_backend": [getattr(backend, "fp32_precision", None) for backend in _MATMUL_BACKENDS],
        "benchmark": torch.backends.cudnn.benchmark,
    }


def _write_flags(before: Mapping[str, Any]) -> None:
    torch.set_float32_matmul_precision(before["precision"])
    for backend, precision in zip(_MATMUL_BACKENDS, before["by_backend"], strict=True):
        if precision is not None:
            backend.fp32_precision = precision
    torch.backends.cudnn.benchmark = before["benchmark"]


_PROCESS_FLAGS: Final = ProcessSetting(_read_flags, _write_flags)
FAST_MATMUL_KIND: Final = Kind(FAST_MATMUL, consider_fast_matmul, apply_fast_matmul)


def consider_channels_last(context: PlanningContext) -> Considered:
    """For UNets, and VAEs of images, in half precision on NVIDIA's devices."""
    models = context.parts.of_role("denoiser") | context.parts.of_role("vae")
    for name, model in models.items():
        if channels_last(model) is not None:
            yield _channels_last_of(context, name, model)


def _channels_last_of(context: PlanningContext, name: str, model: nn.Module) -> Choice | NotTaken:
    asked = context.config.channels_last
    if asked is False:
        return NotTaken(CHANNELS_LAST, name, "switched off")
    if channels_last(model):
        return NotTaken(CHANNELS_LAST, name, "they lie so already")
    if any(parameter.dim() == 5 for parameter in model.parameters()):
        return NotTaken(
            CHANNELS_LAST, name, "it has convolutions over time as well, for which this is no format"
        )
    if asked == "auto":
        refusal = context.why_not(CHANNELS_LAST, name, "rounding") or _channels_last_gains_nothing(
            context, name
        )
        if refusal is not None:
            return refusal
    return Choice(
        CHANNELS_LAST,
        name,
        f"pipe.{name}.to(memory_format=torch.channels_last)",
        "Its convolutions run in half precision." if asked == "auto" else "Asked for.",
        "time in convolutions, which need not be laid out anew",
        "speed",
        "rounding",
    )


def _channels_last_gains_nothing(context: PlanningContext, name: str) -> NotTaken | None:
    if context.hardware.kind != "cuda":
        return NotTaken(CHANNELS_LAST, name, "what it gains on this device is not known")
    if context.dtypes.get(name) not in (torch.float16, torch.bfloat16):
        return NotTaken(CHANNELS_LAST, name, "it gains in half precision, and this is not")
    return None


def apply_channels_last(pipeline: Any, choice: Choice) -> None:
    """Lay the kernels out anew; what flows through takes their format."""
    model_of(pipeline, choice).to(memory_format=torch.channels_last)


CHANNELS_LAST_KIND: Final = Kind(
    CHANNELS_LAST, consider_channels_last, apply_channels_last, frozenset({"layout"})
)


CACHE: Final = "cache"
_THRESHOLD: Final = 0.05
_ATTENTION: Final = r".*(?:blocks|layers)\.\d+\.(?:attn\d?|self_attn|cross_attn)"
_BLOCK_LISTS: Final = ("blocks", "transformer_blocks", "single_transformer_blocks", "layers")
_BY_BRANCH: Final = ("first_block", "taylorseer")
"""Those that keep a state for each branch of guidance; the pipeline has to say which of them it computes."""
_REASONS: Final = {
    "first_block": "Steps whose first block changes little skip the other blocks (FirstBlockCache).",
    "pyramid": "Attention is computed in every other step (Pyramid Attention Broadcast, arXiv 2408.12588).",
    "faster": "Attention of two steps stands in for a third's (FasterCache, arXiv 2410.19355, without its guidance).",
    "taylorseer": "Attention is extrapolated between full steps (TaylorSeer, arXiv 2503.06923).",
}
_CALLS: Final = {
    "first_block": f"FirstBlockCacheConfig(threshold={_THRESHOLD})",
    "taylorseer": f'TaylorSeerCacheConfig(cache_identifiers=[r"{_ATTENTION}"])',
    "pyramid": "PyramidAttentionBroadcastConfig(spatial_attention_block_skip_range=2, "
    "current_timestep_callback=lambda: pipe.current_timestep)",
    "faster": "FasterCacheConfig(attention_weight_callback=lambda _: 0.5, is_guidance_distilled=True, "
    "current_timestep_callback=lambda: pipe.current_timestep)",
}


def consider_cache(context: PlanningContext, name: str, model: nn.Module) -> Choice | NotTaken:
    """Where the image may be an approximation."""
    asked = context.config.cache
    if asked is None:
        return NotTaken(CACHE, name, "switched off")
    cache = "first_block" if asked == "auto" else asked
    reason = _why_unsupported(context.parts, model, cache)
    if reason is not None:
        return NotTaken(CACHE, name, reason)
    refusal = context.too_much(CACHE, name, "approximation") if asked == "auto" else None
    return refusal or Choice(
        CACHE,
        name,
        f"pipe.{name}.enable_cache({_CALLS[cache]})",
        _REASONS[cache],
        "time, the more the more steps there are; look at the images",
        "speed",
        "approximation",
        {"cache": cache},
    )


def _why_unsupported(parts: PipelineParts, model: nn.Module, cache: str) -> str | None:
    pipeline_class, model_class = type(parts.pipeline), type(model).__name__
    if not hasattr(model, "enable_cache"):
        return f"{model_class} does not offer it"
    if getattr(model, "is_cache_enabled", False) is True:
        return "a cache is on already"
    if cache in _BY_BRANCH:
        if not tells_branches(parts.pipeline):
            return f"{pipeline_class.__name__} does not tell the cache which branch of guidance it computes"
    elif not hasattr(pipeline_class, "current_timestep"):
        return f"{pipeline_class.__name__} does not tell its timestep"
    elif tells_branches(parts.pipeline) and _guides(parts):
        return (
            f"{pipeline_class.__name__} computes the branches of guidance in turn, and this cache would give one of "
            "them the other's attention"
        )
    if cache == "first_block" and not _blocks_are_known(model):
        return f"the blocks of {model_class} are not among those that FirstBlockCache knows"
    if not any(re.fullmatch(_ATTENTION, path) for path, _ in model.named_modules()):
        return f"{model_class} has no attention where the cache looks for it"
    return None


def tells_branches(pipeline: Any) -> bool:
    """Whether the pipeline's loop calls `cache_context`, as those do that compute the branches in turn."""
    function = inspect.unwrap(type(pipeline).__call__)
    return "cache_context" in getattr(getattr(function, "__code__", None), "co_names", ())


def _guides(parts: PipelineParts) -> bool:
    """Whether the pipeline guides by default. Where there is `true_cfg_scale`, the other scale is an input."""
    parameter = parts.parameter("true_cfg_scale") or parts.parameter("guidance_scale")
    scale = None if parameter is None else parameter.default
    return isinstance(scale, int | float) and scale > 1


def _blocks_are_known(model: nn.Module) -> bool:
    """Whether diffusers knows what the blocks give, and nothing else has a say between them (VACE's hints do)."""
    blocks = [
        block
        for name, child in model.named_children()
        if name in _BLOCK_LISTS and isinstance(child, nn.ModuleList)
        for block in child
    ]
    between = any("vace" in name for name, _ in model.named_children())
    helpers = importlib.import_module("diffusers.hooks._helpers")
    known = attempt(lambda: [helpers.TransformerBlockRegistry.get(type(block)) for block in blocks])
    return len(blocks) > 1 and known.value is not None and not between


def apply_cache(pipeline: Any, choice: Choice) -> None:
    """Put the hooks on."""
    model_of(pipeline, choice).enable_cache(_cache_config(str(choice.options["cache"]), pipeline))


def _cache_config(cache: str, pipeline: Any) -> Any:
    diffusers = importlib.import_module("diffusers")
    if cache == "first_block":
        return diffusers.FirstBlockCacheConfig(threshold=_THRESHOLD)
    if cache == "taylorseer":
        return diffusers.TaylorSeerCacheConfig(cache_identifiers=[_ATTENTION])

    def timestep() -> Any:
        return pipeline.current_timestep

    if cache == "pyramid":
        return diffusers.PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2, current_timestep_callback=timestep
        )
    return diffusers.FasterCacheConfig(
        attention_weight_callback=lambda _: 0.5,
        is_guidance_distilled=True,
        current_timestep_callback=timestep,
    )


CACHE_KIND: Final = Kind(CACHE, of_each("denoiser", consider_cache), apply_cache)
