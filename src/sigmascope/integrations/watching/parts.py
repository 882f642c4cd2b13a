"""What of a pipeline a watch puts its instruments on."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from sigmascope.probes.modules import components_of, unwrap
from sigmascope.probes.pipelines import pipeline_facts
from sigmascope.records.pipeline import PipelineFacts, Role


@dataclass(frozen=True, slots=True)
class Parts:
    """A pipeline taken apart, for as long as instruments are put on it.

    Attributes:
        pipeline: Itself.
        components: By name; those that are there.
        facts: Of them all.
    """

    pipeline: object
    components: Mapping[str, object]
    facts: PipelineFacts = field(default_factory=lambda: PipelineFacts("unknown"))

    def of_role(self, role: Role) -> Iterator[tuple[str, object]]:
        """The components that do this, with their names."""
        for name in self.facts.of_role(role):
            if name in self.components:
                yield name, self.components[name]


def take_apart(pipeline: object, known: PipelineFacts | None = None) -> Parts:
    """The parts of a pipeline, or of a denoiser alone.

    Args:
        pipeline: What has `components`, or a module.
        known: Its facts, if they were read before.
    """
    components = {name: part for name, part in components_of(pipeline).items() if part is not None}
    if not components and isinstance(pipeline, nn.Module):
        components = {"denoiser": pipeline}
    return Parts(pipeline, components, known or pipeline_facts(pipeline))


def pipelines_in(pipeline: object) -> list[object]:
    """Pipelines that a pipeline is made of, such as a prior's and a decoder's."""
    held = getattr(pipeline, "__dict__", {}).values()
    return [one for one in held if callable(one) and callable(getattr(type(one), "register_modules", None))]


def set_up_of(pipeline: object) -> tuple[object, ...]:
    """What tells cheaply that a pipeline's facts are no longer those that were read."""
    return tuple((name, id(part), *_state(part)) for name, part in components_of(pipeline).items())


def _state(part: object) -> tuple[object, ...]:
    module = unwrap(part) if isinstance(part, nn.Module) else None
    if module is None:
        return (type(part).__name__,)
    first = next(module.parameters(), None)
    return (
        None if first is None else (first.dtype, first.device),
        type(getattr(module, "_hf_hook", None)).__name__,
        getattr(module, "_diffusers_hook", None) is None,
        getattr(module, "_compiled_call_impl", None) is None,
        bool(getattr(module, "peft_config", None)),
    )
