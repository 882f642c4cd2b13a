"""What a pipeline is made of, read off its components without changing them or importing their library.

Beside the components: which processors and backends compute the denoisers' attention, and how each model was set up
to run (offloading, casting, compiling, memory format).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from sigmascope.files import short_path
from sigmascope.probes.models import (
    components_of,
    denoisers_of,
    detect_architecture,
    module_facts,
    modules_in,
    own_parameters,
    unwrap,
)
from sigmascope.probes.reading import PROBE_ERRORS, attempt
from sigmascope.records.run import AttentionFacts, ComponentFacts, JsonScalar, Offload, PipelineFacts, Role

_MOST_CONFIG = 60
_LONGEST_TEXT: Final = 200
_SOURCE = "_name_or_path"

_ROLES: Final[tuple[tuple[str, Role], ...]] = (
    ("text_encoder", "text_encoder"),
    ("image_encoder", "image_encoder"),
    ("vae", "vae"),
    ("vqvae", "vae"),
    ("vqgan", "vae"),
    ("movq", "vae"),
    ("tokenizer", "tokenizer"),
    ("scheduler", "scheduler"),
    ("controlnet", "other"),
    ("motion_adapter", "other"),  # its blocks are put into the U-Net
)
_PRIOR_PREFIX: Final = "prior_"
"""Begins the names of what makes the image's embedding from the text, in pipelines that then decode it."""

DEFAULT_BACKEND = "default"

# Hooks of diffusers and accelerate.
_CASTING, _GROUP_OFFLOADING = "layerwise_casting", "group_offloading"
_MODEL_OFFLOAD_HOOK = "CpuOffload"


def pipeline_facts(pipeline: object) -> PipelineFacts:
    """Components, architecture, attention and set-up of a pipeline. Never raises.

    Args:
        pipeline: What has `components` (diffusers), a mapping of names to components, or a denoiser alone.
    """
    class_name = type(pipeline).__name__
    found = attempt(lambda: _parts(pipeline))
    parts = found.value or {}
    architecture = detect_architecture(pipeline)
    unavailable = {} if found.reason is None else {"components": found.reason}
    if architecture.value is None:
        unavailable["architecture"] = architecture.reason or "unknown"
    components: dict[str, ComponentFacts] = {}
    for name, part in parts.items():
        reading = attempt(lambda name=name, part=part: _component(name, part))  # type: ignore[misc]
        if reading.value is None:
            unavailable[f"components.{name}"] = reading.reason or "unknown"
        else:
            components[name] = reading.value
    return PipelineFacts(
        class_name=class_name,
        architecture=None if architecture.value is None else architecture.value.kind,
        architecture_evidence=None if architecture.value is None else architecture.value.evidence,
        components=components,
        attention=attention_facts(_denoisers(pipeline)),
        source=attempt(lambda: _source(pipeline)).value,
        unavailable=unavailable,
    )


def _parts(pipeline: object) -> dict[str, object]:
    parts = pipeline if isinstance(pipeline, Mapping) else components_of(pipeline)
    if parts:
        return {str(name): part for name, part in parts.items() if part is not None}
    return {"denoiser": pipeline}


def _component(name: str, part: object) -> ComponentFacts:
    module = part if isinstance(part, nn.Module) else unwrap(part)
    role = _role(name, part)
    if module is None:
        return ComponentFacts(role, type(part).__name__, config=_config(part))
    switches = {
        which: bool(value) if isinstance(value := getattr(module, f"use_{which}", None), bool) else None
        for which in ("tiling", "slicing")
    }
    return ComponentFacts(
        role,
        type(module).__name__,
        module=module_facts(module),
        config=_config(module),
        offload=offload_of(module),
        compiled=is_compiled(part) or is_compiled(module),
        layerwise_casting=layerwise_casting(module),
        channels_last=channels_last(module),
        tiling=switches["tiling"],
        slicing=switches["slicing"],
    )


def _role(name: str, part: object) -> Role:
    if name.endswith("_scheduler"):
        return "scheduler"
    for beginning, role in _ROLES:
        if name.removeprefix(_PRIOR_PREFIX).startswith(beginning):
            return role
    return "denoiser" if detect_architecture(part).value is not None else "other"


def _config(part: object) -> dict[str, JsonScalar]:
    config = getattr(part, "config", None)
    if not isinstance(config, Mapping):
        to_dict = getattr(config, "to_dict", None)
        config = to_dict() if callable(to_dict) else {}
    return dict(_scalars(config)) if isinstance(config, Mapping) else {}


def _scalars(config: Mapping[object, object]) -> Iterator[tuple[str, JsonScalar]]:
    kept = 0
    for name, value in config.items():
        if value is None or isinstance(value, bool | int | float | str):
            if isinstance(value, str):
                value = (short_path(value) if name == _SOURCE else value)[:_LONGEST_TEXT]
            yield str(name), value
            kept += 1
        if kept == _MOST_CONFIG:
            return


def _denoisers(pipeline: object) -> list[nn.Module]:
    found = attempt(lambda: [module for one in denoisers_of(pipeline) if (module := unwrap(one)) is not None])
    return found.value or []


def _source(pipeline: object) -> str | None:
    """`_name_or_path`, which diffusers keeps in the configuration."""
    try:
        config = getattr(pipeline, "config", None)
        found = config.get(_SOURCE) if isinstance(config, Mapping) else None
    except PROBE_ERRORS:
        return None
    return short_path(found) if isinstance(found, str) and found else None


def attention_facts(denoisers: Iterable[nn.Module]) -> AttentionFacts:
    """Processors of the attention modules that have one, as diffusers' do. Never raises."""
    return attempt(lambda: _count_processors(denoisers)).value or AttentionFacts()


def _count_processors(denoisers: Iterable[nn.Module]) -> AttentionFacts:
    plain, joint, backends = Counter[str](), Counter[str](), Counter[str]()
    for denoiser in denoisers:
        for module in modules_in(denoiser):
            processor = getattr(module, "processor", None)
            if processor is None:
                continue
            name = type(processor).__name__
            plain[name] += 1
            joint[name] += isinstance(getattr(module, "add_q_proj", None), nn.Module)
            chosen = getattr(processor, "_attention_backend", None)
            backends[DEFAULT_BACKEND if chosen is None else str(getattr(chosen, "value", chosen))] += 1
    return AttentionFacts(
        dict(plain), {name: count for name, count in joint.items() if count}, dict(backends)
    )


def offload_of(module: nn.Module) -> Offload | None:
    """Which offloading moves a model's weights, by the hooks of accelerate and diffusers on it.

    Returns:
        "model": the whole model moves when it is called; "sequential": each leaf does; "group": groups of
        layers do; None: nothing moves.
    """
    if _has_hook(module, _GROUP_OFFLOADING):
        return "group"
    if type(getattr(module, "_hf_hook", None)).__name__ == _MODEL_OFFLOAD_HOOK:
        return "model"
    if any(getattr(getattr(part, "_hf_hook", None), "offload", False) is True for part in modules_in(module)):
        return "sequential"
    return None


def _has_hook(module: nn.Module, name: str) -> bool:
    registries = (getattr(part, "_diffusers_hook", None) for part in modules_in(module))
    return any(name in key for one in registries for key in (getattr(one, "hooks", None) or ()))


def layerwise_casting(module: nn.Module) -> bool:
    """Whether diffusers stores the weights in a narrower type than it computes in."""
    return _has_hook(module, _CASTING)


def is_compiled(module: object) -> bool:
    """Whether torch.compile has been applied to a module, or to a part of it."""
    if not isinstance(module, nn.Module):
        return False
    return any(
        type(part).__name__ == "OptimizedModule" or getattr(part, "_compiled_call_impl", None) is not None
        for part in modules_in(module)
    )


def channels_last(module: nn.Module) -> bool | None:
    """Whether most of its convolution weights lie channels-last.

    Kernels of 1×1 are both at once and do not count; None where no others are.
    """
    kernels = [p for p in _parameters(module) if p.dim() == 4 and p.shape[1] > 1 and max(p.shape[2:]) > 1]
    last = sum(kernel.is_contiguous(memory_format=torch.channels_last) for kernel in kernels)
    return None if not kernels else 2 * last > len(kernels)


def _parameters(module: nn.Module) -> list[Tensor]:
    return [parameter for part in modules_in(module) for _, parameter in own_parameters(part)]
