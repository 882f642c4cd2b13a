"""Rules on where the time goes, and how even the steps are."""

from collections.abc import Iterator
from statistics import median
from typing import Final

from sigmascope import units
from sigmascope.analysis.diagnostics.case import Case, seconds_of
from sigmascope.analysis.leaks import theil_sen
from sigmascope.analysis.step_times import step_seconds
from sigmascope.records.finding import Finding
from sigmascope.records.run import Stage

_VAE_SHARE: Final = 0.3
_TEXT_SHARE: Final = 0.2
_FEWEST_STEPS: Final = 6
_COMPILE_FACTOR: Final = 3.0
_COMPILE_SECONDS: Final = 0.5
_OUTLIER_FACTOR: Final = 2.0
_OUTLIER_DEVIATIONS: Final = 6.0  # of the median absolute deviation: 4 standard deviations of a normal one
_DRIFT_SHARE: Final = 0.05
_BUSY_SHARE: Final = 0.6


def target_missed(case: Case) -> Iterator[Finding]:
    """A generation that took longer than its target, and where its time went."""
    for stage in case.named("generation"):
        performance = stage.facts.get("performance")
        if not isinstance(performance, dict) or performance.get("target_met") is not False:
            continue
        total, target = performance.get("total_generation_time"), performance.get("target_generation_time")
        if not isinstance(total, float) or not isinstance(target, float):
            continue
        longest = max(stage.children, key=lambda child: child.seconds, default=None)
        where = (
            "" if longest is None else f" {longest.name} took {units.percent(longest.seconds, total)} of it."
        )
        yield Finding(
            id="time.target_missed",
            severity="warning",
            message=f"{units.seconds(total)}, {total / target:.1f} times the target of {units.seconds(target)}.{where}",
            evidence={
                "seconds": total,
                "target_seconds": target,
                "longest_stage": None if longest is None else longest.name,
            },
            advice="See the other findings; each says what it would gain.",
            stage=stage.name,
        )


def vae_takes_long(case: Case) -> Iterator[Finding]:
    """Encoding and decoding that take a large share of the whole."""
    spent = seconds_of(case.named("latent_encoding", "latent_decoding"))
    if case.seconds <= 0 or spent < _VAE_SHARE * case.seconds:
        return
    tiled = any(part.tiling for part in case.components("vae").values())
    yield Finding(
        id="time.vae_share",
        severity="info",
        message=f"The VAE took {units.percent(spent, case.seconds)} of the time: {units.seconds(spent)} of "
        f"{units.seconds(case.seconds)}.",
        evidence={"vae_seconds": spent, "seconds": case.seconds, "share": spent / case.seconds, "tiling": tiled},
        advice="Tiling is on and costs time: switch it off if the whole image fits (vae.disable_tiling())."
        if tiled
        else "Run the VAE in half precision, compile it, decode only the images that are kept, or preview with a tiny "
        "autoencoder (AutoencoderTiny).",
    )  # fmt: skip


def text_encoding_takes_long(case: Case) -> Iterator[Finding]:
    """Text encoding that takes a large share, as where a T5 runs on the CPU or prompts are encoded again."""
    stages = case.named("text_encoding")
    spent = seconds_of(stages)
    if case.seconds <= 0 or spent < _TEXT_SHARE * case.seconds:
        return
    on_cpu = [
        name
        for name, part in case.components("text_encoder").items()
        if part.module is not None and set(part.module.devices) == {"cpu"}
    ]
    yield Finding(
        id="time.text_encoding_share",
        severity="info",
        message=f"Text encoding took {units.percent(spent, case.seconds)} of the time: {units.seconds(spent)} in "
        f"{len(stages)} calls.",
        evidence={"seconds": spent, "calls": len(stages), "on_cpu": ", ".join(on_cpu) or None},
        advice="Encode a prompt once (pipe.encode_prompt) and pass prompt_embeds for each image"
        + (f"; {', '.join(on_cpu)} ran on the CPU." if on_cpu else "."),
    )


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
    """An accelerator that works for less of a step than the step lasts: the host cannot feed it."""
    for stage in case.with_steps():
        busy = [seconds for seconds in stage.steps.gpu_seconds if seconds is not None]
        wall = _span(stage)
        if len(busy) < _FEWEST_STEPS or wall <= 0 or sum(busy) >= _BUSY_SHARE * wall:
            continue
        yield Finding(
            id="time.device_waits",
            severity="info",
            message=f"The device worked on steps for {units.percent(sum(busy), wall)} of the {units.seconds(wall)} "
            "that they lasted.",
            evidence={"busy_seconds": sum(busy), "seconds": wall},
            advice="Small kernels wait for Python: torch.compile(mode='reduce-overhead'), larger batches, and no .item() "
            "or .cpu() between steps.",
            stage=stage.name,
        )


def _span(stage: Stage) -> float:
    """From the beginning of the first step to the end of the last."""
    return stage.steps.started[-1] + stage.steps.seconds[-1] - stage.steps.started[0]


def _listed(numbers: list[int], most: int = 8) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    return shown if len(numbers) <= most else f"{shown}, …"


RULES = (
    target_missed,
    vae_takes_long,
    text_encoding_takes_long,
    first_step_compiles,
    steps_stand_out,
    steps_slow_down,
    device_waits,
)
