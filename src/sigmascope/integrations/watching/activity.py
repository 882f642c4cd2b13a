"""What one watch has open in one thread or task: a generation, or work outside of any."""

from collections import Counter
from contextvars import ContextVar
from typing import TYPE_CHECKING

from sigmascope.monitor.live import LiveStage

if TYPE_CHECKING:
    from sigmascope.integrations.watching.denoising import Denoising
    from sigmascope.integrations.watching.encoding_analysis import Encoding
    from sigmascope.integrations.watching.session import Session


class Activity:
    """The stages that a session has open in one context.

    Args:
        session: Whose.
        pipeline_id: `id` of the pipeline that is being called; None outside of calls.

    Attributes:
        pipeline: What is being called, until the call is over.
        planned_steps: Of the scheduler's last schedule.
        most_calls_a_step: How often one denoiser was called for one step.
        size: Height and width of what was decoded.
        encoding: What is seen of a call of `encode_prompt` that is going on.
        runs: How many calls of each encoder have stages.
        is_guided: Whether the pipeline said, as the denoising began, that it guides without a classifier.
        is_moving: Whether weights are being moved.
        is_tiled: Whether the VAE was seen to work in tiles.
        moved: Nanoseconds that weights were moved for, and how often, by the stage that was open.
    """

    __slots__ = (
        "denoising",
        "encoding",
        "is_guided",
        "is_moving",
        "is_tiled",
        "most_calls_a_step",
        "moved",
        "open",
        "pipeline",
        "pipeline_id",
        "planned_steps",
        "runs",
        "session",
        "size",
    )

    def __init__(self, session: "Session", pipeline_id: int | None = None) -> None:
        self.session = session
        self.pipeline_id = pipeline_id
        session.activities.append(self)
        self.open: list[tuple[str, LiveStage]] = []
        self.denoising: "Denoising | None" = None
        self.pipeline: object = None
        self.planned_steps: int | None = None
        self.most_calls_a_step = 0
        self.size: tuple[int, int] | None = None
        self.encoding: "Encoding | None" = None
        self.runs: Counter[str] = Counter()
        self.is_guided: object = None
        self.is_moving = False
        self.is_tiled = False
        self.moved: dict[LiveStage, tuple[int, int]] = {}

    def is_in(self, *names: str) -> bool:
        """Whether a stage of one of these names is open here."""
        return any(name in names for name, _ in self.open)

    def enter(self, name: str) -> LiveStage:
        """Open a stage inside those that are open."""
        stage = self.session.recorder.stage(name)
        stage.__enter__()
        self.open.append((name, stage))
        return stage

    def leave(self, stage: LiveStage, error: BaseException | None) -> None:
        """Close a stage, and before it all that were opened in it and are still open."""
        while any(one is stage for _, one in self.open):
            _, innermost = self.open.pop()
            if self.denoising is not None and innermost is self.denoising.stage:
                self.denoising.finish()
                self.most_calls_a_step = max(self.most_calls_a_step, self.denoising.most_calls_a_step)
                self.denoising = None
            innermost.__exit__(None if error is None else type(error), error, None)
            nanoseconds, times = self.moved.pop(innermost, (0, 0))
            if times:
                innermost.fact("weights_moved", {"seconds": nanoseconds / 1e9, "times": times})

    def weights_moved(self, nanoseconds: int) -> None:
        """Take a move of weights to or from a device, which has just ended.

        Args:
            nanoseconds: How long it took.
        """
        if self.open:
            stage = self.open[-1][1]
            before, times = self.moved.get(stage, (0, 0))
            self.moved[stage] = (before + nanoseconds, times + 1)
        if self.denoising is not None:
            self.denoising.weights_moved(nanoseconds)

    def end_denoising(self, error: BaseException | None = None) -> None:
        """Close the denoising, if any is open."""
        if self.denoising is not None:
            self.leave(self.denoising.stage, error)

    def end(self, error: BaseException | None = None) -> None:
        """Close all that is open."""
        while self.open:
            self.leave(self.open[0][1], error)


def guides(pipeline: object) -> object:
    """What a pipeline says now of guiding without a classifier; callbacks may change it. None: nothing."""
    return getattr(pipeline, "do_classifier_free_guidance", None)


ACTIVITIES: ContextVar[tuple[Activity, ...]] = ContextVar("sigmascope_activities", default=())
"""What is going on in this context, of all watches, the innermost last."""


def denoising_here(session: "Session") -> "Denoising | None":
    """The denoising that the session's innermost activity in this context has open: the hot path."""
    activities = ACTIVITIES.get()
    if activities and activities[-1].session is session:  # unless several watches are at work
        return None if session.is_over else activities[-1].denoising
    activity = current_activity(session)
    return None if activity is None else activity.denoising


def current_activity(session: "Session") -> Activity | None:
    """The session's innermost activity in this context."""
    for activity in reversed(ACTIVITIES.get()):
        if activity.session is session and not session.is_over:
            return activity
    return None


def enter_activity(activity: Activity) -> None:
    """Make it the innermost of this context."""
    ACTIVITIES.set((*ACTIVITIES.get(), activity))


def leave_activities(*gone: Activity) -> None:
    """Take activities out of this context."""
    for one in gone:
        if one in one.session.activities:
            one.session.activities.remove(one)
    kept = tuple(one for one in ACTIVITIES.get() if one not in gone and not one.session.is_over)
    ACTIVITIES.set(kept)
