"""Rules on how long and how even the steps are, and what lies between them."""

from collections.abc import Iterator
from statistics import median
from typing import Final

from sigmascope import units
from sigmascope.analysis.diagnostics.case import Case
from sigmascope.analysis.leaks import theil_sen
from sigmascope.analysis.step_times import is_timed_on_device, known, step_seconds
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
        first, others = step_seconds(stage)[0], known(step_seconds(stage)[1:])
        if first is None or len(others) < 2:
            continue
        usual = median(others)
        excess = first - usual
        if first < _COMPILE_FACTOR * usual or excess < _COMPILE_SECONDS:
            continue
        compiled = any(part.compiled for part in case.components("denoiser").values())
        yield Finding(
            id="time.first_step_compiles",
            severity="info",
            message=f"The first step took {units.seconds(first)}, the others {units.seconds(usual)}"
            + (": torch.compile compiles in it." if compiled else "."),
            evidence={"first_seconds": first, "median_seconds": usual, "gain_seconds": excess, "compiled": compiled, **_untimed(stage)},
            advice="Warm up once before timing. Compiling the repeated blocks alone (compile_repeated_blocks()) and a kept "
            "cache (TORCHINDUCTOR_CACHE_DIR) shorten it."
            if compiled
            else "Warm up once before timing; if it comes back in each generation, look for what is loaded or moved then.",
            stage=stage.name,
        )  # fmt: skip


def steps_stand_out(case: Case) -> Iterator[Finding]:
    """Single steps far longer than their neighbours: recompiling, or somebody else's load."""
    for stage in case.with_steps():
        timed = {number: one for number, one in enumerate(step_seconds(stage), start=1) if one is not None}
        first = timed.pop(1, None)
        seconds = list(timed.values())
        if len(seconds) < _FEWEST_STEPS:
            continue
        usual = median(seconds)
        deviation = median(abs(one - usual) for one in seconds)
        limit = max(_OUTLIER_FACTOR * usual, usual + _OUTLIER_DEVIATIONS * deviation)
        slow = [number for number, one in timed.items() if one > limit]
        if not slow or len(slow) > len(seconds) // 3:
            continue
        gain = sum(timed[number] - usual for number in slow)
        compiled = any(part.compiled for part in case.components("denoiser").values())
        yield Finding(
            id="time.steps_stand_out",
            severity="warning" if gain > 0.1 * sum(seconds) else "info",
            message=f"{len(slow)} of {len(seconds) + (first is not None)} steps took more than twice as long as the rest: "
            f"{_listed(slow)}.",
            evidence={"steps": _listed(slow), "median_seconds": usual, "gain_seconds": gain, "compiled": compiled, **_untimed(stage)},
            advice="Steps like these recompile when shapes or flags change: run with TORCH_LOGS=recompiles, and compile "
            "with dynamic=True."
            if compiled
            else "Look for what else runs on the machine, garbage collection, previews or callbacks in those steps.",
            stage=stage.name,
        )  # fmt: skip


def steps_slow_down(case: Case) -> Iterator[Finding]:
    """Steps that grow longer and longer: heat, or something that accumulates."""
    for stage in case.with_steps():
        seconds = known(step_seconds(stage)[1:])
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
            evidence={
                "growth_seconds": total,
                "median_seconds": usual,
                "steps": len(seconds),
                **_untimed(stage),
            },
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
        rows = _timed_rows(stage)
        busy = [stage.steps.gpu_seconds[row] or 0.0 for row in rows]
        wall = _span(stage, rows)
        if len(busy) < _FEWEST_STEPS or wall <= 0 or sum(busy) >= _BUSY_SHARE * wall:
            continue
        yield Finding(
            id="time.device_waits",
            severity="info",
            message=f"The steps kept the device for {units.percent(sum(busy), wall)} of the {units.seconds(wall)} from "
            "the first to the last; between them it waited for the host.",
            evidence={"busy_seconds": sum(busy), "seconds": wall, **_untimed(stage)},
            advice="Look at what runs between the steps: callbacks, previews, .item() and .cpu(), a scheduler on the CPU.",
            stage=stage.name,
        )


def _timed_rows(stage: Stage) -> range:
    """The steps that the accelerator timed, if they are neighbours: beside a gap, idle time cannot be told from work."""
    timed = [row for row, seconds in enumerate(step_seconds(stage)) if seconds is not None]
    whole = is_timed_on_device(stage) and timed[-1] - timed[0] + 1 == len(timed)
    return range(timed[0], timed[-1] + 1) if whole else range(0)


def _span(stage: Stage, rows: range) -> float:
    """From the beginning of the first of these steps to the end of the last."""
    if not rows:
        return 0.0
    steps = stage.steps
    return steps.started[rows[-1]] + steps.seconds[rows[-1]] - steps.started[rows[0]]


def _untimed(stage: Stage) -> dict[str, int]:
    """How many steps' times are not known, where there are such."""
    count = step_seconds(stage).count(None)
    return {"steps_not_timed": count} if count else {}


def _listed(numbers: list[int], most: int = 8) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    return shown if len(numbers) <= most else f"{shown}, …"


STEP_RULES = (first_step_compiles, steps_stand_out, steps_slow_down, device_waits)
