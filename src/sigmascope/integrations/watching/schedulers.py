"""The scheduler: what schedule it sets, and when it has made a step."""

from typing import Any, ClassVar, Final

from torch import Tensor

from sigmascope.integrations.watching.activity import denoising_here
from sigmascope.integrations.watching.endings import end_finished
from sigmascope.integrations.watching.instrument import Instrument, holder_of
from sigmascope.integrations.watching.listeners import After, Arguments, Keywords
from sigmascope.integrations.watching.parts import Parts

SCHEDULE_STAGE = "model_sampling"
_SETTINGS: Final = (
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
    facts["settings"] = {name: config[name] for name in _SETTINGS if config.get(name) is not None}
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
