"""Rules on time: where it goes, how even steps are, how busy the accelerators were, which rank is slow.

Some look at the time between steps, or at what slowed the accelerators down. `slow_ranks` compares the ranks of a
merged run.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from statistics import median
from typing import Final, NamedTuple

from sigmascope import units
from sigmascope.analysis.breakdown import seconds_between_steps
from sigmascope.analysis.generations import Case, compilations_in, compiles, noted_metrics, seconds_of
from sigmascope.analysis.rules import Seen, rule
from sigmascope.analysis.run_figures import (
    is_timed_on_device,
    known,
    seconds_in_steps,
    step_name,
    step_seconds,
    theil_sen,
    timed_on_device,
)
from sigmascope.records.latents import NEEDS_TILES
from sigmascope.records.merge import place_of
from sigmascope.records.performance import (
    DeviceUtilization,
    processor_use_of,
    utilization_of,
)
from sigmascope.records.run import STEPS_UNCLEAR, Run, Stage, stage_seconds

_GENERATION: Final = "generation"
_LEAST_VAE_SHARE: Final = 0.3
_LEAST_TEXT_SHARE: Final = 0.2
# For steps.
_FEWEST_STEPS: Final = 6
_LEAST_FIRST_STEP_RATIO: Final = 3.0
_LEAST_FIRST_STEP_EXCESS_SECONDS: Final = 0.5
_LEAST_OUTLIER_RATIO: Final = 2.0
_LEAST_OUTLIER_DEVIATIONS: Final = (
    6.0  # median absolute deviations: 4 standard deviations if times are normal
)
_LEAST_DRIFT_SHARE: Final = 0.05
TARGET_MISSED: Final = "time.target_missed"
GAVE_UP: Final = "time.compiles_no_more"
_MOST_STEPS_NAMED: Final = 8
_LEAST_BUSY_SHARE: Final = 0.6
_LEAST_CALLBACK_SHARE: Final = 0.1
_LEAST_CALLBACK_SECONDS_A_STEP: Final = 0.01
# For samples of a device, in per cent.
_FEWEST_SAMPLES: Final = 5
_LEAST_BUSY_PERCENT: Final = 70.0
_LEAST_PERCENT_IN_USE: Final = 5.0
"""A device that is busy for less does not run this pipeline."""
_LEAST_HEAT_PERCENT: Final = 5.0
_LEAST_POWER_CAP_PERCENT: Final = 50.0
# For ranks.
_MOST_NAMED_RANKS = 8
_LEAST_SLOW_RANK_RATIO: Final = 1.1
_FEWEST_STEPS_OF_A_RANK: Final = 3


@rule(TARGET_MISSED, "warning", about="time")
def target_missed(case: Case) -> Iterator[Seen]:
    """A generation took longer than its target; the message names what took most of its time."""
    for stage in case.named(_GENERATION):
        metrics = noted_metrics(stage)
        total = None if metrics is None else metrics.total_generation_time
        if metrics is None or not metrics.misses_target or total is None:
            continue
        target = metrics.target_generation_time
        longest, spent = _longest_part(stage, total)
        where = "" if longest is None else f" {longest} took {units.percent(spent, total)} of it."
        yield Seen(
            message=f"{units.seconds(total)}, {total / target:.1f} times the target of {units.seconds(target)}.{where}",
            evidence={"seconds": total, "target_seconds": target, "longest_stage": longest},
            advice="See the other findings: they say how much time each would save.",
            stage=stage.name,
        )


def _longest_part(stage: Stage, total: float) -> tuple[str | None, float]:
    """What took most of a generation, and its seconds: a stage, its own steps, or work outside of both."""
    parts: dict[str, float] = {}
    for part in _stages_in(stage):
        parts[part.name] = parts.get(part.name, 0.0) + stage_seconds(part)
    if len(stage.steps):
        parts["its steps"] = seconds_in_steps(stage)
    if not parts:
        return None, 0.0
    parts["work outside of stages"] = total - sum(parts.values())
    longest = max(parts, key=lambda name: parts[name])
    return longest, parts[longest]


def _stages_in(stage: Stage) -> Iterator[Stage]:
    """The stages of a generation. A watched pipeline has a generation of its own inside the monitor's."""
    for child in stage.children:
        if child.name == _GENERATION:
            yield from _stages_in(child)
        else:
            yield child


@rule("time.vae_share", "info", about="time")
def vae_takes_long(case: Case) -> Iterator[Seen]:
    """The VAE took over 30 % of the time."""
    spent = seconds_of(case.named("latent_encoding", "latent_decoding"))
    if case.seconds <= 0 or not case.denoises or spent < _LEAST_VAE_SHARE * case.seconds:
        return
    tiled = [part for part in case.components("vae").values() if part.tiling]
    needs_tiles = any(part.class_name in NEEDS_TILES for part in tiled)
    yield Seen(
        message=f"The VAE took {units.percent(spent, case.seconds)} of the time: {units.seconds(spent)} of "
        f"{units.seconds(case.seconds)}.",
        evidence={"vae_seconds": spent, "seconds": case.seconds, "share": spent / case.seconds, "tiling": bool(tiled)},
        advice="Tiling costs time: if the whole image fits, switch it off (vae.disable_tiling())."
        if tiled and not needs_tiles
        else "Run the VAE in half precision, compile it, decode only the images you keep, or preview with a tiny "
        "autoencoder (AutoencoderTiny).",
    )  # fmt: skip


@rule("time.text_encoding_share", "info", about="time")
def text_encoding_takes_long(case: Case) -> Iterator[Seen]:
    """Text encoding took over 20 % of the time, for example with T5 on the CPU, or the same prompt encoded again."""
    stages = case.named("text_encoding")
    spent = seconds_of(stages)
    if case.seconds <= 0 or not case.denoises or spent < _LEAST_TEXT_SHARE * case.seconds:
        return
    on_cpu = [
        name
        for name, part in case.components("text_encoder").items()
        if part.module is not None and set(part.module.devices) == {"cpu"}
    ]
    yield Seen(
        message=f"Text encoding took {units.percent(spent, case.seconds)} of the time: {units.seconds(spent)} in "
        f"{units.counted(len(stages), 'call')}.",
        evidence={"seconds": spent, "calls": len(stages), "on_cpu": ", ".join(on_cpu) or None},
        advice="Encode each prompt once (pipe.encode_prompt) and pass prompt_embeds for every image"
        + (f"; {', '.join(on_cpu)} ran on the CPU." if on_cpu else "."),
    )


@rule("time.first_step_compiles", "info", about="steps")
def first_step_compiles(case: Case) -> Iterator[Seen]:
    """The first step took much longer than the rest: compilation, autotuning or lazy loading."""
    for stage in case.with_steps():
        first, others = step_seconds(stage)[0], known(step_seconds(stage)[1:])
        if first is None or len(others) < 2:
            continue
        usual = median(others)
        excess = first - usual
        if not is_slow_first_step(first, usual) or stopped_seconds(stage) > excess / 2:
            continue
        compiled = compiles(case, "denoiser")
        yield Seen(
            message=f"The first step took {units.seconds(first)}, the others {units.seconds(usual)}"
            + (f", because torch.compile compiles in it{_from_cache(case)}." if compiled else "."),
            evidence={"first_seconds": first, "median_seconds": usual, "gain_seconds": excess, "compiled": compiled, **_untimed(stage)},
            advice="Warm up once before timing. To shorten it, compile only the repeated blocks (compile_repeated_blocks()) "
            "and keep the cache (TORCHINDUCTOR_CACHE_DIR)."
            if compiled
            else "Warm up once before timing. If every generation has it, look for what is loaded or moved then.",
            stage=stage.name,
        )  # fmt: skip


def _from_cache(case: Case) -> str:
    """How much of what was compiled a cache on disk held, in words; empty where that is not known."""
    noted = compilations_in(case)
    graphs = 0 if noted is None else noted.from_cache + noted.not_in_cache
    return (
        ""
        if noted is None or not graphs
        else f" ({noted.from_cache} of {units.counted(graphs, 'graph')} from its cache)"
    )


@rule(GAVE_UP, "warning", about="steps")
def compiles_no_more(case: Case) -> Iterator[Seen]:
    """torch.compile has reached its limit for a function: what fits none of its graphs runs as written, and slower."""
    noted = compilations_in(case)
    if noted is not None and noted.gave_up:
        yield Seen(
            message="torch.compile has compiled a function as often as is allowed (torch._dynamo.config.recompile_limit): what fits "
            "none of its graphs runs uncompiled from now on.",
            evidence={"compiled": True},
            advice="Compile for all sizes at once (torch.compile(…, dynamic=True)), keep to fewer sizes, or raise the limit. "
            "TORCH_LOGS=recompiles says which guard fails.",
            stage=case.stages[0].name,
        )


def is_slow_first_step(first: float, usual: float) -> bool:
    """Whether a first step took so much longer than the others that something was done in it alone."""
    return first >= _LEAST_FIRST_STEP_RATIO * usual and first - usual >= _LEAST_FIRST_STEP_EXCESS_SECONDS


def stopped_seconds(stage: Stage) -> float:
    """How long the process was seen to be stopped in a stage."""
    use = processor_use_of(stage.facts)
    return 0.0 if use is None else use.stopped_seconds or 0.0


def _untimed(stage: Stage) -> dict[str, int]:
    """How many steps have no known time, if any."""
    count = step_seconds(stage).count(None)
    return {"steps_not_timed": count} if count else {}


@rule("time.steps_stand_out", "info", "warning", about="steps")
def steps_stand_out(case: Case) -> Iterator[Seen]:
    """A few steps took far longer than the rest: recompilation, or load from other programs."""
    for stage in case.with_steps():
        timed = {number: step for number, step in enumerate(step_seconds(stage), start=1) if step is not None}
        first = timed.pop(1, None)
        seconds = list(timed.values())
        if len(seconds) < _FEWEST_STEPS:
            continue
        usual = median(seconds)
        deviation = median(abs(step - usual) for step in seconds)
        limit = max(_LEAST_OUTLIER_RATIO * usual, usual + _LEAST_OUTLIER_DEVIATIONS * deviation)
        slow = [number for number, step in timed.items() if step > limit]
        if not slow or len(slow) > len(seconds) // 3:
            continue
        gain = sum(timed[number] - usual for number in slow)
        compiled = compiles(case, "denoiser")
        stopped = stopped_seconds(stage)
        is_stop = stopped > gain / 2
        yield Seen(
            severity="warning" if gain > 0.1 * sum(seconds) and not is_stop else "info",
            message=f"{len(slow)} of {len(seconds) + (first is not None)} steps took more than twice as long as the rest: "
            f"{_some_of(slow)}" + (f"; the process was stopped for {units.seconds(stopped)}." if is_stop else "."),
            evidence={"steps": _some_of(slow), "median_seconds": usual, "gain_seconds": gain, "compiled": compiled, **_untimed(stage)},
            advice="Its times tell of the stop (Ctrl-Z, SIGSTOP, a paused container), not of the pipeline: measure again."
            if is_stop
            else "A change of shapes or flags makes a step recompile: run with TORCH_LOGS=recompiles to see why, and "
            "compile with dynamic=True."
            if compiled
            else "Look for other programs, garbage collection, previews or callbacks during those steps.",
            stage=stage.name,
        )  # fmt: skip


def _some_of(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:_MOST_STEPS_NAMED]))
    return shown if len(numbers) <= _MOST_STEPS_NAMED else f"{shown}, …"


@rule("time.steps_slow_down", "warning", about="steps")
def steps_slow_down(case: Case) -> Iterator[Seen]:
    """Steps took longer and longer: heat, or something that accumulates."""
    for stage in case.with_steps():
        seconds = known(step_seconds(stage)[1:])
        if len(seconds) < 2 * _FEWEST_STEPS:
            continue
        slope = theil_sen(seconds)
        usual = median(seconds)
        grown = slope.lower * (len(seconds) - 1)
        if grown < _LEAST_DRIFT_SHARE * usual:
            continue
        total = slope.value * (len(seconds) - 1)
        yield Seen(
            message=f"Steps slowed down steadily: by {units.percent(total, usual)} over {len(seconds)} steps.",
            evidence={
                "growth_seconds": total,
                "median_seconds": usual,
                "steps": len(seconds),
                **_untimed(stage),
            },
            advice="Check the device's clocks and temperature (nvidia-smi -q -d CLOCK,PERFORMANCE). If it is cool, look "
            "for lists that grow in callbacks, or memory near its limit.",
            stage=stage.name,
        )


@rule("time.steps_unclear", "info", about="steps")
def steps_unclear(case: Case) -> Iterator[Seen]:
    """Steps of an own loop may be those of several loops that went on in turn, which cannot be told from outside."""
    for stage in case.named("denoising"):
        why = stage.facts.get(STEPS_UNCLEAR)
        if isinstance(why, str):
            yield Seen(
                message=f"These {len(stage.steps)} steps may be of one loop or of several that went on in turn, which cannot be told: {why}.",
                evidence={"steps": len(stage.steps)},
                advice="If it is one loop, all is well. For loops of several models, give each a watch of its own: "
                "with sigmascope.watch(first) as one, sigmascope.watch(second) as other: ...",
                stage=stage.name,
            )


@rule("time.callback_takes_long", "info", "warning", about="time")
def callback_takes_long(case: Case) -> Iterator[Seen]:
    """The callback after each step took over 10 % of the denoising."""
    callback = case.call.callback
    for stage in case.named("denoising") if callback is not None else ():
        spent = seconds_between_steps(stage)
        if stage.seconds <= 0 or spent < max(
            _LEAST_CALLBACK_SHARE * stage.seconds, _LEAST_CALLBACK_SECONDS_A_STEP * len(stage.steps)
        ):
            continue
        yield Seen(
            severity="warning" if case.misses_target else "info",
            message=f"The callback {callback} took {units.seconds(spent)} of {stage.name}'s {units.seconds(stage.seconds)} "
            f"({units.percent(spent, stage.seconds)}), {units.seconds(spent / len(stage.steps))} a step.",
            evidence={
                "callback": callback,
                "gain_seconds": spent,
                "seconds": stage.seconds,
                "share": spent / stage.seconds,
            },
            advice="Do less in it, call it in fewer steps, or hand the work to another thread.",
            stage=stage.name,
        )


@rule("time.device_waits", "info", about="an idle device")
def device_waits(case: Case) -> Iterator[Seen]:
    """The accelerator had nothing to do between the steps, because the host was busy.

    A step's time on the device runs from one mark in its queue to the next, so it includes gaps between small kernels:
    `utilization.device_idle` finds those.
    """
    for stage in case.with_steps():
        rows = _timed_rows(stage)
        busy = [stage.steps.gpu_seconds[row] or 0.0 for row in rows]
        wall = _seconds_of_rows(stage, rows)
        if len(busy) < _FEWEST_STEPS or wall <= 0 or sum(busy) >= _LEAST_BUSY_SHARE * wall:
            continue
        yield Seen(
            message=f"The device was in steps for {units.percent(sum(busy), wall)} of the {units.seconds(wall)} from the "
            "first step to the last. Between steps it waited for the host.",
            evidence={"busy_seconds": sum(busy), "seconds": wall, **_untimed(stage)},
            advice="Look at what runs between the steps: callbacks, previews, .item() and .cpu(), a scheduler on the CPU.",
            stage=stage.name,
        )


def _timed_rows(stage: Stage) -> range:
    """The steps that the accelerator timed, if there is no gap among them: in a gap it may have worked or been idle."""
    timed = [row for row, seconds in enumerate(step_seconds(stage)) if seconds is not None]
    whole = is_timed_on_device(stage) and timed[-1] - timed[0] + 1 == len(timed)
    return range(timed[0], timed[-1] + 1) if whole else range(0)


def _seconds_of_rows(stage: Stage, rows: range) -> float:
    """From the beginning of the first of these steps to the end of the last."""
    if not rows:
        return 0.0
    steps = stage.steps
    return steps.started[rows[-1]] + steps.seconds[rows[-1]] - steps.started[rows[0]]


@rule("utilization.device_idle", "info", "warning", about="an idle device")
def device_idle(case: Case) -> Iterator[Seen]:
    """The device ran no kernel for much of the denoising: it waited for the host or for copies."""
    for stage, device in _sampled(case):
        busy = device.busy_percent
        if busy is None or not _LEAST_PERCENT_IN_USE <= busy.mean < _LEAST_BUSY_PERCENT:
            continue
        idle = stage.seconds * (1 - busy.mean / 100)
        yield Seen(
            severity="warning" if busy.mean < _LEAST_BUSY_PERCENT / 2 else "info",
            message=f"{device.device} was busy for {busy.mean:.0f} % of {stage.name} and waited for about "
            f"{units.seconds(idle)} of {units.seconds(stage.seconds)}.",
            evidence={
                "device": device.device,
                "busy_percent": busy.mean,
                "samples": device.samples,
                "idle_seconds": idle,
            },
            advice="You can gain that much at most. Compile the denoiser (pipe.transformer."
            "compile_repeated_blocks(fullgraph=True), or torch.compile with mode='reduce-overhead'), make several "
            "images at once, take .item() and .cpu() out of callbacks, and keep offloaded weights on the device.",
            stage=stage.name,
        )  # fmt: skip


def _sampled(case: Case) -> Iterator[tuple[Stage, DeviceUtilization]]:
    """Stages with steps, and their devices, with enough samples to tell."""
    for stage in case.with_steps():
        for device in utilization_of(stage).values():
            if device.samples >= _FEWEST_SAMPLES:
                yield stage, device


@rule("utilization.slowed_by_heat", "warning", about="a slow device")
def slowed_by_heat(case: Case) -> Iterator[Seen]:
    """Heat lowered the device's clocks: a cool device would be faster."""
    for stage, device in _sampled(case):
        share, warmth = device.heat_percent, device.temperature_celsius
        if share is None or share < _LEAST_HEAT_PERCENT:
            continue
        highest = None if warmth is None else warmth.highest
        how_hot = "" if highest is None else f" It reached {highest:.0f} °C."
        yield Seen(
            message=f"Heat lowered the clocks of {device.device} for {share:.0f} % of {stage.name}.{how_hot}",
            evidence={"device": device.device, "share_percent": share, "highest_celsius": highest},
            advice="Improve the cooling or lower the power limit (nvidia-smi -pl). Compare runs only at the same "
            "temperature.",
            stage=stage.name,
        )


@rule("utilization.held_by_power_cap", "info", about="a slow device")
def held_by_power_cap(case: Case) -> Iterator[Seen]:
    """The device was at its power limit most of the time, as is usual for large models at full load."""
    for stage, device in _sampled(case):
        share, power = device.power_cap_percent, device.power_watts
        if share is None or share < _LEAST_POWER_CAP_PERCENT:
            continue
        mean = None if power is None else power.mean
        yield Seen(
            message=f"The power limit lowered the clocks of {device.device} for {share:.0f} % of {stage.name}"
            + ("." if mean is None else f", at {mean:.0f} W."),
            evidence={"device": device.device, "share_percent": share, "mean_watts": mean},
            advice="The device does all that its limit allows. Smaller dtypes (bf16, fp8) need less power for the same work.",
            stage=stage.name,
        )


@rule("ranks.slow_rank", "warning", about="steps", looks_at="ranks")
def slow_ranks(ranks: Mapping[str, Run]) -> Iterator[Seen]:
    """One rank's steps take longer than the others': if ranks wait for each other, it slows all of them."""
    for stage_name, steps in median_steps(ranks).items():
        slowest = max(steps, key=lambda rank: steps[rank])
        others = [seconds_of_rank for rank, seconds_of_rank in steps.items() if rank != slowest]
        if not others or steps[slowest] < _LEAST_SLOW_RANK_RATIO * median(others):
            continue
        factor = steps[slowest] / median(others)
        yield Seen(
            message=f"A step of {slowest} takes {units.seconds(steps[slowest])}, {factor:.2f} times that of the other "
            f"ranks ({units.seconds(median(others))}).",
            evidence={"rank": slowest, "step_seconds": steps[slowest], "others_seconds": median(others)},
            advice="Compare its device's clocks, heat and link with the others' (nvidia-smi -q -d PERFORMANCE, nvidia-smi "
            "topo -m). Check whether it got more work.",
            stage=stage_name,
        )  # fmt: skip


@rule("ranks.missing", "warning", about="the record", looks_at="ranks")
def missing_ranks(ranks: Mapping[str, Run]) -> Iterator[Seen]:
    """Ranks of the launch are not in the merged run, whose slowest may be one of them."""
    places = [place for run in ranks.values() if (place := place_of(run)) is not None]
    sizes = {place.world_size for place in places}
    if len(places) < len(ranks) or len(sizes) != 1:
        return  # runs of several launches, or some that do not say
    (size,) = sizes
    there = {place.rank for place in places}
    missing = size - len(there)
    if missing:
        first = list(islice((str(rank) for rank in range(size) if rank not in there), _MOST_NAMED_RANKS))
        more = f" and {missing - len(first)} more" if missing > len(first) else ""
        yield Seen(
            message=f"{units.counted(missing, 'rank')} of {size} missing: {', '.join(first)}{more}.",
            evidence={"missing": missing, "world_size": size},
            advice="Merge again with their runs. A rank that was killed may have left none.",
        )


def median_steps(ranks: Mapping[str, Run]) -> dict[str, dict[str, float]]:
    """By stage and rank, the median seconds of a step, without the first of each stage, which may compile."""
    on_device = timed_on_device(*([run] for run in ranks.values()))  # all of them, or none
    of_stage: dict[str, dict[str, list[float]]] = {}
    for rank, run in ranks.items():
        for stage in run.walk():
            timed = step_seconds(stage, on_device=step_name(stage) in on_device)
            seconds = known(timed[1:])  # the first may compile
            if len(stage.steps) >= _FEWEST_STEPS_OF_A_RANK and seconds:
                of_stage.setdefault(stage.name, {}).setdefault(rank, []).extend(seconds)
    return {
        name: {rank: median(seconds) for rank, seconds in of_rank.items()}
        for name, of_rank in of_stage.items()
    }


class SlowestRank(NamedTuple):
    """The process of a merged run whose steps take longest, and the one whose steps are shortest, in one stage."""

    name: str
    step_seconds: float
    fastest: str
    fastest_seconds: float
    stage: str


def slowest_rank(ranks: Mapping[str, Run]) -> SlowestRank | None:
    """In the stage that most of the steps' time goes into; None where fewer than two processes have steps.

    It says nothing of whether the difference matters: the finding `ranks.slow_rank` does.

    Args:
        ranks: The runs by name, as `sigmascope.records.merge.ranks_of` gives them.
    """
    compared = {name: steps for name, steps in median_steps(ranks).items() if len(steps) > 1}
    if not compared:
        return None
    stage = max(compared, key=lambda name: max(compared[name].values()))
    steps = compared[stage]
    slowest, fastest = (choose(steps, key=lambda rank: steps[rank]) for choose in (max, min))
    return SlowestRank(slowest, steps[slowest], fastest, steps[fastest], stage)
