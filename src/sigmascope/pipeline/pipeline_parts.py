"""A pipeline as planning sees it: its models by what they do, and the call that is planned for."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch import nn

from sigmascope.probes.models import components_of, unwrap
from sigmascope.probes.pipelines import pipeline_facts
from sigmascope.probes.reading import attempt
from sigmascope.records.facts import PipelineFacts, Role

_SPATIAL_FACTOR: Final = 8
"""Pixels along one latent element, where the pipeline does not say: that of the usual VAEs."""
_USUAL_SIDE: Final = 1024


@dataclass(frozen=True, slots=True)
class Subject:
    """A pipeline and what is known of it. It holds the models; it is for the time of planning.

    Attributes:
        pipeline: The pipeline itself.
        facts: What was read off it.
        models: Its modules, by the pipeline's names; a module under two names is here once.
    """

    pipeline: Any
    facts: PipelineFacts
    models: Mapping[str, nn.Module] = field(default_factory=dict)

    def of_role(self, role: Role) -> dict[str, nn.Module]:
        """Its models that do this, by name."""
        return {name: self.models[name] for name in self.facts.of_role(role) if name in self.models}

    def parameter(self, name: str) -> inspect.Parameter | None:
        """A parameter of the pipeline's call; None: it has none of that name, or cannot be called."""
        return call_parameters(self.pipeline).get(name)


def call_parameters(pipeline: Any) -> Mapping[str, inspect.Parameter]:
    """Parameters of a pipeline's `__call__`, by name; empty for a model alone."""
    if isinstance(pipeline, nn.Module | type | str):
        return {}
    read = attempt(lambda: inspect.signature(type(pipeline).__call__).parameters)
    return {} if read.value is None else {n: p for n, p in read.value.items() if n != "self"}


def look_at(pipeline: Any) -> Subject:
    """Read a pipeline's models and facts. Never raises.

    Args:
        pipeline: What has `components` as diffusers' have; a denoiser alone counts as one of a single component.
    """
    facts = pipeline_facts(pipeline)
    return Subject(pipeline, facts, models_of(pipeline))


def models_of(pipeline: Any) -> dict[str, nn.Module]:
    """The modules of a pipeline by its own names, each once."""
    parts = attempt(lambda: dict(components_of(pipeline))).value or {"denoiser": pipeline}
    found: dict[str, nn.Module] = {}
    for name, part in parts.items():
        module = part if isinstance(part, nn.Module) else attempt(lambda part=part: unwrap(part)).value  # type: ignore[misc]
        if module is not None and not any(module is other for other in found.values()):
            found[str(name)] = module
    return found


@dataclass(frozen=True, slots=True)
class Call:
    """The call that is planned for. Sizes in pixels.

    Attributes:
        batch_size: Images at once.
        branches: How often the denoiser works for each: 2 under classifier-free guidance.
        num_frames: 1 for images.
    """

    height: int
    width: int
    num_frames: int = 1
    batch_size: int = 1
    branches: int = 1


def planned_call(
    subject: Subject,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
    batch_size: int = 1,
) -> Call:
    """The call with these sizes, or else with the pipeline's own.

    Args:
        subject: The pipeline.
        height: In pixels; None: the pipeline's default.
        width: The same.
        num_frames: Of a video.
        batch_size: Images at once.
    """
    side = default_side(subject)
    frames = num_frames or _default(subject, "num_frames") or 1
    return Call(
        height or _default(subject, "height") or side,
        width or _default(subject, "width") or side,
        frames,
        batch_size,
        2 if _guides(subject) else 1,
    )


def default_side(subject: Subject) -> int:
    """Side of the square image that the pipeline makes when no size is given, in pixels."""
    factor = spatial_factor(subject)
    sizes = [getattr(subject.pipeline, "default_sample_size", None)]
    sizes += [config_value(model, "sample_size") for model in subject.of_role("denoiser").values()]
    size = next((one for one in sizes if isinstance(one, int)), None)
    return _USUAL_SIDE if size is None else size * factor


def spatial_factor(subject: Subject) -> int:
    """Pixels along one element of the latent."""
    for name in ("vae_scale_factor", "vae_scale_factor_spatial"):
        factor = getattr(subject.pipeline, name, None)
        if isinstance(factor, int):
            return factor
    return _SPATIAL_FACTOR


def config_value(model: object, name: str) -> Any:
    """A value of a model's configuration; None where it has none."""
    config = getattr(model, "config", None)
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _default(subject: Subject, name: str) -> Any:
    parameter = subject.parameter(name)
    return None if parameter is None or parameter.default is parameter.empty else parameter.default


def _guides(subject: Subject) -> bool:
    """Whether the pipeline, called without saying anything about guidance, computes two predictions at once.

    Qwen-Image, WAN and FLUX compute them one after the other, which takes no more memory.
    """
    if any(hasattr(model, "cache_context") for model in subject.of_role("denoiser").values()):
        one_after_the_other = subject.facts.class_name.startswith(("Flux", "Qwen", "Wan"))
        if one_after_the_other:
            return False
    scale = _default(subject, "guidance_scale")
    return isinstance(scale, int | float) and scale > 1
