"""Stages and steps of whichever recorder is current, for library code that may or may not be watched."""

from types import TracebackType

from torch import Tensor

from sigmascope.monitor.live import CURRENT, LiveStage, Step
from sigmascope.monitor.recorder import Recorder


class NullStage:
    """What `stage` gives when nobody watches: takes everything and keeps nothing."""

    __slots__ = ()

    def __enter__(self) -> "NullStage":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def tensor(self, name: str, tensor: Tensor, *, statistics: bool | None = None) -> None:
        """Do nothing."""

    def module(self, name: str, module: object) -> None:
        """Do nothing."""

    def fact(self, name: str, value: object) -> None:
        """Do nothing."""


class NullStep:
    """What `step` gives when nobody watches."""

    __slots__ = ()

    def __enter__(self) -> "NullStep":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


_NULL_STAGE = NullStage()
_NULL_STEP = NullStep()


def current_recorder() -> Recorder | None:
    """Return the recorder whose `with` block, or whose stage, this context is in; None outside of all."""
    frame = CURRENT.get()
    while frame is not None and not frame.is_open:
        frame = frame.outer
    return None if frame is None else frame.recorder


def stage(name: str) -> LiveStage | NullStage:
    """Return a stage of the current recorder, or one that does nothing without a recorder (0.2 µs)."""
    recorder = current_recorder()
    return _NULL_STAGE if recorder is None else recorder.stage(name)


def step() -> Step | NullStep:
    """Return a step of the current recorder, or one that does nothing without a recorder (0.2 µs)."""
    recorder = current_recorder()
    return _NULL_STEP if recorder is None else recorder.step()
