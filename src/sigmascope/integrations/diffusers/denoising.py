"""The steps of a denoising, counted from the denoiser's calls and the scheduler's steps.

`Denoisers` hears the denoiser's calls, which open the denoising and its steps. `Denoising` counts the calls into
steps. `Schedulers` hears which schedule is set, and when the scheduler has made a step. When a denoising is over,
no pipeline says: `end_finished` and `is_final` find out.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, ClassVar, Final

from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.jit import is_tracing  # type: ignore[attr-defined]

from sigmascope.integrations.diffusers.hooks import (
    COMPILED,
    After,
    Arguments,
    Instrument,
    Keywords,
    ModuleHook,
    Parts,
    holder_of,
    hook_calls,
)
from sigmascope.integrations.diffusers.watch_session import (
    Activity,
    Session,
    current_activity,
    denoising_here,
    guides,
)
from sigmascope.monitor.gpu_timing import Mark
from sigmascope.monitor.recorder import LiveStage, Recorder

_DENOISER_NAMES: Final = ("unet", "transformer", "transformer_2", "denoiser", "prior", "decoder")
"""Where pipelines keep denoisers whose architecture is not known."""
_HELPER_PREFIX: Final = "controlnet"
"""Where they keep what is called before the denoiser, for each of its calls or steps."""
SCHEDULE_STAGE = "model_sampling"
_SCHEDULE_SETTINGS: Final = (
    "prediction_type",
    "beta_schedule",
    "timestep_spacing",
    "shift",
    "flow_shift",
    "use_dynamic_shifting",
    "use_karras_sigmas",
    "use_flow_sigmas",
    "solver_order",
    "algorithm_type",
    "num_train_timesteps",
)
NO_SCHEDULER = (
    "no scheduler's step was seen: a step ends with the denoiser's last call at its timestep, and calls whose "
    "timesteps lie on an accelerator are taken one by one, or all as one where the pipeline has a scheduler"
)


class Denoisers(Instrument):
    """A step for all calls of denoisers up to the scheduler's step."""

    name: ClassVar[str] = "denoiser"

    def attach(self, parts: Parts) -> None:
        """Hear every denoiser."""
        schedulers = [part for _, part in parts.of_role("scheduler") if callable(getattr(part, "step", None))]
        for name, denoiser in denoisers_of(parts):
            before = functools.partial(self._before, name, bool(schedulers))
            if schedulers and getattr(denoiser, COMPILED, None) is None:
                hook: Any = StepHook(self.session, name, before, self.failed)
                hook_calls(self, denoiser, hook, after=False)
            else:
                hook_calls(self, denoiser, before, after=not schedulers)
        for name in _DENOISER_NAMES:
            engine = parts.components.get(name)
            call = inspect.getattr_static(type(engine), "__call__", None)
            if inspect.isfunction(call) and not isinstance(engine, nn.Module):
                self._hear_engine(name, bool(schedulers), engine)
        for name, part in parts.components.items():
            if name.startswith(_HELPER_PREFIX):
                hook_calls(self, part, self._before_helper, after=False)

    def _hear_engine(self, name: str, has_scheduler: bool, engine: object) -> None:
        """Hear what stands for a denoiser and is no module, such as the engine of another runtime."""

        def before(_target: object, args: Arguments, kwargs: Keywords) -> After | None:
            return self._before(name, has_scheduler, args, kwargs)

        self.tap_method(engine, "__call__", before)

    def _before_helper(self, *_: object) -> None:
        activity = current_activity(self.session) or self.session.here()
        if activity is not None:
            start_denoising(activity).prepared()

    def _before(self, name: str, has_scheduler: bool, args: Arguments, kwargs: Keywords) -> After | None:
        activity = current_activity(self.session) or self.session.here()
        if activity is None:
            return None
        denoising = start_denoising(activity)
        denoising.called(name, args, kwargs)
        return None if has_scheduler else lambda _result, _error: denoising.returned()


def denoisers_of(parts: Parts) -> Iterator[tuple[str, nn.Module]]:
    """Modules that are denoisers by their architecture, or else by their name, with their names."""
    known = dict(parts.of_role("denoiser"))
    known |= {name: part for name, part in parts.of_role("other") if name in _DENOISER_NAMES}
    for name, part in known.items():
        if isinstance(part, nn.Module):
            yield name, part


class StepHook(ModuleHook):
    """The denoiser's hook: the hot path.

    Args:
        session: Whose.
        name: The denoiser's.
        act: What to do with a call for which no denoising is open.
        failed: Told of what was raised.
    """

    __slots__ = ("_name", "_session")

    def __init__(
        self,
        session: Session,
        name: str,
        act: Callable[..., object],
        failed: Callable[[Exception], None],
    ) -> None:
        super().__init__(act, failed)
        self._session = session
        self._name = name

    def __call__(self, _module: object, args: Arguments, kwargs: Keywords) -> None:
        """Take the call, unless it is being traced."""
        if is_dynamo_compiling():
            return
        try:
            denoising = denoising_here(self._session)
            if denoising is not None and denoising.repeating is self._name:
                denoising.repeats += 1  # no export comes between a step's calls
            elif is_compiling():  # dearer: it tells of an export too
                return
            elif denoising is None:
                self.act(args, kwargs)
            else:
                denoising.called(self._name, args, kwargs)
        except Exception as failure:  # noqa: BLE001 - what an instrument raises must not reach the host
            self.failed(failure)


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

        Without a call before it, it is none of ours: of a second scheduler (of audio beside video), of another
        pipeline, or of an export.
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


def timestep_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """The timestep among the arguments of a denoiser's call: the second one, or the one of that name."""
    return kwargs.get("timestep") if len(args) < 2 else args[1]


def number_of(timestep: object) -> float | None:
    """A timestep's number; None where asking would wait for an accelerator, or be seen by who traces the call."""
    if isinstance(timestep, int | float):
        return float(timestep)
    if not isinstance(timestep, Tensor) or timestep.device.type != "cpu" or not timestep.numel():
        return None
    if is_tracing():  # type: ignore[no-untyped-call]
        return None
    with suppress(Exception):  # one that vmap batches, or that has no memory, has no number
        return float(timestep.detach().reshape(-1)[0])
    return None


def start_denoising(activity: Activity) -> Denoising:
    """The denoising that is going on in an activity; it begins now if none is."""
    denoising = activity.denoising
    if denoising is None:
        session = activity.session
        session.open_calls.close_broken(activity)
        activity.is_guided, _ = session.guard.read("watch.call", lambda: guides(activity.pipeline))
        denoising = activity.denoising = Denoising(activity.enter("denoising"), session.recorder)
    return denoising


class Schedulers(Instrument):
    """A stage for each schedule that is set, and the ends of steps."""

    name: ClassVar[str] = "scheduler"

    def attach(self, parts: Parts) -> None:
        """Hear `set_timesteps` and `step` of every scheduler."""
        for _, scheduler in parts.of_role("scheduler"):
            self.tap_method(holder_of(scheduler, "set_timesteps"), "set_timesteps", self._before_schedule)
            # Not asked whose step it is: the denoising that is open here knows.
            self.tap_ends(holder_of(scheduler, "step"), "step", self._after_step)

    def _before_schedule(self, scheduler: object, args: Arguments, kwargs: Keywords) -> After | None:
        activity = self.session.here()
        if activity is None or activity.is_in(SCHEDULE_STAGE):
            return None
        end_finished(activity)
        stage = activity.enter(SCHEDULE_STAGE)

        def after(result: object, error: BaseException | None) -> None:
            activity.leave(stage, error)
            timesteps = getattr(scheduler, "timesteps", None)
            if error is None and timesteps is not None:
                activity.planned_steps = len(timesteps)
            for name, fact in schedule_facts(scheduler).items():
                stage.fact(name, fact)

        return after

    def _after_step(self, _result: object, _error: BaseException | None) -> None:
        denoising = denoising_here(self.session)
        if denoising is not None:
            denoising.scheduler_stepped()


def schedule_facts(scheduler: object) -> dict[str, Any]:
    """The schedule as it is set: its class, settings, timesteps and sigmas. Nothing waits for an accelerator."""
    config = getattr(scheduler, "config", None) or {}
    facts: dict[str, Any] = {"scheduler": type(scheduler).__name__}
    facts["settings"] = {name: config[name] for name in _SCHEDULE_SETTINGS if config.get(name) is not None}
    for name in ("timesteps", "sigmas"):
        values = getattr(scheduler, name, None)
        if values is not None:
            facts[f"num_{name}"] = len(values)
            facts[name] = _numbers(values)
    shift = getattr(scheduler, "shift", None)
    if isinstance(shift, int | float):
        facts["shift"] = shift
    return facts


def _numbers(values: object) -> list[float] | None:
    """The numbers; None for those on an accelerator."""
    if isinstance(values, Tensor):
        return values.double().tolist() if values.device.type == "cpu" else None
    return [float(one) for one in values] if isinstance(values, list | tuple) else None


def end_finished(activity: Activity) -> None:
    """Close the denoising if it has made all its steps: what comes now is not part of it.

    The steps are those that the pipeline says it makes, or else those of the schedule that was set last.
    """
    denoising = activity.denoising
    if denoising is None or not denoising.stepped:
        return
    steps = _steps_of_pipeline(activity) or activity.planned_steps
    if steps is not None and denoising.stepped >= steps:
        activity.end_denoising()


def _steps_of_pipeline(activity: Activity) -> int | None:
    steps = getattr(activity.pipeline, "num_timesteps", None)
    return steps if isinstance(steps, int) else None


def is_final(activity: Activity) -> bool:
    """Whether a decoding follows the denoising, and is no preview inside of it.

    Pipelines that say how many steps they make are believed; of others every decoding is taken as the end.
    """
    denoising = activity.denoising
    steps = _steps_of_pipeline(activity)
    if denoising is None or steps is None or getattr(activity.pipeline, "interrupt", False):
        return True
    return denoising.stepped == 0 or denoising.stepped >= steps
