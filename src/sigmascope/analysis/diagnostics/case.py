"""What the rules look at: a run, or one generation in it, with what is known of its pipeline and its call."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sigmascope.records.host import AcceleratorFacts, HostFacts
from sigmascope.records.pipeline import CallFacts, ComponentFacts, PipelineFacts, Role
from sigmascope.records.run import Run, Stage
from sigmascope.records.structure import from_plain

PIPELINE, CALL = "pipeline", "call"
"""The facts of a run or a stage in which `PipelineFacts` and `CallFacts` lie."""


@dataclass(frozen=True, slots=True)
class Case:
    """One generation.

    Attributes:
        stages: Its stages, outermost first, those inside others included.
        seconds: What it took in all.
        pipeline: What ran; None: not recorded.
        call: What it was called with.
        host: The machine.
        name: The stage that it is; None: the whole run.
    """

    stages: tuple[Stage, ...]
    seconds: float
    pipeline: PipelineFacts | None = None
    call: CallFacts = field(default_factory=CallFacts)
    host: HostFacts | None = None
    name: str | None = None

    def named(self, *names: str) -> list[Stage]:
        """Stages of these names, none of them inside another one of them."""
        found = [stage for stage in self.stages if stage.name in names]
        inner = {id(part) for stage in found for part in stage.walk() if part is not stage}
        return [stage for stage in found if id(stage) not in inner]

    def with_steps(self) -> list[Stage]:
        """Stages that have steps of their own."""
        return [stage for stage in self.stages if len(stage.steps)]

    def components(self, role: Role) -> Mapping[str, ComponentFacts]:
        """The pipeline's components that do this, by name."""
        return {} if self.pipeline is None else self.pipeline.of_role(role)

    def accelerators(self) -> tuple[AcceleratorFacts, ...]:
        """Of the machine."""
        return () if self.host is None else self.host.accelerators


def cases(run: Run) -> Iterator[Case]:
    """The generations of a run that say what was called, each by itself; else the run as one.

    A pipeline that is noted on the run holds for all of its generations.
    """
    pipeline = _pipeline(run.facts)
    apart = [stage for stage in run.walk() if PIPELINE in stage.facts or CALL in stage.facts]
    for stage in apart:
        own = _pipeline(stage.facts) or pipeline
        yield Case(tuple(stage.walk()), stage.seconds, own, _call(stage.facts), run.host, stage.name)
    if not apart:
        yield Case(tuple(run.walk()), run.seconds, pipeline, _call(run.facts), run.host)


def seconds_of(stages: list[Stage]) -> float:
    """Of several stages together."""
    return sum((stage.seconds for stage in stages), 0.0)


def _pipeline(facts: Mapping[str, Any]) -> PipelineFacts | None:
    plain = facts.get(PIPELINE)
    return None if plain is None else from_plain(plain, PipelineFacts, PIPELINE)


def _call(facts: Mapping[str, Any]) -> CallFacts:
    plain = facts.get(CALL)
    return CallFacts() if plain is None else from_plain(plain, CallFacts, CALL)
