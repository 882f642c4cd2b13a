"""What has a run: a `Run` itself, a `Watch`, a `Recorder`, a monitor, the report of a training.

Whatever is shown, saved, compared or merged goes through `run_of` or `runs_of`, so that each may be given.
"""

from collections.abc import Iterable
from typing import Any, Protocol, TypeAlias, runtime_checkable

from sigmascope.errors import ConfigError
from sigmascope.records.run import Run


@runtime_checkable
class HasRecord(Protocol):
    """Such as a `Watch`: it gives the run of its block."""

    def record(self) -> Run:
        """The run so far, or of the last block."""


@runtime_checkable
class HasRun(Protocol):
    """Such as a `Recorder` or a `WorkflowMonitor`, which give the run, or a training's report, which holds it."""

    @property
    def run(self) -> Any:
        """The run, or a method that gives it."""


Recorded: TypeAlias = Run | HasRecord | HasRun


def run_of(recorded: object) -> Run:
    """The run that something has.

    Raises:
        ConfigError: It has none, or nothing was recorded yet.
    """
    if isinstance(recorded, Run):
        return recorded
    for name in ("record", "run"):
        if name not in dir(type(recorded)) and name not in getattr(recorded, "__dict__", {}):
            continue  # asking a watch for what it lacks asks its run, of which there may be none
        held = getattr(recorded, name)
        try:
            run = held() if callable(held) else held
        except AttributeError as missing:
            raise ConfigError(
                f"This {type(recorded).__name__} has no run: {missing}.",
                hint="Write: with sigmascope.watch(pipe) as run:",
            ) from missing
        if isinstance(run, Run):
            return run
    raise ConfigError(
        f"A {type(recorded).__name__} is not a run and holds none.",
        hint="Give a Run, a Watch or a Recorder; load_run(path) reads a file.",
    )


def runs_of(recorded: object) -> list[Run]:
    """The runs of one such thing, or of several.

    Raises:
        ConfigError: One of them has none.
    """
    if isinstance(recorded, Iterable) and not isinstance(recorded, Run | str | bytes):
        return [run_of(each) for each in recorded]
    return [run_of(recorded)]
