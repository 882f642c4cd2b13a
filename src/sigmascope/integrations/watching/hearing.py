"""Which of several watches hears what happens in a thread or task."""

from typing import TYPE_CHECKING

from sigmascope.monitor.live import CURRENT
from sigmascope.monitor.recorder import Recorder

if TYPE_CHECKING:
    from sigmascope.integrations.watching.session import Session

OPEN: "list[Session]" = []
"""All sessions of this process that are not over."""


def hears(session: "Session", pipeline: object) -> bool:
    """Whether what happens here to a pipeline belongs to the session.

    What happens inside the block of a watch belongs to it, and to no other watch of the same pipeline in another
    thread. What happens in a context outside of all their blocks, such as a worker thread's, belongs to all.

    Args:
        session: Which.
        pipeline: The pipeline; None: none that is known.
    """
    if session.is_over or not session.wants(pipeline):
        return False
    around = _recorders_here()
    if session.recorder in around:
        return True
    return not any(one.recorder in around and one.wants(pipeline) for one in list(OPEN))


def _recorders_here() -> list[Recorder]:
    """The recorders whose blocks this context is in."""
    recorders = []
    frame = CURRENT.get()
    while frame is not None:
        if frame.is_open:
            recorders.append(frame.recorder)
        frame = frame.outer
    return recorders


def leave(recorder: Recorder) -> None:
    """Take this context out of all scopes of a recorder, also of those that could not be closed."""
    frame = CURRENT.get()
    while frame is not None:
        frame.is_open = frame.is_open and frame.recorder is not recorder
        frame = frame.outer
    frame = CURRENT.get()
    while frame is not None and not frame.is_open:
        frame = frame.outer
    CURRENT.set(frame)
