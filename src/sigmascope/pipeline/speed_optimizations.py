"""Faster steps of the denoiser: its attention, compiling, kernels, and results of earlier steps used again.

Attention is computed by fused kernels, another backend, or one product for query, key and value. Blocks that repeat
are compiled once for all of them. TensorFloat-32 makes products of float32 faster, and cuDNN's benchmark tries out
algorithms of convolution: these are flags of the whole process. Convolutions with channels last lie as tensor cores
read them. Results of earlier steps are used again by diffusers' hooks: FirstBlockCache, PAB, FasterCache, TaylorSeer.
"""

import importlib
import inspect
import re
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import nn

from sigmascope.pipeline.memory_optimizations import is_quantised
from sigmascope.pipeline.optimization_plan import (
    PIPELINE,
    Choice,
    Considered,
    Kind,
    PipelineParts,
    PlanningContext,
    ProcessSetting,
    Undo,
    consider_each,
    consider_pipeline,
    guidance_by_default,
    model_of,
    outcome,
)
from sigmascope.probes.matmul_precision import MatmulPrecision, matmul_precision
from sigmascope.probes.models import channels_last, is_compiled, layerwise_casting
from sigmascope.probes.reading import attempt

ATTENTION: Final = "attention"
_EAGER_PROCESSORS: Final = ("AttnProcessor", "SlicedAttnProcessor")
"""They build the whole matrix of tokens × tokens."""
_FUSED_PROCESSOR: Final = "AttnProcessor2_0"
_CUDNN_ATTENTION_IS_BEST: Final = (9, 0)
"""From Hopper on, cuDNN's attention is ahead of FlashAttention 2, which PyTorch takes by itself; both allow masks."""


def consider_attention(context: PlanningContext) -> Considered:
    """Fused attention instead of the whole matrix; and a backend that suits the device."""
    for name, model in context.parts.of_role("denoiser").items():
        eager = _eager_modules(model)
        if eager and context.config.attention_backend is not None:
            yield outcome(ATTENTION, name, _fused_attention_of(context, name, len(eager)))
        yield outcome(ATTENTION, name, _backend_of(context, name, model))


def _eager_modules(model: nn.Module) -> list[nn.Module]:
    return [
        part
        for part in model.modules()
        if type(getattr(part, "processor", None)).__name__ in _EAGER_PROCESSORS
    ]


def _fused_attention_of(context: PlanningContext, name: str, count: int) -> Choice | str:
    return context.too_much("rounding") or Choice(
        ATTENTION,
        name,
        f"pipe.{name}.set_attn_processor({_FUSED_PROCESSOR}())",
        f"{count} attention modules build the whole matrix of tokens × tokens.",
        "less memory, and faster from a few hundred tokens on",
        "speed",
        "rounding",
        {"backend": _FUSED_PROCESSOR},
    )


def _backend_of(context: PlanningContext, name: str, model: nn.Module) -> Choice | str:
    asked, hardware = context.config.attention_backend, context.hardware
    if asked is None:
        return "switched off"
    processors = (getattr(part, "processor", None) for part in model.modules())
    has_switch = any(hasattr(processor, "_attention_backend") for processor in processors)
    if not has_switch or not hasattr(model, "set_attention_backend"):
        return "its processors always call PyTorch's scaled_dot_product_attention: there is no other backend to choose"
    backend, reason = asked, "Asked for."
    if asked == "auto":
        backend = "_native_cudnn"
        reason = f"On {hardware} cuDNN's attention is ahead of FlashAttention 2."
        refusal = context.why_not("rounding")
        if refusal is not None:
            return refusal
        if (
            hardware.kind != "cuda"
            or hardware.capability is None
            or hardware.capability < _CUDNN_ATTENTION_IS_BEST
        ):
            return "PyTorch chooses the fastest of its kernels by itself on this device"
    return Choice(
        ATTENTION,
        name,
        f'pipe.{name}.set_attention_backend("{backend}")',
        reason,
        "time in attention, which grows with the square of the number of tokens",
        "speed",
        "precision" if "sage" in backend else "rounding",
        {"backend": backend},
    )


def apply_attention(pipeline: Any, choice: Choice) -> Undo | None:
    """Set processors, or their backend; diffusers makes a backend the default of the whole process too."""
    model = model_of(pipeline, choice)
    if choice.options["backend"] == _FUSED_PROCESSOR:
        fused = importlib.import_module("diffusers.models.attention_processor").AttnProcessor2_0
        for part in _eager_modules(model):
            processor: Any = fused()
            part.set_processor(processor)  # type: ignore[operator]
        return None
    undo = _DEFAULT_BACKEND.hold()
    try:
        model.set_attention_backend(choice.options["backend"])
    except BaseException:
        undo()
        raise
    return undo


def _backend_registry() -> Any:
    return importlib.import_module("diffusers.models.attention_dispatch")._AttentionBackendRegistry


_DEFAULT_BACKEND: Final = ProcessSetting(
    lambda: _backend_registry()._active_backend,
    lambda backend: _backend_registry().set_active_backend(backend),
)
ATTENTION_KIND: Final = Kind(ATTENTION, consider_attention, apply_attention)


FUSED_QKV: Final = "fused_qkv"


def consider_fused_qkv(context: PlanningContext, name: str, model: nn.Module) -> Choice | str:
    """On request only: LoRAs loaded afterwards would change layers that are no longer used."""
    asked = context.config.fuse_qkv
    parts = list(model.modules())
    if asked is False:
        return "switched off"
    if not _can_fuse(model):
        return f"{type(model).__name__} does not support it"
    if any(getattr(part, "fused_projections", False) is True for part in parts):
        return "they are fused already"
    if any(hasattr(part, "lora_A") for part in parts):
        return "a LoRA is loaded, which fused layers would leave out"
    if context.has("quantisation", "layerwise_casting") or layerwise_casting(model) or is_quantised(model):
        return "the weights are quantised or cast, and cannot be joined"
    if asked == "auto":
        return (
            "it gains little, and LoRAs loaded later would change layers that are no longer used; "
            "fuse_qkv=True asks for it"
        )
    return Choice(
        FUSED_QKV,
        name,
        f"pipe.{name}.fuse_qkv_projections()",
        "Asked for. Do not load a LoRA afterwards: it would change layers that are no longer used.",
        "one product instead of three, at the cost of a copy of these weights",
        "speed",
        "rounding",
    )


def _can_fuse(model: nn.Module) -> bool:
    """Whether fusing does anything to a model: some classes inherit the method and have nothing to fuse by it."""
    method: Any = getattr(type(model), "fuse_qkv_projections", None)
    if method is None:
        return False
    own = any(getattr(part, "_supports_qkv_fusion", False) is True for part in model.modules())
    return own or "AttentionMixin" not in method.__qualname__


def apply_fused_qkv(pipeline: Any, choice: Choice) -> None:
    """Fuse. The separate layers stay, so that undoing only removes the fused ones."""
    model_of(pipeline, choice).fuse_qkv_projections()


FUSED_QKV_KIND: Final = Kind(
    FUSED_QKV, consider_each(FUSED_QKV, "denoiser", consider_fused_qkv), apply_fused_qkv
)


COMPILE: Final = "compile"
_FEWEST_GENERATIONS: Final = 5
"""Compiling blocks takes some ten to sixty seconds; what a generation gains is seconds."""


def consider_compile(context: PlanningContext, name: str, model: nn.Module) -> Choice | str:
    """On an accelerator, where enough is generated for it to pay."""
    asked, backend = context.config.compile, context.config.compile_backend
    if asked is False:
        return "switched off"
    repeated = getattr(model, "_repeated_blocks", None) or ()
    blocks = [part for part in model.modules() if type(part).__name__ in repeated]
    if not blocks:
        return f"{type(model).__name__} does not say which of its blocks repeat"
    if is_compiled(model):
        return "it is compiled already"
    if asked == "auto":
        refusal = context.why_not("rounding") or _compiling_gains_nothing(context, name, model, backend)
        if refusal is not None:
            return refusal
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


def _compiling_gains_nothing(
    context: PlanningContext, name: str, model: nn.Module, backend: str
) -> str | None:
    if context.config.generations < _FEWEST_GENERATIONS:
        return f"compiling takes longer than {context.config.generations} generations would save"
    part = context.parts.facts.components.get(name)
    is_moved = part is not None and part.offload in ("group", "sequential")
    if is_moved or any(choice.options.get("how") == "group" for choice in context.chosen):
        return "layers move in and out, and most of the time goes into waiting for them"
    if context.has("layerwise_casting") or layerwise_casting(model):
        return "the hooks that widen each layer make torch.compile recompile until it reaches its limit"
    if backend == "inductor" and torch.version.cuda is not None and find_spec("triton") is None:
        return "Inductor needs Triton, which is not installed"
    return None


def apply_compile(pipeline: Any, choice: Choice) -> None:
    """Set each block to be compiled at its first call. Undone, blocks run as written; Dynamo keeps its cache."""
    model_of(pipeline, choice).compile_repeated_blocks(backend=choice.options["backend"])


COMPILE_KIND: Final = Kind(COMPILE, consider_each(COMPILE, "denoiser", consider_compile), apply_compile)


FAST_MATMUL: Final = "fast_matmul"
_TF32: Final = (8, 0)
"""The compute capability from which NVIDIA's devices have TensorFloat-32."""


def consider_fast_matmul(context: PlanningContext) -> Choice | str:
    """TensorFloat-32 where weights stay in float32; cuDNN's benchmark where there are convolutions."""
    asked, hardware = context.config.fast_matmul, context.hardware
    if asked is False:
        return "switched off"
    is_unet = context.parts.facts.architecture == "UNet"
    wide = torch.float32 in context.dtypes.values()
    if asked == "auto":
        refusal = context.why_not("precision" if wide else "rounding")
        if refusal is not None:
            return refusal
        if hardware.kind != "cuda" or (hardware.capability is not None and hardware.capability < _TF32):
            return "this device has no TensorFloat-32"
        if not wide and not is_unet:
            return "nothing in it computes in float32, and it has few convolutions"
    calls = ['torch.set_float32_matmul_precision("high")'] * wide
    calls += ["torch.backends.cudnn.benchmark = True"] * is_unet
    return Choice(
        FAST_MATMUL,
        PIPELINE,
        "; ".join(calls),
        "Some weights are in float32."
        if wide
        else "Its convolutions are of the same few sizes in every step.",
        "faster products with ten bits of mantissa; it applies to the whole process",
        "speed",
        "precision" if wide else "rounding",
        {"matmul": wide or not is_unet, "benchmark": is_unet},
    )


def apply_fast_matmul(pipeline: Any, choice: Choice) -> Undo:
    """Set the flags."""
    undo = _PROCESS_FLAGS.hold()
    if choice.options["matmul"]:
        torch.set_float32_matmul_precision("high")
    if choice.options["benchmark"]:
        torch.backends.cudnn.benchmark = True
    return undo


def _read_flags() -> tuple[MatmulPrecision, bool]:
    return matmul_precision(), torch.backends.cudnn.benchmark


def _write_flags(before: tuple[MatmulPrecision, bool]) -> None:
    precision, torch.backends.cudnn.benchmark = before
    precision.restore()


_PROCESS_FLAGS: Final = ProcessSetting(_read_flags, _write_flags)
FAST_MATMUL_KIND: Final = Kind(
    FAST_MATMUL, consider_pipeline(FAST_MATMUL, consider_fast_matmul), apply_fast_matmul
)


CHANNELS_LAST: Final = "channels_last"


def consider_channels_last(context: PlanningContext) -> Considered:
    """For UNets, and VAEs of images, in half precision on NVIDIA's devices."""
    for name, model in (context.parts.of_role("denoiser") | context.parts.of_role("vae")).items():
        if channels_last(model) is not None:
            yield outcome(CHANNELS_LAST, name, _channels_last_of(context, name, model))


def _channels_last_of(context: PlanningContext, name: str, model: nn.Module) -> Choice | str:
    asked = context.config.channels_last
    if asked is False:
        return "switched off"
    if channels_last(model):
        return "they are channels-last already"
    if any(parameter.dim() == 5 for parameter in model.parameters()):
        return "it also has convolutions over time, for which there is no such format"
    if asked == "auto":
        refusal = context.why_not("rounding")
        if refusal is not None:
            return refusal
        if context.hardware.kind != "cuda":
            return "what it gains on this device is unknown"
        if context.dtypes.get(name) not in (torch.float16, torch.bfloat16):
            return "it gains only in half precision, which this model is not in"
    return Choice(
        CHANNELS_LAST,
        name,
        f"pipe.{name}.to(memory_format=torch.channels_last)",
        "Its convolutions run in half precision." if asked == "auto" else "Asked for.",
        "time in convolutions, which need no change of layout",
        "speed",
        "rounding",
    )


def apply_channels_last(pipeline: Any, choice: Choice) -> None:
    """Change the kernels' memory format; activations take it on."""
    model_of(pipeline, choice).to(memory_format=torch.channels_last)


CHANNELS_LAST_KIND: Final = Kind(
    CHANNELS_LAST, consider_channels_last, apply_channels_last, frozenset({"layout"})
)


CACHE: Final = "cache"
_THRESHOLD: Final = 0.05
_ATTENTION: Final = r".*(?:blocks|layers)\.\d+\.(?:attn\d?|self_attn|cross_attn)"
_BLOCK_LISTS: Final = ("blocks", "transformer_blocks", "single_transformer_blocks", "layers")
_CACHES_BY_BRANCH: Final = ("first_block", "taylorseer")
"""Caches that keep a state for each branch of guidance; the pipeline has to say which branch it computes."""
_REASONS: Final = {
    "first_block": "Steps whose first block changes little skip the other blocks (FirstBlockCache).",
    "pyramid": "Attention is computed in every other step (Pyramid Attention Broadcast, arXiv 2408.12588).",
    "faster": "Attention of some steps is estimated from two earlier ones (FasterCache, arXiv 2410.19355, without its guidance).",
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


def consider_cache(context: PlanningContext, name: str, model: nn.Module) -> Choice | str:
    """Where the image may be an approximation."""
    asked = context.config.cache
    if asked is None:
        return "switched off"
    cache = "first_block" if asked == "auto" else asked
    reason = _why_unsupported(context.parts, model, cache)
    if reason is None and asked == "auto":
        reason = context.too_much("approximation")
    return reason or Choice(
        CACHE,
        name,
        f"pipe.{name}.enable_cache({_CALLS[cache]})",
        _REASONS[cache],
        "time, more with more steps; check the images",
        "speed",
        "approximation",
        {"cache": cache},
    )


def _why_unsupported(parts: PipelineParts, model: nn.Module, cache: str) -> str | None:
    pipeline_class, model_class = type(parts.pipeline), type(model).__name__
    if not hasattr(model, "enable_cache"):
        return f"{model_class} does not support it"
    if getattr(model, "is_cache_enabled", False) is True:
        return "a cache is on already"
    if cache in _CACHES_BY_BRANCH:
        if not tells_branches(parts.pipeline):
            return f"{pipeline_class.__name__} does not tell the cache which branch of guidance it computes"
    elif not hasattr(pipeline_class, "current_timestep"):
        return f"{pipeline_class.__name__} does not tell the cache its timestep"
    elif tells_branches(parts.pipeline) and guidance_by_default(parts, "true_cfg_scale", "guidance_scale"):
        return (
            f"{pipeline_class.__name__} computes the branches of guidance in turn, and this cache would give one of "
            "them the other's attention"
        )
    if cache == "first_block" and not _blocks_are_known(model):
        return f"FirstBlockCache does not know the blocks of {model_class}"
    if not any(re.fullmatch(_ATTENTION, path) for path, _ in model.named_modules()):
        return f"{model_class} has no attention where the cache looks for it"
    return None


def tells_branches(pipeline: Any) -> bool:
    """Whether the pipeline's loop calls `cache_context`, as those do that compute the branches in turn."""
    function = inspect.unwrap(type(pipeline).__call__)
    return "cache_context" in getattr(getattr(function, "__code__", None), "co_names", ())


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


CACHE_KIND: Final = Kind(CACHE, consider_each(CACHE, "denoiser", consider_cache), apply_cache)
