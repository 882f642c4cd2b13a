"""What a diffusers pipeline is called with: the arguments of its own signature that a case asks for."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from sigmascope.errors import ConfigError
from sigmascope.records.benchmark import BenchCase, Made

CALLBACK: Final = "callback_on_step_end"
_NAMED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_PER_PROMPT: Final = ("num_images_per_prompt", "num_videos_per_prompt")


def parameters_of(pipeline: object) -> frozenset[str]:
    """Names of what the pipeline's call takes."""
    found = inspect.signature(type(pipeline).__call__).parameters.values()
    return frozenset(one.name for one in found if one.kind in _NAMED) - {"self"}


def check_call(pipeline: object, case: BenchCase, given: Mapping[str, Any]) -> None:
    """Refuse what the pipeline's call does not take, and what would be other work than the case says.

    Args:
        pipeline: Whose call it is.
        case: Size, batch and steps.
        given: Other arguments of the user's.

    Raises:
        ConfigError: Names the first of them, and what the pipeline takes.
    """
    takes = parameters_of(pipeline)
    _refuse_other_work(case, given)
    wanted = {
        "height": ("--resolution", case.height),
        "num_inference_steps": ("--steps", case.steps),
        "num_frames": ("--frames", case.frames),
        **{name: (_flag(name), value) for name, value in given.items()},
    }
    for name, (flag, value) in wanted.items():
        if value is not None and name not in takes:
            raise ConfigError(
                f"{flag}: {type(pipeline).__name__} takes no {name}.",
                hint=f"It takes {', '.join(sorted(takes))}.",
            )
    if case.batch > 1 and not takes.intersection((*_PER_PROMPT, "prompt")):
        raise ConfigError(
            f"--batch: {type(pipeline).__name__} makes one picture at a time.", hint="Leave --batch out."
        )


def _refuse_other_work(case: BenchCase, given: Mapping[str, Any]) -> None:
    said = {
        "width": ("--resolution", case.width),
        "height": ("--resolution", case.height),
        "num_inference_steps": ("--steps", case.steps),
        "num_frames": ("--frames", case.frames),
        **dict.fromkeys(_PER_PROMPT, ("--batch", case.batch)),
    }
    for name in given:
        flag, value = said.get(name, ("", None))
        if value is not None:
            raise ConfigError(
                f"--call {name}: the case {case.label} has {value} of it already.",
                hint=f"Say it with {flag} alone.",
            )


def call_arguments(
    pipeline: object, case: BenchCase, prompt: str, seed: int, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments for one generation.

    Args:
        pipeline: Whose call it is.
        case: Size, batch and steps; what is None is left to the pipeline.
        prompt: For pipelines that take one.
        seed: Of the noise, which is drawn on the CPU.
        given: Other arguments of the user's, which `check_call` has looked at.
    """
    takes = parameters_of(pipeline)
    arguments: dict[str, Any] = {
        "prompt": prompt,
        "width": case.width,
        "height": case.height,
        "num_inference_steps": case.steps,
        "num_frames": case.frames,
        "generator": torch.Generator("cpu").manual_seed(seed),
    }
    arguments |= dict.fromkeys(_PER_PROMPT, case.batch)
    if case.batch > 1 and not takes.intersection(_PER_PROMPT):
        arguments["prompt"] = [prompt] * case.batch
    chosen = {name: value for name, value in arguments.items() if name in takes and value is not None}
    return chosen | dict(given)


def what_was_made(output: object) -> Made:
    """How many pictures or videos, and of which size, a pipeline gave; the size is None for latents.

    Args:
        output: Of the pipeline: its first entry holds pictures (Pillow), videos (lists of pictures), or an array of either.
    """
    first = output[0] if isinstance(output, Sequence) or hasattr(output, "__getitem__") else output
    if hasattr(first, "shape"):
        return _of_array(tuple(first.shape), channels_first=isinstance(first, torch.Tensor))
    if not isinstance(first, Sequence) or not first:
        return Made(1)
    sample = first[0]
    if isinstance(sample, Sequence) and sample:
        width, height = _size(sample[0])
        return Made(len(first), width, height, len(sample))
    if hasattr(sample, "shape"):  # a list of arrays, one a video
        one = _of_array((1, *sample.shape), channels_first=isinstance(sample, torch.Tensor))
        return Made(len(first), one.width, one.height, one.frames)
    return Made(len(first), *_size(sample))


def _flag(name: str) -> str:
    """What the command line calls an argument that the user gave."""
    return "--image" if name == "image" else f"--call {name}"


def _of_array(shape: tuple[int, ...], *, channels_first: bool) -> Made:
    if len(shape) not in (4, 5):
        return Made(shape[0] if shape else 1)
    height, width = shape[-2:] if channels_first else shape[-3:-1]
    return Made(shape[0], width, height, shape[1] if len(shape) == 5 else None)


def _size(picture: object) -> tuple[int | None, int | None]:
    size = getattr(picture, "size", None)
    if isinstance(size, tuple) and len(size) == 2:
        return int(size[0]), int(size[1])
    return None, None
