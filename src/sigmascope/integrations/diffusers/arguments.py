"""A call's arguments: by name, as `CallFacts`, its prompts, its seeds, and those that a recipe keeps.

All of it is read from what the call was given. Nothing waits for an accelerator.
"""

import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import PurePath
from types import CodeType
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from sigmascope.files import CELL, is_cell
from sigmascope.integrations.diffusers.pictures import told_apart
from sigmascope.probes.accelerators import is_capturing
from sigmascope.records.prompts import is_choice
from sigmascope.records.run import CallFacts

_GUIDANCE: Final = ("true_cfg_scale", "guidance_scale", "prior_guidance_scale")
_IMAGES: Final = ("image", "images", "init_image", "input_image", "source_image", "reference_image", "video")
_CALLBACKS: Final = ("callback_on_step_end", "callback")
_PER_PROMPT: Final = ("num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt")
_MOST_SHOWN: Final = 8
_UNSEEDED: Final = 67280421310721
"""What PyTorch's own generator has before anybody gives it a seed."""
_KEYWORDS: Final = "_kwargs"
"""What names of arguments end in that are mappings of keywords, whose keys are no words of a prompt."""
_SCALING: Final = ("cross_attention_kwargs", "joint_attention_kwargs", "attention_kwargs")
_OF_PROMPTS: Final = "prompt_embeds"
"""In the names of ready embeddings of prompts: prompt_embeds_2, negative_pooled_prompt_embeds, …"""
_EMBEDS: Final = ("prompt_embeds", "prompt_embeds_1", "image_embeds", "negative_prompt_embeds")


def named_arguments(pipeline: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The call's arguments by name, with the defaults of those that were not given.

    A modular pipeline names its inputs in its blocks.
    """
    bound = inspect.signature(type(pipeline).__call__).bind_partial(pipeline, *args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    blocks = getattr(pipeline, "blocks", None)
    for declared in getattr(blocks, "inputs", None) or ():
        known = getattr(declared, "name", None)
        if isinstance(known, str):
            arguments.setdefault(known, getattr(declared, "default", None))
    return arguments


def call_facts(arguments: Mapping[str, Any]) -> CallFacts:
    """Steps, guidance, size, batch and seed as they were given."""
    seeds = seeds_of(arguments)
    return CallFacts(
        num_inference_steps=_steps(arguments),
        guidance_scale=_guidance(arguments),
        height=_whole_number(arguments.get("height")),
        width=_whole_number(arguments.get("width")),
        num_frames=_whole_number(arguments.get("num_frames")),
        batch_size=_batch(arguments),
        has_image=any(arguments.get(name) is not None for name in _IMAGES),
        seed=seeds[0] if len(seeds) == 1 else None,
        callback=_callback(arguments),
    )


def _callback(arguments: Mapping[str, Any]) -> str | None:
    """The name of the function, or of the object's class, with its file and line: "preview (generate.py:31)"."""
    callback = next((arguments[name] for name in _CALLBACKS if arguments.get(name) is not None), None)
    return None if callback is None else _name_of_callable(callback)


def _name_of_callable(callback: Any) -> str:
    while isinstance(callback, functools.partial):
        callback = callback.func
    name = str(getattr(callback, "__qualname__", type(callback).__qualname__)).rsplit("<locals>.", 1)[-1]
    code = getattr(_function_of(callback), "__code__", None)
    return name if code is None else f"{name} ({place_of(code)})"


def _function_of(called: Any) -> Any:
    """The function that runs where something is called: its own, a method's, or that of its class."""
    if hasattr(called, "__code__"):
        return called
    return getattr(called, "__func__", None) or getattr(type(called), "__call__", None)  # noqa: B004


def place_of(code: CodeType) -> str:
    """Where code is written, such as "generate.py:31"; of a notebook's cell, whose file is named by a hash, its line."""
    path = code.co_filename
    return f"{CELL if is_cell(path) else PurePath(path).name}:{code.co_firstlineno}"


def _of_callback(callback: Any) -> dict[str, str]:
    """What a callback does beside its name: a hash of its code, and numbers that `functools.partial` gives it."""
    given: dict[str, object] = {}
    while isinstance(callback, functools.partial):
        by_place = {str(place): value for place, value in enumerate(callback.args, 1)}
        given = {**by_place, **callback.keywords, **given}
        callback = callback.func
    function = _function_of(callback)
    told = {}
    if isinstance(code := getattr(function, "__code__", None), CodeType):
        told["callback code"] = xxh3_64_hexdigest(repr((_in_plain(code), _defaults_of(function))).encode())[
            :8
        ]
    numbers = [f"{name} {value}" for name, value in given.items() if isinstance(value, bool | int | float)]
    if given:
        told["callback with"] = ", ".join(numbers) or "no numbers"
    return told


def _defaults_of(function: Any) -> list[object]:
    """The values that arguments have by themselves, if they are plain."""
    held = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return [value if isinstance(value, bool | int | float | str) else type(value).__name__ for value in held]


def _in_plain(code: CodeType) -> tuple[object, ...]:
    """What code does, without its place; the same in each process."""
    constants = [
        _in_plain(held) if isinstance(held, CodeType) else _in_order(held) for held in code.co_consts
    ]
    return code.co_code, constants, code.co_names, code.co_varnames


def _in_order(constant: object) -> object:
    return sorted(map(repr, constant)) if isinstance(constant, frozenset) else repr(constant)


def other_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers, switches, choices and pictures among the arguments that `CallFacts` does not have.

    A picture is identified by its size and the hash of its pixels. Texts are prompts (`texts_of_call`), and not here.
    Of dictionaries there are `lora_scales`.
    """
    known = {field.name for field in fields(CallFacts)} | {*_GUIDANCE, *_PER_PROMPT}
    others = {name: value for name, value in arguments.items() if name not in known and "prompt" not in name}
    pictures = {name: told_apart(value) for name, value in others.items()}
    return (
        {
            name: value if pictures[name] is None else pictures[name]
            for name, value in others.items()
            if isinstance(value, bool | int | float) or is_choice(name, value) or pictures[name] is not None
        }
        | lora_scales(arguments)
        | _scales(arguments)
    )


def _scales(arguments: Mapping[str, Any]) -> dict[str, float]:
    """All scales of guidance as they were given, where there are several: `CallFacts` has the one that asks for it."""
    scales = {name: arguments[name] for name in _GUIDANCE if isinstance(arguments.get(name), int | float)}
    return scales if len(scales) > 1 else {}


class Given(NamedTuple):
    """What a recipe holds of arguments that are no numbers, switches or choices.

    Attributes:
        texts: By name: "none", the numbers of a list, the name of a function; none of them is a text of the call's.
        tensors: By name: those whose content is to be hashed.
        not_looked_at: By name, the type of what is none of these.
    """

    texts: dict[str, str]
    tensors: dict[str, list[Tensor]]
    not_looked_at: dict[str, str]


def given_arguments(arguments: Mapping[str, Any]) -> Given:
    """What `other_arguments` leaves out, but texts, which are prompts, generators, which are seeds, and callbacks."""
    given = Given({}, {}, {})
    known = {*other_arguments(arguments), *_CALLBACKS, *_PER_PROMPT, *_GUIDANCE, "self", "generator"}
    known |= {field.name for field in fields(CallFacts)}
    for name, value in arguments.items():
        if name not in known and not _is_prompt(name, value):
            _describe(given, name, value, depth=1)
    callback = next((arguments[name] for name in _CALLBACKS if arguments.get(name) is not None), None)
    if callback is not None:
        given.texts.update(_of_callback(callback))
    if not _generators(arguments):
        seed = torch.initial_seed()
        given.texts["global seed"] = "not set" if seed == _UNSEEDED else str(seed)
    return given


def _is_prompt(name: str, value: object) -> bool:
    if isinstance(value, str):
        return True
    return (
        "prompt" in name and isinstance(value, list | tuple) and any(isinstance(part, str) for part in value)
    )


def _describe(given: Given, name: str, value: object, *, depth: int) -> None:
    if value is None:
        given.texts[name] = "none"
    elif isinstance(value, Tensor):
        given.tensors[name] = [value]
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        given.texts[name] = f"{_shape(value.shape)} {value.dtype} {xxh3_64_hexdigest(value.tobytes())}"
    elif isinstance(value, Mapping) and depth and name.endswith(_KEYWORDS):
        names = [key for key in value if isinstance(key, str) and key.isidentifier()]
        given.texts[name] = f"with {', '.join(names)}" if names else "none"
        for key in names:
            _describe(given, f"{name}.{key}", value[key], depth=depth - 1)
    elif isinstance(value, Mapping):
        given.not_looked_at[name] = (
            f"{type(value).__name__} of {len(value)}"  # a key may be a word of the prompt
        )
    elif isinstance(value, list | tuple):
        _describe_several(given, name, value)
    elif isinstance(value, bool | int | float):
        given.texts[name] = str(value)
    elif callable(value):
        given.texts[name] = _name_of_callable(value)
    elif not isinstance(value, str):
        given.not_looked_at[name] = type(value).__name__


def _describe_several(given: Given, name: str, values: Sequence[Any]) -> None:
    if values and all(isinstance(value, Tensor) for value in values):
        given.tensors[name] = list(values)
    elif all(isinstance(value, bool | int | float) for value in values):
        shown = ", ".join(
            f"{value:.6g}" if isinstance(value, float) else str(value) for value in values[:_MOST_SHOWN]
        )
        more = (
            f", … {len(values)} numbers, {xxh3_64_hexdigest(repr(list(values)).encode())}"
            if len(values) > _MOST_SHOWN
            else ""
        )
        given.texts[name] = f"[{shown}{more}]"
    elif not all(isinstance(value, str) for value in values):
        given.not_looked_at[name] = f"{type(values).__name__} of {type(values[0]).__name__}"


def shape_and_dtype(tensors: Sequence[Tensor]) -> str:
    """Such as "1×4×64×64 float16"."""
    return ", ".join(
        f"{_shape(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors
    )


def _shape(shape: Iterable[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def lora_scales(arguments: Mapping[str, Any]) -> dict[str, float]:
    """What the call multiplies the strengths of all LoRAs by, under names such as `cross_attention_kwargs.scale`."""
    scales = {
        name: given.get("scale") for name in _SCALING if isinstance(given := arguments.get(name), Mapping)
    }
    return {f"{name}.scale": float(scale) for name, scale in scales.items() if isinstance(scale, int | float)}


def given_embeddings(arguments: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The embeddings of prompts, and of negative prompts, among the arguments of a call or of an encoding."""
    sides: tuple[list[Tensor], list[Tensor]] = [], []
    for name, value in arguments.items():
        if _OF_PROMPTS in name and "mask" not in name:
            held = value if isinstance(value, list | tuple) else [value]
            sides[name.startswith("negative")].extend(one for one in held if isinstance(one, Tensor))
    return sides


def _steps(arguments: Mapping[str, Any]) -> int | None:
    for name in ("timesteps", "sigmas"):
        schedule = arguments.get(name)
        if isinstance(schedule, list | tuple) and schedule:
            return len(schedule)
    return _whole_number(arguments.get("num_inference_steps"))


def _whole_number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _guidance(arguments: Mapping[str, Any]) -> float | None:
    """The scale that asks for guidance: that of true classifier-free guidance where it is on beside a distilled one."""
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
    prompts = _prompt_count(arguments.get("prompt"), arguments)
    if prompts is None:
        return None
    for name in _PER_PROMPT:
        prompts *= _whole_number(arguments.get(name)) or 1
    return prompts


def _prompt_count(prompt: object, arguments: Mapping[str, Any]) -> int | None:
    if isinstance(prompt, str):
        return 1
    if isinstance(prompt, list | tuple) and prompt:
        return len(prompt)
    embeds: Iterable[Any] = (arguments.get(name) for name in _EMBEDS)
    return next((tensor.shape[0] for tensor in embeds if isinstance(tensor, Tensor) and tensor.dim()), None)


def seeds_of(arguments: Mapping[str, Any]) -> list[int]:
    """The seeds of the call's generators, one for each."""
    return [generator.initial_seed() for generator in _generators(arguments)]


def states_of(arguments: Mapping[str, Any]) -> list[str]:
    """The hash of each generator's state: one that has drawn before gives other noise than its seed says."""
    return [*map(_state_of, _generators(arguments))]


def _state_of(generator: torch.Generator) -> str:
    return xxh3_64_hexdigest(generator.get_state().numpy().tobytes())


def global_states_of(arguments: Mapping[str, Any]) -> dict[str, str] | None:
    """The hash of the state of each generator that PyTorch draws from where it is given none, by its device.

    None where they tell nothing: the call was given one of them, or neither the call nor PyTorch was given a seed.
    """
    given, own = _generators(arguments), {"cpu": torch.default_generator}
    if not is_capturing("cuda"):  # without generators until it is in use
        own |= {f"cuda:{index}": held for index, held in enumerate(torch.cuda.default_generators)}
    is_given = any(one is held for one in given for held in own.values())
    if is_given or not (given or torch.initial_seed() != _UNSEEDED):
        return None
    return {device: _state_of(generator) for device, generator in own.items()}


def generator_devices_of(arguments: Mapping[str, Any]) -> list[str]:
    """Where each generator draws: one seed gives other noise on another kind of device."""
    return [generator.device.type for generator in _generators(arguments)]


def _generators(arguments: Mapping[str, Any]) -> list[torch.Generator]:
    given = arguments.get("generator")
    generators = given if isinstance(given, list | tuple) else [given]
    return [generator for generator in generators if isinstance(generator, torch.Generator)]
