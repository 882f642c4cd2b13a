"""Calls of modules that Ctrl-C ended: PyTorch tells forward hooks of an `Exception`, and of nothing else."""

import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING

from sigmascope.integrations.watching.instrument import reference_to

if TYPE_CHECKING:
    from sigmascope.integrations.watching.activity import Activity
    from sigmascope.monitor.live import LiveStage

SEEN_LATE = "the call was broken off, by Ctrl-C or the like; when is not known, only that it was before what came next"


class BrokenOff(BaseException):
    """Stands in the record for what ended a call, which hooks are not told of."""


class OpenCalls:
    """Calls outside of pipelines whose stages are open, and which of them are over without having said so.

    Calls in a pipeline need none of this: the stage of its own call ends whatever it was left by.
    """

    def __init__(self) -> None:
        self._open: list[OpenCall] = []

    def begin(self, activity: "Activity", stage: "LiveStage", module: object) -> "OpenCall | None":
        """Remember a call that is about to run; None where it cannot be followed.

        Args:
            activity: In which the stage lies.
            stage: The call's.
            module: What is called.
        """
        if activity.pipeline_id is not None:
            return None
        call = OpenCall(activity, stage, module)
        if not call.depth:
            return None  # this PyTorch calls modules in another way
        self._open.append(call)
        return call

    def end(self, call: "OpenCall | None") -> None:
        """Forget a call that said itself that it is over."""
        if call in self._open:
            self._open.remove(call)

    def close_broken(self, activity: "Activity", entering: object = None) -> None:
        """Close the stages of an activity's calls that run no more.

        Args:
            activity: Which.
            entering: A module whose call has begun and is none of those.
        """
        for call in [one for one in self._open if one.activity is activity]:
            if not call.is_running(entering):
                self._open.remove(call)
                call.break_off()


class OpenCall:
    """One call of a module.

    Args:
        activity: In which its stage lies.
        stage: Its stage.
        module: What is called.
    """

    def __init__(self, activity: "Activity", stage: "LiveStage", module: object) -> None:
        self.activity = activity
        self._stage = stage
        self._module = reference_to(module)
        self._thread = threading.get_ident()
        self.depth = _calls_here(module)

    def is_running(self, entering: object = None) -> bool:
        """Whether the call is among those that this thread is in; another thread's is taken to be."""
        if threading.get_ident() != self._thread:
            return True
        module = self._module()
        return module is not None and _calls_here(module) - (module is entering) >= self.depth

    def break_off(self) -> None:
        """Close the stage, and those inside it, as left by what cannot be known."""
        error = sys.exception()
        is_known = error is not None and not isinstance(error, Exception)
        self.activity.leave(self._stage, error if is_known else BrokenOff(SEEN_LATE))


def _calls_here(module: object) -> int:
    """How many calls of a module this thread is in: more than one where it calls itself."""
    found = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module:
            found += 1
        frame = frame.f_back
    return found
