"""What the rules look at: a run, or one generation in it, with what is known of its pipeline and its call."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sigmascope.records.host import AcceleratorFacts, HostFacts
from sigmascope.records.pipeline import CallFacts, ComponentFacts, PipelineFacts, Role
from sigmascope.records.run import Run, Stage
from sigmascope.records.stage_seconds import stage_seconds
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
        name: The stage that it is; None: the whole run, or what in it is part of no generation.
        number: Which generation of the run; one inside another has its number. None: no generation.
        denoises: Whether anything is generated: without, what is done is all that was to be done.
    """

    stages: tuple[Stage, ...]
    seconds: float
    pipeline: PipelineFacts | None = None
    call: CallFacts = field(default_factory=CallFacts)
    host: HostFacts | None = None
    name: str | None = None
    number: int | None = None
    denoises: bool = True

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
    """The generations of a run that say what was called, each by itself, then what was part of none; else the run as one.

    A pipeline that is noted on the run holds for all of its generations. Models that are loaded, prompts that are encoded
    and LoRAs that are put on between the calls are the part of none; its seconds are those of the run.
    """
    pipeline = _pipeline(run.facts)
    for number, outermost in enumerate(_outermost(run.stages)):
        for stage in filter(_is_generation, outermost.walk()):
            own = _pipeline(stage.facts) or pipeline
            call = _call(stage.facts)
            stages = tuple(stage.walk())
            yield Case(stages, stage.seconds, own, call, run.host, stage.name, number, _denoises(stages))
    between = tuple(_between(run.stages))
    if between or not run.stages:
        denoises = _denoises(run.walk())
        yield Case(between, run.seconds, pipeline, _call(run.facts), run.host, denoises=denoises)


def whole(run: Run) -> Case:
    """All of a run, for rules on what happens from one generation to the next."""
    return Case(tuple(run.walk()), run.seconds, _pipeline(run.facts), _call(run.facts), run.host)


def _is_generation(stage: Stage) -> bool:
    return PIPELINE in stage.facts or CALL in stage.facts


def _denoises(stages: Iterable[Stage]) -> bool:
    return any(stage.name == "denoising" or len(stage.steps) for stage in stages)


def _outermost(stages: Iterable[Stage]) -> Iterator[Stage]:
    """Generations that lie in no other."""
    for stage in stages:
        if _is_generation(stage):
            yield stage
        else:
            yield from _outermost(stage.children)


def _between(stages: Iterable[Stage]) -> Iterator[Stage]:
    """Stages that neither are part of a generation nor hold one."""
    for stage in stages:
        if not any(map(_is_generation, stage.walk())):
            yield from stage.walk()
        elif not _is_generation(stage):
            yield from _between(stage.children)


def seconds_of(stages: list[Stage]) -> float:
    """Of several stages together, by the accelerator's clock where it measured them."""
    return sum(map(stage_seconds, stages), 0.0)


def _pipeline(facts: Mapping[str, Any]) -> PipelineFacts | None:
    plain = facts.get(PIPELINE)
    return None if plain is None else from_plain(plain, PipelineFacts, PIPELINE)


def _call(facts: Mapping[str, Any]) -> CallFacts:
    plain = facts.get(CALL)
    return CallFacts() if plain is None else from_plain(plain, CallFacts, CALL)
