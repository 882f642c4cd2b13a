"""Results of earlier steps used again by diffusers' hooks: FirstBlockCache, PAB, FasterCache, TaylorSeer."""

import importlib
import inspect
import re
from typing import Any, Final

from torch import nn

from sigmascope.pipeline.optimizations.interface import Circumstances, Considered, Kind
from sigmascope.pipeline.pipeline_parts import Subject, models_of
from sigmascope.pipeline.plan import Choice, NotTaken
from sigmascope.probes.reading import attempt

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


def consider_cache(found: Circumstances) -> Considered:
    """Where the image may be an approximation."""
    for name, model in found.subject.of_role("denoiser").items():
        yield _caching_of(found, name, model)


def _caching_of(found: Circumstances, name: str, model: nn.Module) -> Choice | NotTaken:
    asked = found.config.cache
    if asked is None:
        return NotTaken(CACHE, name, "switched off")
    cache = "first_block" if asked == "auto" else asked
    reason = _why_unsupported(found.subject, model, cache)
    if reason is not None:
        return NotTaken(CACHE, name, reason)
    refusal = found.too_much(CACHE, name, "approximation") if asked == "auto" else None
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


def _why_unsupported(subject: Subject, model: nn.Module, cache: str) -> str | None:
    pipeline_class, model_class = type(subject.pipeline), type(model).__name__
    if not hasattr(model, "enable_cache"):
        return f"{model_class} does not offer it"
    if getattr(model, "is_cache_enabled", False) is True:
        return "a cache is on already"
    if cache in _BY_BRANCH:
        if not tells_branches(subject.pipeline):
            return f"{pipeline_class.__name__} does not tell the cache which branch of guidance it computes"
    elif not hasattr(pipeline_class, "current_timestep"):
        return f"{pipeline_class.__name__} does not tell its timestep"
    elif tells_branches(subject.pipeline) and _guides(subject):
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


def _guides(subject: Subject) -> bool:
    """Whether the pipeline guides by default. Where there is `true_cfg_scale`, the other scale is an input."""
    parameter = subject.parameter("true_cfg_scale") or subject.parameter("guidance_scale")
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
    model: Any = models_of(pipeline)[choice.component]
    model.enable_cache(_cache_config(str(choice.options["cache"]), pipeline))


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


CACHE_KIND: Final = Kind(CACHE, consider_cache, apply_cache)
