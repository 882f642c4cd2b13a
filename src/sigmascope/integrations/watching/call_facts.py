"""What a pipeline was called with, from the call's own arguments."""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from sigmascope.integrations.watching.activity import guides
from sigmascope.records.pipeline import CallFacts

if TYPE_CHECKING:
    from sigmascope.integrations.watching.activity import Activity

_GUIDANCE: Final = ("true_cfg_scale", "guidance_scale", "prior_guidance_scale")
_IMAGES: Final = ("image", "images", "init_image", "input_image", "source_image", "reference_image", "video")
_PER_PROMPT: Final = ("num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt")
_EMBEDS: Final = ("prompt_embeds", "prompt_embeds_1", "image_embeds", "negative_prompt_embeds")


def named_arguments(pipeline: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The call's arguments by name, with the defaults of those that were not given.

    A modular pipeline names its inputs in its blocks.
    """
    bound = inspect.signature(type(pipeline).__call__).bind_partial(pipeline, *args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    extra = {
        name
        for name, parameter in bound.signature.parameters.items()
        if parameter.kind is inspect.Parameter.VAR_KEYWORD
    }
    for name in extra:
        arguments |= arguments.pop(name, {})
    blocks = getattr(pipeline, "blocks", None)
    for given in getattr(blocks, "inputs", None) or ():
        known = getattr(given, "name", None)
        if isinstance(known, str):
            arguments.setdefault(known, getattr(given, "default", None))
    return arguments


def call_facts(arguments: Mapping[str, Any]) -> CallFacts:
    """Steps, guidance, size, batch and seed as they were given."""
    seeds = seeds_of(arguments)
    return CallFacts(
        num_inference_steps=_steps(arguments),
        guidance_scale=_guidance(arguments),
        height=_whole(arguments.get("height")),
        width=_whole(arguments.get("width")),
        num_frames=_whole(arguments.get("num_frames")),
        batch_size=_batch(arguments),
        has_image=any(arguments.get(name) is not None for name in _IMAGES),
        seed=seeds[0] if len(seeds) == 1 else None,
    )


def with_outcome(call: CallFacts, pipeline: object, activity: "Activity") -> CallFacts:
    """The facts with what only the finished call shows: the size of what was decoded, and guidance at work."""
    height, width = activity.size or (None, None)
    return replace(
        call,
        num_inference_steps=call.num_inference_steps or activity.planned_steps,
        height=call.height or height,
        width=call.width or width,
        guidance_batches=_guidance_batches(pipeline, activity),
    )


def prompts_of(arguments: Mapping[str, Any]) -> dict[str, str]:
    """All texts among the arguments that are called prompts; those of a batch as `prompt.0`, `prompt.1`, …."""
    found: dict[str, str] = {}
    for name, value in arguments.items():
        if "prompt" not in name:
            continue
        if isinstance(value, str):
            found[name] = value
        elif isinstance(value, list | tuple) and all(isinstance(text, str) for text in value):
            found |= {f"{name}.{index}": text for index, text in enumerate(value)}
    return found


def seeds_of(arguments: Mapping[str, Any]) -> list[int]:
    """The seeds of the call's generators, one for each."""
    given = arguments.get("generator")
    generators = given if isinstance(given, list | tuple) else [given]
    return [one.initial_seed() for one in generators if isinstance(one, torch.Generator)]


def _steps(arguments: Mapping[str, Any]) -> int | None:
    for name in ("timesteps", "sigmas"):
        given = arguments.get(name)
        if isinstance(given, list | tuple) and given:
            return len(given)
    return _whole(arguments.get("num_inference_steps"))


def _guidance(arguments: Mapping[str, Any]) -> float | None:
    """The scale that guides: that of true classifier-free guidance where it is on beside a distilled one."""
    for name in _GUIDANCE:
        scale = arguments.get(name)
        if (
            isinstance(scale, int | float)
            and not isinstance(scale, bool)
            and (name != _GUIDANCE[0] or scale > 1)
        ):
            return float(scale)
    return None


def _batch(arguments: Mapping[str, Any]) -> int | None:
    """Prompts, times what is made of each."""
    prompts = _count(arguments.get("prompt"), arguments)
    if prompts is None:
        return None
    for name in _PER_PROMPT:
        prompts *= _whole(arguments.get(name)) or 1
    return prompts


def _count(prompt: object, arguments: Mapping[str, Any]) -> int | None:
    if isinstance(prompt, str):
        return 1
    if isinstance(prompt, list | tuple) and prompt:
        return len(prompt)
    embeds: Iterable[Any] = (arguments.get(name) for name in _EMBEDS)
    return next((one.shape[0] for one in embeds if isinstance(one, Tensor) and one.dim()), None)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _guidance_batches(pipeline: object, activity: "Activity") -> int | None:
    """From the calls that a step needed, or from what the pipeline says of one batched call."""
    if activity.most_calls_a_step != 1:
        return activity.most_calls_a_step or None
    told = [one for one in (activity.is_guided, guides(pipeline)) if isinstance(one, bool)]
    if told:
        return 1 + max(told)
    config = getattr(getattr(pipeline, "transformer", None), "config", None) or {}
    return 1 if config.get("guidance_embeds") is True else None
