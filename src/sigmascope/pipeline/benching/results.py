"""How a benchmark measures, and what becomes of each of its cases."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from sigmascope.analysis.bench_summary import BenchSummary
from sigmascope.analysis.diagnostics.diagnose import diagnose
from sigmascope.errors import ConfigError
from sigmascope.monitor.generation_plan import seconds_above_zero
from sigmascope.records.benchmark import BenchCase, Made
from sigmascope.records.finding import Finding
from sigmascope.records.run import Run

DEFAULT_TARGET: Final = 5.0


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """How a benchmark measures.

    Attributes:
        repeat: Generations of each case that count.
        warm_up: Generations of each case before them that do not.
        seed: The same for all of them, so that each is the same work.
        target: Seconds that a generation may take, above 0.

    Raises:
        ConfigError: A number below what makes sense.
    """

    repeat: int = 10
    warm_up: int = 1
    seed: int = 0
    target: float = DEFAULT_TARGET

    def __post_init__(self) -> None:
        for name, value, least in (("repeat", self.repeat, 1), ("warmup", self.warm_up, 0)):
            if value < least:
                raise ConfigError(f"--{name} is {value}.", hint=f"Give {least} or more.")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed is {self.seed}.", hint="Give a number from 0 to 2**63 - 1.")
        seconds_above_zero("--target", self.target)


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What became of one case.

    Attributes:
        case: As it was asked for.
        made: By one generation.
        runs: Those that count, in order.
        warm_up: Those before them.
        files: Where the runs lie.
        failure: Why it ended early, or did not run at all.
        summary: Of the runs; None without any.
    """

    case: BenchCase
    made: Made | None = None
    runs: tuple[Run, ...] = ()
    warm_up: tuple[Run, ...] = ()
    files: tuple[Path, ...] = ()
    failure: str | None = None
    summary: BenchSummary | None = None

    def findings(self) -> tuple[Finding, ...]:
        """What the rules say of the last run."""
        return diagnose(self.runs[-1]) if self.runs else ()

    def as_dict(self) -> dict[str, Any]:
        """All of it but the runs themselves, as JSON values."""
        return {
            "case": self.case.as_dict(),
            "made": None if self.made is None else asdict(self.made),
            "failure": self.failure,
            "summary": None if self.summary is None else self.summary.as_dict(),
            "findings": [
                {"id": one.id, "message": one.message, "advice": one.advice} for one in self.findings()
            ],
            "files": [str(path) for path in self.files],
        }
