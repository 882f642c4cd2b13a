"""The steps of one denoising: from the denoiser's first call to the scheduler's step."""

from collections.abc import Mapping
from typing import Any

from sigmascope.integrations.watching.timesteps import number_of, timestep_in
from sigmascope.monitor.gpu_timing import Mark
from sigmascope.monitor.live import LiveStage
from sigmascope.monitor.peaks import UNKNOWN
from sigmascope.monitor.recorder import Recorder
from sigmascope.monitor.steps import row

NO_SCHEDULER = (
    "no scheduler's step was seen: a step ends with the denoiser's last call at its timestep, and calls whose "
    "timesteps lie on an accelerator are taken one by one, or all as one where the pipeline has a scheduler"
)


class Denoising:
    """Counts the denoiser's calls into steps.

    A step begins when the denoiser, or what works for it (a ControlNet), is first called, and ends when the scheduler
    has made its step. All calls between are one step: classifier-free guidance may need two, other guidance more.
    Until a scheduler's step has been seen, calls at another timestep begin another step.

    Args:
        stage: The denoising, open and innermost.
        recorder: Its recorder.

    Attributes:
        calls: By component, of the steps that are over.
        repeating: The component whose next call belongs to the open step whatever its arguments, so that the hot path
            needs no more than to count it in `repeats`; None where `called` has to look.
        repeats: Calls in the open step of the component that began it.
    """

    __slots__ = (
        "_add",
        "_alike",
        "_clock",
        "_first",
        "_has_device",
        "_mark",
        "_moved_ns",
        "_moves",
        "_scope",
        "_started",
        "_timestep",
        "_turn",
        "_turns",
        "_usual",
        "calls",
        "last_ns",
        "most_calls_a_step",
        "repeating",
        "repeats",
        "stage",
        "stepped",
    )

    def __init__(self, stage: LiveStage, recorder: Recorder) -> None:
        self.stage = stage
        self.calls: dict[str, int] = {}
        self.most_calls_a_step = 0
        self.stepped = 0
        self.last_ns: int | None = None
        self._clock = recorder.clock
        self._scope = scope = recorder.current_scope()
        self._has_device = scope.columns.timings is not None
        self._add = scope.columns.add if scope.has_bare_steps else None
        self._started: int | None = None
        self._mark: Mark | None = None
        self._timestep: float | None = None
        self._first = ""
        self.repeating: str | None = None
        self.repeats = 0
        self._turn = ""
        self._usual = self._alike = 0
        self._turns: list[tuple[str, int]] = []
        self._moved_ns = 0
        self._moves: dict[int, int] = {}

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Take a call of the denoiser that is about to run: the hot path.

        Args:
            name: Of the pipeline's component.
            args: The call's arguments, of which the second or `timestep` is the timestep.
            kwargs: Those by name.
        """
        if self._started is not None:
            if not self._first:  # what works for the denoiser was called before it
                self._begun_by(name, args, kwargs)
                return
            if self.stepped or not self._is_another(timestep_in(args, kwargs)):
                if name == self._first:
                    self.repeats += 1
                else:
                    self.calls[name] = self.calls.get(name, 0) + 1
                return
            self._commit(self._seen_ended())
        elif not self.stepped:
            self._timestep = number_of(timestep_in(args, kwargs))
        self._first, self.repeats = name, 1
        if self.stepped:
            self.repeating = name
        if self._has_device:
            self._mark = self._scope.instruments.mark()
        self._started = self._clock()

    def prepared(self) -> None:
        """Take a call of what works for the denoiser, such as a ControlNet: a step begins with it, if none is open."""
        if self._started is None:
            self._first, self.repeats = "", 0
            if self._has_device:
                self._mark = self._scope.instruments.mark()
            self._started = self._clock()

    def _begun_by(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._first, self.repeats = name, 1
        if self.stepped:
            self.repeating = name
        else:
            self._timestep = number_of(timestep_in(args, kwargs))

    def returned(self) -> None:
        """Take the end of a denoiser's call, where no scheduler tells of steps."""
        self.last_ns = self._clock()

    def scheduler_stepped(self) -> None:
        """Take the end of the scheduler's step: the hot path.

        Without a call before it, it is none of ours: of a second scheduler (of audio beside video), of another pipeline,
        or of an export.
        """
        if self._started is not None:
            self.stepped += 1
            self._commit(self._clock())

    def weights_moved(self, nanoseconds: int) -> None:
        """Take the time of a move of weights, which is part of the step that is open."""
        if self._started is not None:
            self._moved_ns += nanoseconds

    def finish(self) -> None:
        """Take the last step if it is open, and tell what is known of all."""
        if self._started is not None:
            self._commit(self._seen_ended())
        self._count_alike()
        self.stage.fact("denoiser_calls", dict(self.calls))
        self.stage.fact("scheduler_steps", self.stepped)
        self.stage.fact("component", self._turns[0][0] if self._turns else None)
        if len(self._turns) > 1:
            self.stage.fact("component_turns", [list(turn) for turn in self._turns])
        if self._moves:
            moved = [self._moves.get(step, 0) / 1e9 for step in range(len(self._scope.columns))]
            self.stage.fact("weights_moved_in_steps", moved)
        if not self.stepped:
            self.stage.fact("step_grouping", NO_SCHEDULER)

    def _seen_ended(self) -> int:
        """When the open step's last call was seen to end; now, if it was not, as Ctrl-C does to it."""
        last_ns, started_ns = self.last_ns, self._started
        return self._clock() if last_ns is None or last_ns < (started_ns or 0) else last_ns

    def _commit(self, ended_ns: int) -> None:
        """Take the step that is open: the hot path."""
        started, self._started = self._started, None
        self.repeating = None
        if started is None:  # a handler of a signal was faster
            return
        if self._first is self._turn and self.repeats == self._usual:
            self._alike += 1
        else:
            self._take_other_calls()
        if self._moved_ns:
            self._moves[len(self._scope.columns)] = self._moved_ns
            self._moved_ns = 0
        if self._add is not None and self._scope.step_listener is None:
            self._add(row(started, ended_ns, UNKNOWN, UNKNOWN))
        else:
            self._scope.add_step(started, ended_ns, self._mark)

    def _take_other_calls(self) -> None:
        """Take the calls of a step that are not those of the step before."""
        first = self._first
        if not first:
            return
        self._count_alike()
        if first is not self._turn:
            self._turn = first
            self._turns.append((first, len(self._scope.columns)))
        self._usual, self._alike = self.repeats, 1
        self.most_calls_a_step = max(self.most_calls_a_step, self.repeats)

    def _count_alike(self) -> None:
        """Count the calls of the last steps, which were alike."""
        if self._turn:
            self.calls[self._turn] = self.calls.get(self._turn, 0) + self._usual * self._alike
        self._alike = 0

    def _is_another(self, timestep: object) -> bool:
        """Whether a call is for another step than the one that is open; keeps its timestep if so."""
        value = number_of(timestep)
        if value is None:
            return self.last_ns is not None
        if value == self._timestep:
            return False
        self._timestep = value
        return True
