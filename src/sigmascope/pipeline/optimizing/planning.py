"""From a pipeline, hardware and wishes to a plan."""

from typing import Any

from torch import nn

from sigmascope.errors import ConfigError
from sigmascope.pipeline.optimizing.circumstances import Circumstances
from sigmascope.pipeline.optimizing.config import OptimizationConfig
from sigmascope.pipeline.optimizing.hardware import Hardware
from sigmascope.pipeline.optimizing.kind import Considered, Kind
from sigmascope.pipeline.optimizing.kinds import KINDS
from sigmascope.pipeline.optimizing.plan import PIPELINE, Choice, NotTaken, Plan
from sigmascope.pipeline.optimizing.precision import PRECISION
from sigmascope.pipeline.optimizing.reckoning import circumstances_of, reckon_work, reckoning_of
from sigmascope.pipeline.optimizing.subject import look_at
from sigmascope.probes.modules import components_of


def make_plan(pipeline: Any, hardware: Hardware, config: OptimizationConfig) -> Plan:
    """Consider every kind of choice for a pipeline. Nothing is changed, and nothing runs.

    Args:
        pipeline: A diffusers pipeline.
        hardware: Where it shall run.
        config: What may be done to it.

    Raises:
        ConfigError: It is no pipeline and no module; what places and casts its models by itself, as ComfyUI does,
            is left alone.
    """
    if not isinstance(pipeline, nn.Module) and not components_of(pipeline):
        raise ConfigError(
            f"{type(pipeline).__name__} is no diffusers pipeline: it has no components.",
            hint="Give the pipeline, or its denoiser.",
        )
    found = circumstances_of(look_at(pipeline), hardware, config)
    left: list[NotTaken] = []
    for kind in KINDS:
        for one in _considered(kind, found):
            if isinstance(one, Choice):
                found.chosen.append(one)
            else:
                left.append(one)
        if kind.name == PRECISION:
            reckon_work(found)
    facts = found.subject.facts
    return Plan(
        facts.class_name, facts.architecture, hardware, tuple(found.chosen), tuple(left), reckoning_of(found)
    )


def _considered(kind: Kind, found: Circumstances) -> Considered:
    """What a kind says, unless it would change weights that are not there: accelerate holds them elsewhere."""
    components = found.subject.facts.components
    moving = [name for name, part in components.items() if part.offload == "sequential"]
    if moving and kind.changes:
        reason = f"accelerate holds the weights of {', '.join(moving)} elsewhere (sequential offloading)"
        yield NotTaken(kind.name, PIPELINE, reason)
    else:
        yield from kind.consider(found)
