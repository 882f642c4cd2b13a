"""`Run`: everything that is known of one watched workflow."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sigmascope.errors import UnknownStageError
from sigmascope.records.facts import ExceptionDetails, ModuleFacts, TensorFacts
from sigmascope.records.finding import Finding
from sigmascope.records.host import HostFacts
from sigmascope.records.memory import MemoryImpact, PeakMemory
from sigmascope.records.peak import highest
from sigmascope.records.steps import Steps

if TYPE_CHECKING:
    import rich.console

    from sigmascope.records.prompts import PromptPrivacy

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
    children: "tuple[Stage, ...]" = ()
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

    def stage(self, name: str) -> Stage:
        """The first stage of that name at any depth.

        Raises:
            UnknownStageError: There is none; the message names those there are.
        """
        for stage in self.walk():
            if stage.name == name:
                return stage
        names = ", ".join(dict.fromkeys(stage.name for stage in self.walk())) or "none at all"
        raise UnknownStageError(f"The run {self.name!r} has no stage {name!r}.", hint=f"It has: {names}.")

    def peak(self) -> PeakMemory:
        """The highest memory of all stages, with seconds since the run began."""
        return highest((stage.started_seconds, stage.peak) for stage in self.walk() if stage.peak)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the run as JSON, whole or not at all; `sigmascope.load_run` reads it.

        Raises:
            WriteError: The file cannot be written. What was there before stays.
            TypeError: A fact is of a type that JSON lacks.
        """
        from sigmascope import save_run

        save_run(self, path)

    def print(self, console: "rich.console.Console | None" = None) -> None:
        """Print stages, memory, tensors and findings, as `sigmascope.reports.print_run` does.

        Args:
            console: Where to; standard output by default.
        """
        from sigmascope import print_run

        print_run(self, console)

    def to_trace(self, path: str | os.PathLike[str], *, prompts: "PromptPrivacy" = "hash") -> None:
        """Write the run as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

        Args:
            path: The file; viewers expect the ending .json.
            prompts: What the trace says of prompts that the run holds as text.

        Raises:
            ConfigError: It holds what cannot be a time, as a file changed by hand may; the message says where.
            WriteError: The file cannot be written. What was there before stays.
            TypeError: A fact is of a type that JSON lacks.
        """
        from sigmascope import write_trace

        write_trace([self], path, prompts=prompts)
