"""Rules on how long and how even the steps are, and what lies between them."""

from collections.abc import Iterator
from statistics import median
from typing import Final

from sigmascope import units
from sigmascope.analysis.diagnostics.case import Case
from sigmascope.analysis.leaks import theil_sen
from sigmascope.analysis.step_times import step_seconds
from sigmascope.records.finding import Finding
from sigmascope.records.run import Stage

_FEWEST_STEPS: Final = 6
_COMPILE_FACTOR: Final = 3.0
_COMPILE_SECONDS: Final = 0.5
_OUTLIER_FACTOR: Final = 2.0
_OUTLIER_DEVIATIONS: Final = 6.0  # of the median absolute deviation: 4 standard deviations of a normal one
_DRIFT_SHARE: Final = 0.05
_BUSY_SHARE: Final = 0.6


def first_step_compiles(case: Case) -> Iterator[Finding]:
    """A first step much longer than the rest: compilation, autotuning, lazy loading."""
    for stage in case.with_steps():
        seconds = step_seconds(stage)
        if len(seconds) < 3:
            continue
        usual = median(seconds[1:])
        excess = seconds[0] - usual
        if seconds[0] < _COMPILE_FACTOR * usual or excess < _COMPILE_SECONDS:
            continue
        compiled = any(part.compiled for part in case.components("denoiser").values())
        yield Finding(
            id="time.first_step_compiles",
            severity="info",
            message=f"The first step took {units.seconds(seconds[0])}, the others {units.seconds(usual)}"
            + (": torch.compile compiles in it." if compiled else "."),
            evidence={"first_seconds": seconds[0], "median_seconds": usual, "gain_seconds": excess, "compiled": compiled},
            advice="Warm up once before timing. Compiling the repeated blocks alone (compile_repeated_blocks()) and a kept "
            "cache (TORCHINDUCTOR_CACHE_DIR) shorten it."
            if compiled
            else "Warm up once before timing; if it comes back in each generation, look for what is loaded or moved then.",
            stage=stage.name,
        )  # fmt: skip


def steps_stand_out(case: Case) -> Iterator[Finding]:
    """Single steps far longer than their neighbours: recompiling, or somebody else's load."""
    for stage in case.with_steps():
        seconds = step_seconds(stage)[1:]
        if len(seconds) < _FEWEST_STEPS:
            continue
        usual = median(seconds)
        deviation = median(abs(one - usual) for one in seconds)
        limit = max(_OUTLIER_FACTOR * usual, usual + _OUTLIER_DEVIATIONS * deviation)
        slow = [number for number, one in enumerate(seconds, start=2) if one > limit]
        if not slow or len(slow) > len(seconds) // 3:
            continue
        gain = sum(seconds[number - 2] - usual for number in slow)
        compiled = any(part.compiled for part in case.components("denoiser").values())
        yield Finding(
            id="time.steps_stand_out",
            severity="warning" if gain > 0.1 * sum(seconds) else "info",
            message=f"{len(slow)} of {len(seconds) + 1} steps took more than twice as long as the rest: "
            f"{_listed(slow)}.",
            evidence={"steps": _listed(slow), "median_seconds": usual, "gain_seconds": gain, "compiled": compiled},
            advice="Steps like these recompile when shapes or flags change: run with TORCH_LOGS=recompiles, and compile "
            "with dynamic=True."
            if compiled
            else "Look for what else runs on the machine, garbage collection, previews or callbacks in those steps.",
            stage=stage.name,
        )  # fmt: skip


def steps_slow_down(case: Case) -> Iterator[Finding]:
    """Steps that grow longer and longer: heat, or something that accumulates."""
    for stage in case.with_steps():
        seconds = step_seconds(stage)[1:]
        if len(seconds) < 2 * _FEWEST_STEPS:
            continue
        slope = theil_sen(seconds)
        usual = median(seconds)
        grown = slope.lower * (len(seconds) - 1)
        if grown < _DRIFT_SHARE * usual:
            continue
        total = slope.value * (len(seconds) - 1)
        yield Finding(
            id="time.steps_slow_down",
            severity="warning",
            message=f"Steps grew longer by {units.percent(total, usual)} over {len(seconds)} of them, steadily.",
            evidence={"growth_seconds": total, "median_seconds": usual, "steps": len(seconds)},
            advice="Heat: watch the clock and temperature of the device (nvidia-smi -q -d CLOCK,PERFORMANCE). If it is "
            "cool, look for lists that grow in callbacks, or memory near its limit.",
            stage=stage.name,
        )


def device_waits(case: Case) -> Iterator[Finding]:
    """An accelerator that has nothing to do between the steps: the host is busy with something else.

    A step's time on the device is that between two marks in its queue, gaps between small kernels included: those are seen
    by how busy the device was (`utilization.device_idle`).
    """
    for stage in case.with_steps():
        busy = [seconds for seconds in stage.steps.gpu_seconds if seconds is not None]
        wall = _span(stage)
        if len(busy) < _FEWEST_STEPS or wall <= 0 or sum(busy) >= _BUSY_SHARE * wall:
            continue
        yield Finding(
            id="time.device_waits",
            severity="info",
            message=f"The steps kept the device for {units.percent(sum(busy), wall)} of the {units.seconds(wall)} from "
            "the first to the last; between them it waited for the host.",
            evidence={"busy_seconds": sum(busy), "seconds": wall},
            advice="Look at what runs between the steps: callbacks, previews, .item() and .cpu(), a scheduler on the CPU.",
            stage=stage.name,
        )


def _span(stage: Stage) -> float:
    """From the beginning of the first step to the end of the last."""
    return stage.steps.started[-1] + stage.steps.seconds[-1] - stage.steps.started[0]


def _listed(numbers: list[int], most: int = 8) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    return shown if len(numbers) <= most else f"{shown}, …"


RULES = (first_step_compiles, steps_stand_out, steps_slow_down, device_waits)
