"""What of a LoRA file is on a model."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from sigmascope.probes.adapters.applied import PatchState
from sigmascope.records.finding import Finding


@dataclass(frozen=True, slots=True)
class AppliedModule:
    """One module of the file.

    Attributes:
        name: As the file has it.
        keys: The model's weights that its numbers were found on.
        times: How often: above 1 it is applied more than once to the same weight.
        states: How far each of them has come, each state once.
        state_reason: Of the first.
        strength: What the file's ΔW is multiplied with on the model, all times together; None where it was not
            found or is no plain change.
        sources: The adapters that hold it, where the host names them.
        detail: Why it was not found; None where it was.
    """

    name: str
    keys: tuple[str, ...] = ()
    times: int = 0
    states: tuple[PatchState, ...] = ()
    state_reason: str = ""
    strength: float | None = None
    sources: tuple[str, ...] = ()
    detail: str | None = None

    @property
    def is_there(self) -> bool:
        """Whether it is on the model, acting or not."""
        return bool(self.keys)

    @property
    def acts(self) -> bool:
        """Whether it is or will be in the model's outputs."""
        return bool({"merged", "lazy", "registered"} & set(self.states))

    def as_dict(self) -> dict[str, Any]:
        """The module as JSON values."""
        listed = {name: list(getattr(self, name)) for name in ("keys", "states", "sources")}
        return asdict(self) | listed | {"is_there": self.is_there, "acts": self.acts}


@dataclass(frozen=True, slots=True)
class AppliedVerdict:
    """What of a file is on a model.

    Attributes:
        path: The file; None for a LoRA in memory.
        modules: Every module of the file, in its order.
        error: Why the file, or the model, could not be read; then nothing else is known.
        findings: What is wrong, with what to do, the worst first.
    """

    path: str | None
    modules: tuple[AppliedModule, ...] = ()
    error: str | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def there(self) -> tuple[AppliedModule, ...]:
        """Modules that are on the model."""
        return tuple(module for module in self.modules if module.is_there)

    @property
    def missing(self) -> tuple[AppliedModule, ...]:
        """Modules that are not."""
        return tuple(module for module in self.modules if not module.is_there)

    @property
    def twice(self) -> tuple[AppliedModule, ...]:
        """Modules that are applied more than once."""
        return tuple(module for module in self.modules if module.times > 1)

    @property
    def complete(self) -> bool:
        """Whether all modules are on the model and act."""
        return bool(self.modules) and all(module.acts for module in self.modules)

    @property
    def states(self) -> dict[str, int]:
        """How many modules have come how far."""
        return dict(Counter(state for module in self.there for state in module.states))

    @property
    def strengths(self) -> dict[float, int]:
        """How many modules are there at each strength, the most frequent first."""
        found = [round(module.strength, 2) for module in self.there if module.strength is not None]
        return dict(Counter(found).most_common())

    def as_dict(self) -> dict[str, Any]:
        """The verdict as JSON values, totals first."""
        return {
            "path": self.path,
            "complete": self.complete,
            "error": self.error,
            "total_modules": len(self.modules),
            "modules_there": len(self.there),
            "modules_missing": len(self.missing),
            "modules_twice": len(self.twice),
            "states": self.states,
            "strengths": self.strengths,
            "findings": [asdict(finding) for finding in self.findings],
            "modules": [module.as_dict() for module in self.modules],
        }
