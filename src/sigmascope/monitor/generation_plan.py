"""What is known of a generation before it begins, from what a host passes in: plain values, or a clear refusal."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, SupportsFloat, SupportsInt, cast

from sigmascope.errors import ConfigError
from sigmascope.records.performance import PerformanceMetrics
from sigmascope.records.pipeline import PipelineFacts

_ARCHITECTURES: Final = {"mmdit": "MMDiT", "dit": "DiT", "unet": "UNet"}


@dataclass(frozen=True, slots=True)
class Plan:
    """The arguments of `PerformanceMonitor.monitor_generation`, as they came."""

    model_name: object
    architecture_type: object
    num_steps: object
    resolution: object
    batch_size: object
    torch_dtype: object


def planned_metrics(plan: Plan, target_seconds: float, facts: PipelineFacts | None) -> PerformanceMetrics:
    """The plan as a row of metrics, completed by what was read off the model.

    Numbers may be NumPy's, a dtype torch's, a name a path: an export holds plain values.

    Args:
        plan: What the host passed.
        target_seconds: What the generation may take.
        facts: Of the model; None: not given, or not readable.

    Raises:
        ConfigError: Names the argument that is none of its kind.
    """
    given = "" if plan.architecture_type is None else str(plan.architecture_type)
    architecture = _ARCHITECTURES.get(given.lower(), given)
    dtype = None if plan.torch_dtype is None else str(plan.torch_dtype).removeprefix("torch.")
    return PerformanceMetrics(
        model_name=str(plan.model_name or "") or ("" if facts is None else facts.class_name),
        architecture_type=(None if facts is None else facts.architecture) or architecture,
        num_inference_steps=whole_number("num_steps", plan.num_steps),
        image_resolution=_resolution(plan.resolution),
        batch_size=whole_number("batch_size", plan.batch_size, least=1, none_is=1),
        torch_dtype=dtype or (None if facts is None else _dtype_of(facts)),
        target_generation_time=target_seconds,
    )


def seconds_above_zero(name: str, value: object) -> float:
    """A target as a float.

    Raises:
        ConfigError: It is no finite number above 0.
    """
    try:
        seconds = math.nan if isinstance(value, str) else float(cast(SupportsFloat, value))
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{name} is {value!r:.60}.", hint="Give seconds: a finite number above 0.")
    return seconds


def whole_number(name: str, value: object, *, least: int = 0, none_is: int = 0) -> int:
    """A count as an int.

    Args:
        name: What to call it in the error.
        value: Any kind of number.
        least: The smallest that makes sense.
        none_is: What None stands for, unless that is too small.

    Raises:
        ConfigError: It is no whole number, or too small.
    """
    if value is None and none_is >= least:
        return none_is
    try:
        number = None if isinstance(value, str) else int(cast(SupportsInt, value))
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or number != value or number < least:
        raise ConfigError(f"{name} is {value!r:.60}.", hint=f"Give a whole number, {least} or more.")
    return number


def _resolution(value: object) -> tuple[int, int]:
    """(width, height); None: not known."""
    if value is None:
        return (0, 0)
    sides = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else []
    if len(sides) != 2:
        raise ConfigError(f"resolution is {value!r:.60}.", hint="Give (width, height) in pixels.")
    return whole_number("resolution", sides[0]), whole_number("resolution", sides[1])


def _dtype_of(facts: PipelineFacts) -> str | None:
    """The dtype of most of the denoiser's weights, without "torch."."""
    for part in facts.of_role("denoiser").values():
        if part.module is not None and part.module.dtypes:
            dtypes = part.module.dtypes
            return max(dtypes, key=lambda name: dtypes[name]).removeprefix("torch.")
    return None
