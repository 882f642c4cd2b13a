"""Observers of the denoising: which schedule is set, when a denoising begins, its steps, and when it is over.

`DenoiserObserver` hears the denoiser's calls, which open the denoising and its steps. `SchedulerObserver` hears which
schedule is set, and when the scheduler has made a step. When a denoising is over, no pipeline says:
`end_complete_denoising` and `is_final_decode` find out.
"""

import functools
import inspect
from collections.abc import Iterator
from typing import Any, ClassVar, Final

from torch import Tensor, nn

from sigmascope.integrations.diffusers.hooks import After, Arguments, Keywords, holder_of
from sigmascope.integrations.diffusers.watch_session import (
    Denoising,
    Observer,
    StageStack,
    WatchedParts,
    asks_for_guidance,
    current_stack,
)

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


class DenoiserObserver(Observer):
    """A step for all calls of denoisers up to the scheduler's step."""

    name: ClassVar[str] = "denoiser"

    def attach(self, parts: WatchedParts) -> None:
        """Hear every denoiser."""
        has_scheduler = any(callable(getattr(part, "step", None)) for _, part in parts.of_role("scheduler"))
        for name, denoiser in denoisers_of(parts):
            before = functools.partial(self._before, name, has_scheduler)
            self.hook_module(denoiser, before, after=not has_scheduler)
        for name in _DENOISER_NAMES:
            engine = parts.components.get(name)
            call = inspect.getattr_static(type(engine), "__call__", None)
            if inspect.isfunction(call) and not isinstance(engine, nn.Module):
                self._hear_engine(name, has_scheduler, engine)
        for name, part in parts.components.items():
            if name.startswith(_HELPER_PREFIX):
                self.hook_module(part, self._before_helper, after=False)

    def _hear_engine(self, name: str, has_scheduler: bool, engine: object) -> None:
        """Hear what stands for a denoiser and is no module, such as the engine of another runtime."""

        def before(_target: object, args: Arguments, kwargs: Keywords) -> After | None:
            return self._before(name, has_scheduler, args, kwargs)

        self.hook_method(engine, "__call__", before)

    def _before(self, name: str, has_scheduler: bool, args: Arguments, kwargs: Keywords) -> After | None:
        stack = current_stack(self.session) or self.session.stack_here()
        if stack is None:
            return None
        denoising = start_denoising(stack)
        denoising.called(name, args, kwargs)
        return None if has_scheduler else lambda _result, _error: denoising.returned()

    def _before_helper(self, *_: object) -> None:
        stack = current_stack(self.session) or self.session.stack_here()
        if stack is not None:
            start_denoising(stack).prepared()


def denoisers_of(parts: WatchedParts) -> Iterator[tuple[str, nn.Module]]:
    """Modules that are denoisers by their architecture, or else by their name, with their names."""
    known = dict(parts.of_role("denoiser"))
    known |= {name: part for name, part in parts.of_role("other") if name in _DENOISER_NAMES}
    for name, part in known.items():
        if isinstance(part, nn.Module):
            yield name, part


def start_denoising(stack: StageStack) -> Denoising:
    """The denoising that is going on in a stack; it begins now if none is."""
    denoising = stack.denoising
    if denoising is None:
        session = stack.session
        session.open_calls.close_broken(stack)
        stack.is_guided, _ = session.guard.read("watch.call", lambda: asks_for_guidance(stack.pipeline))
        denoising = stack.denoising = Denoising(stack.enter("denoising"), session.recorder)
    return denoising


class SchedulerObserver(Observer):
    """A stage for each schedule that is set, and the ends of steps."""

    name: ClassVar[str] = "scheduler"

    def attach(self, parts: WatchedParts) -> None:
        """Hear `set_timesteps` and `step` of every scheduler."""
        for _, scheduler in parts.of_role("scheduler"):
            self.hook_method(holder_of(scheduler, "set_timesteps"), "set_timesteps", self._before_schedule)
            self._hear_step(holder_of(scheduler, "step"))

    def _hear_step(self, scheduler: object) -> None:
        """Hear a scheduler's step, and those of all of its class: the denoising that is open knows whose it takes."""
        self.hook_class(type(scheduler), "step", self._before_step)
        if "step" in getattr(scheduler, "__dict__", {}):
            self.hook_attribute(scheduler, "step", self._before_step)

    def _before_schedule(self, scheduler: object, args: Arguments, kwargs: Keywords) -> After | None:
        stack = self.session.stack_here()
        if stack is None or stack.is_in(SCHEDULE_STAGE):
            return None
        end_complete_denoising(stack)
        stage = stack.enter(SCHEDULE_STAGE)

        def after(result: object, error: BaseException | None) -> None:
            stack.leave(stage, error)
            timesteps = getattr(scheduler, "timesteps", None)
            if error is None and timesteps is not None:
                stack.planned_steps = len(timesteps)
            for name, fact in schedule_facts(scheduler).items():
                stage.fact(name, fact)

        return after

    def _before_step(self, *_: object) -> After:
        stack = current_stack(self.session)
        if stack is not None and stack.denoising is not None:
            stack.denoising.scheduler_began()
        return self._after_step

    def _after_step(self, _result: object, _error: BaseException | None) -> None:
        stack = current_stack(self.session)
        if stack is not None and stack.denoising is not None:
            stack.denoising.scheduler_stepped()


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
    return [float(value) for value in values] if isinstance(values, list | tuple) else None


def end_complete_denoising(stack: StageStack) -> None:
    """Close the denoising if it has made all its steps: what comes now is not part of it.

    The steps are those that the pipeline says it makes, or else those of the schedule that was set last.
    """
    denoising = stack.denoising
    if denoising is None or not denoising.stepped:
        return
    steps = _steps_of_pipeline(stack) or stack.planned_steps
    if steps is not None and denoising.stepped >= steps:
        stack.end_denoising()


def _steps_of_pipeline(stack: StageStack) -> int | None:
    steps = getattr(stack.pipeline, "num_timesteps", None)
    return steps if isinstance(steps, int) else None


def is_final_decode(stack: StageStack) -> bool:
    """Whether a decoding follows the denoising, and is no preview inside of it.

    Pipelines that say how many steps they make are believed; of others every decoding is taken as the end.
    """
    denoising = stack.denoising
    steps = _steps_of_pipeline(stack)
    if denoising is None or steps is None or getattr(stack.pipeline, "interrupt", False):
        return True
    return denoising.stepped == 0 or denoising.stepped >= steps
