"""`Run`: everything that is known of one watched workflow."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sigmascope.records.facts import ExceptionDetails, ModuleFacts, TensorFacts
from sigmascope.records.finding import Finding
from sigmascope.records.host import HostFacts
from sigmascope.records.memory import MemoryImpact, PeakMemory
from sigmascope.records.steps import Steps

STAGES = (
    "model_loading",
    "lora_application",
    "text_encoding",
    "model_sampling",
    "latent_encoding",
    "denoising",
    "latent_decoding",
)
"""The stages of a workflow, in order (SPEC section 2). Others may be named freely."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: what it took, what it changed, what it made, and the stages inside it.

    `started_seconds` counts from the beginning of the run. `facts` holds what only this kind of stage
    knows, as JSON values.
    """

    name: str
    started_seconds: float
    seconds: float
    success: bool = True
    error: str | None = None
    exception_details: ExceptionDetails | None = None
    memory: MemoryImpact | None = None
    peak: PeakMemory | None = None
    steps: Steps = field(default_factory=Steps)
    children: tuple["Stage", ...] = ()
    tensors: Mapping[str, TensorFacts] = field(default_factory=dict)
    modules: Mapping[str, ModuleFacts] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def walk(self) -> Iterator["Stage"]:
        """Yield this stage and all stages inside it, outermost first."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True, slots=True)
class Run:
    """One watched workflow. `started_at` is ISO 8601 in UTC."""

    id: str
    name: str
    started_at: str
    seconds: float
    host: HostFacts | None = None
    stages: tuple[Stage, ...] = ()
    findings: tuple[Finding, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    complete: bool = True
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def walk(self) -> Iterator[Stage]:
        """Yield every stage at every depth, in order."""
        for stage in self.stages:
            yield from stage.walk()
