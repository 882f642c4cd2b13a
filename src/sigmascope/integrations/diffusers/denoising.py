"""Steps of a denoising: which calls of the denoiser are one step, and when it has ended.

No pipeline says where a step begins. It begins when the denoiser, or what works for it (a ControlNet), is first called,
and ends when the scheduler has made its step (`Denoising.scheduler_stepped`). All calls between are one step:
classifier-free guidance may need two, other guidance more. Until a scheduler's step has been seen, calls at another
timestep begin another step (`Denoising.called`).
"""

from collections import Counter
from collections.abc import Callable, Mapping
from time import process_time_ns
from typing import Any, Final

import torch
from torch import Tensor

from sigmascope.monitor.recorder import LiveStage, Recorder
from sigmascope.monitor.scope import Mark
from sigmascope.records.run import SCHEDULER_SECONDS

_FEW: Final = 64
is_tracing: Callable[[], bool] = getattr(torch._C, "_is_tracing", torch.jit.is_tracing)  # type: ignore[attr-defined]
"""Whether `torch.jit.trace` is at work here: what `torch.jit.is_tracing` asks, in a third of its time."""
NO_SCHEDULER = (
    "no scheduler step was seen, so calls at the same timestep count as one step. Where timesteps are on an "
    "accelerator, each call is a step; if the pipeline has a scheduler, all calls are one step"
)


class Denoising:
    """Counts the denoiser's calls into steps, which it puts on a stage.

    A step ends where the scheduler has made its own (`scheduler_stepped`). Without a scheduler it ends at the denoiser's
    next call that is for another timestep (`called`, `_is_another`), and the last one with the denoising (`finish`).

    Attributes:
        calls: How often each component was called.
        most_calls_a_step: How often one was called for one step.
        stepped: How many steps the scheduler has made.
        last_ns: When a call was last seen to end; None where schedulers tell of steps.
        stepped_ns: When the scheduler last ended a step; None: it has ended none.
    """

    def __init__(self, stage: LiveStage, recorder: Recorder) -> None:
        self.stage = stage
        self.calls: Counter[str] = Counter()
        self.most_calls_a_step = 0
        self.stepped = 0
        self.last_ns: int | None = None
        self.stepped_ns: int | None = None
        self._clock = recorder.clock
        self._scope = recorder.current_scope()
        self._has_device = self._scope.columns.timings is not None
        # The open step: when it began, which component began it, and how often that was called for it.
        self._started: int | None = None
        self._mark: Mark | None = None
        self._component = ""
        self._calls_in_step = self._calls_of_last = 0
        self._last_cpu_ns: int | None = None
        self._timestep: float | None = None
        self._turns: list[tuple[str, int]] = []
        self._calls_of_first = 0
        self._moved_ns = 0
        self._moves: dict[int, int] = {}
        self._scheduler_began: int | None = None
        self._scheduler_ns = 0

    @property
    def steps(self) -> int:
        """How many steps are over."""
        return len(self._scope.columns)

    @property
    def steps_over(self) -> int:
        """The same, with one of whose end only the denoiser's next call will tell."""
        started_ns, last_ns = self._started, self.last_ns
        return self.steps + (started_ns is not None and last_ns is not None and last_ns >= started_ns)

    @property
    def is_in_step(self) -> bool:
        """Whether a step is open: the denoiser, or what works for it, was called since the last one."""
        return self._started is not None

    def called(self, name: str, timestep: object) -> None:
        """Take a call of the denoiser that is about to run: the hot path.

        Args:
            name: The denoiser's.
            timestep: What it is called for, as it was given, or its number.
        """
        if (
            self._started is None or not self._component
        ):  # none is open, or what works for the denoiser opened it
            if not self.stepped:
                self._timestep = number_of(timestep)
        elif self.stepped or not self._is_another(timestep):
            self.calls[name] += 1
            self._calls_in_step += name == self._component
            return
        else:
            self._commit_seen()
        self.calls[name] += 1
        self._component, self._calls_in_step = name, 1
        self._begin()

    def called_again(self, name: str) -> bool:
        """Take a call that is about to run if, going by the step before, the open one lacks it: the hot path.

        What it is called for need not be read then: it is the step's own timestep.

        Args:
            name: The denoiser's.

        Returns:
            Whether it was taken; never where no scheduler tells of steps.
        """
        if (
            self._started is None
            or not self.stepped
            or self._calls_in_step >= self._calls_of_last
            or name != self._component
        ):
            return False
        self.calls[name] += 1
        self._calls_in_step += 1
        return True

    def prepared(self) -> None:
        """Take a call of what works for the denoiser, such as a ControlNet: a step begins with it, if none is open."""
        if self._started is None:
            self._component = ""
            self._begin()

    def _begin(self) -> None:
        if self._started is None:
            if self._has_device:
                self._mark = self._scope.instruments.mark()
            self._started = self._scope.begin_step()

    def _is_another(self, timestep: object) -> bool:
        """Whether a call is for another step than the one that is open; keeps its timestep if so."""
        value = timestep if type(timestep) is float else number_of(timestep)
        if value is None:
            return self.last_ns is not None
        if value == self._timestep:
            return False
        self._timestep = value
        return True

    def returned(self, at_ns: int | None = None) -> None:
        """Take the end of a denoiser's call, where no scheduler tells of steps, now or at that moment: the hot path.

        It may be the step's last: it is, as a rule, if the step before had as many.
        """
        self.last_ns = self._clock() if at_ns is None else at_ns
        is_last = not self.stepped and self._calls_in_step >= self._calls_of_last
        self._last_cpu_ns = process_time_ns() if is_last else None

    def scheduler_began(self) -> Callable[[object, object], None]:
        """Take the beginning of the scheduler's step; gives what takes its end: the hot path."""
        self._scheduler_began = self._clock()
        return self.scheduler_stepped

    def scheduler_stepped(self, _result: object = None, _error: object = None) -> None:
        """Take the end of the scheduler's step: the hot path.

        Without a denoiser's call before it, it does not belong here: it is a second scheduler's (audio beside video),
        another pipeline's, or an export's.
        """
        if self._started is not None:
            self.stepped += 1
            ended = self.stepped_ns = self._clock()
            began, self._scheduler_began = self._scheduler_began, None
            if began is not None:
                self._scheduler_ns += ended - began
            self._commit(ended)

    def weights_moved(self, nanoseconds: int) -> None:
        """Take the time of a move of weights, which is part of the step that is open."""
        if self._started is not None:
            self._moved_ns += nanoseconds

    def _commit_seen(self) -> None:
        """Take the step that is open, up to its last call's end; up to now, if that was not seen, as with Ctrl-C."""
        last_ns = self.last_ns
        if last_ns is None or last_ns < (self._started or 0):
            self._commit(self._clock())
        else:
            self._commit(last_ns, self._last_cpu_ns)

    def _commit(self, ended_ns: int, ended_cpu_ns: int | None = None) -> None:
        """Take the step that is open: the hot path."""
        started, self._started = self._started, None
        if started is None:  # a handler of a signal was faster
            return
        component = self._component
        if component:
            if not self._turns or component != self._turns[-1][0]:
                self._turns.append((component, len(self._scope.columns)))
            self._calls_of_last = self._calls_in_step
            self._calls_of_first += self._calls_in_step
            if self._calls_in_step > self.most_calls_a_step:
                self.most_calls_a_step = self._calls_in_step
        if self._moved_ns:
            self._moves[len(self._scope.columns)] = self._moved_ns
            self._moved_ns = 0
        self._scope.add_step(started, ended_ns, self._mark, ended_cpu_ns)

    @property
    def takes_turns(self) -> bool:
        """Whether several denoisers worked in one step, or one again after another, in the steps that are over."""
        return len(self._turns) > 2 or self._calls_of_first < self.calls.total()

    def finish(self) -> None:
        """End the last step if it is open, and put on the stage what is known of all steps."""
        if self._started is not None:
            self._commit_seen()
        self.stage.fact("denoiser_calls", dict(self.calls))
        self.stage.fact("scheduler_steps", self.stepped)
        self.stage.fact(SCHEDULER_SECONDS, self._scheduler_ns / 1e9)
        self.stage.fact("component", self._turns[0][0] if self._turns else None)
        if len(self._turns) > 1:
            self.stage.fact("component_turns", [list(turn) for turn in self._turns])
        if self._moves:
            moved = [self._moves.get(step, 0) / 1e9 for step in range(len(self._scope.columns))]
            self.stage.fact("weights_moved_in_steps", moved)
        if not self.stepped:
            self.stage.fact("step_grouping", NO_SCHEDULER)


def timestep_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """The timestep among the arguments of a denoiser's call: the second one, or the one of that name."""
    return kwargs.get("timestep") if len(args) < 2 else args[1]


def number_of(timestep: object) -> float | None:
    """A timestep's number; None if reading it would wait for an accelerator, or be recorded by a tracer."""
    if not isinstance(timestep, Tensor):
        return float(timestep) if isinstance(timestep, int | float) else None
    if not timestep.is_cpu or is_tracing():
        return None
    try:
        if timestep.numel() == 1:
            number: Any = timestep.item()
            return number if type(number) is float else float(number)
        if timestep.numel() > _FEW:
            timestep = timestep[(0,) * timestep.dim()]
        number = timestep.tolist()  # a quarter of the time that indexing takes
        while isinstance(number, list):
            number = number[0]
        return float(number)
    except Exception:  # noqa: BLE001 - one that is empty, that vmap batches, or that has no memory, has no number
        return None
