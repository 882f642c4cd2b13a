"""Rules on where the time goes."""

from collections.abc import Iterator
from typing import Final

from sigmascope import units
from sigmascope.analysis.diagnostics.case import Case, seconds_of
from sigmascope.analysis.step_times import known, step_seconds
from sigmascope.records.finding import Finding
from sigmascope.records.run import Stage
from sigmascope.records.stage_seconds import stage_seconds

_GENERATION: Final = "generation"
_VAE_SHARE: Final = 0.3
_TEXT_SHARE: Final = 0.2


def target_missed(case: Case) -> Iterator[Finding]:
    """A generation that took longer than its target, and where its time went."""
    for stage in case.named(_GENERATION):
        performance = stage.facts.get("performance")
        if not isinstance(performance, dict) or performance.get("target_met") is not False:
            continue
        total, target = performance.get("total_generation_time"), performance.get("target_generation_time")
        if not isinstance(total, int | float) or not isinstance(target, int | float):
            continue
        longest, spent = _longest_part(stage, total)
        where = "" if longest is None else f" {longest} took {units.percent(spent, total)} of it."
        yield Finding(
            id="time.target_missed",
            severity="warning",
            message=f"{units.seconds(total)}, {total / target:.1f} times the target of {units.seconds(target)}.{where}",
            evidence={"seconds": total, "target_seconds": target, "longest_stage": longest},
            advice="See the other findings; each says what it would gain.",
            stage=stage.name,
        )


def _longest_part(stage: Stage, total: float) -> tuple[str | None, float]:
    """What took most of a generation, and its seconds: a stage in it, its own steps, or what is in neither."""
    parts: dict[str, float] = {}
    for one in _stages_in(stage):
        parts[one.name] = parts.get(one.name, 0.0) + stage_seconds(one)
    if len(stage.steps):
        parts["its steps"] = _in_steps(stage)
    if not parts:
        return None, 0.0
    parts["what is in no stage"] = total - sum(parts.values())
    longest = max(parts, key=lambda name: parts[name])
    return longest, parts[longest]


def _in_steps(stage: Stage) -> float:
    """By the accelerator's clock where it timed them all: a sum of some would be too small."""
    seconds = step_seconds(stage)
    return sum(known(seconds if None not in seconds else step_seconds(stage, on_device=False)), 0.0)


def _stages_in(stage: Stage) -> Iterator[Stage]:
    """The stages of a generation; a pipeline that is watched has its own generation in the monitor's."""
    for child in stage.children:
        if child.name == _GENERATION:
            yield from _stages_in(child)
        else:
            yield child


def vae_takes_long(case: Case) -> Iterator[Finding]:
    """Encoding and decoding that take a large share of the whole."""
    spent = seconds_of(case.named("latent_encoding", "latent_decoding"))
    if case.seconds <= 0 or not case.denoises or spent < _VAE_SHARE * case.seconds:
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
    if case.seconds <= 0 or not case.denoises or spent < _TEXT_SHARE * case.seconds:
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
        f"{len(stages)} call{'s' * (len(stages) > 1)}.",
        evidence={"seconds": spent, "calls": len(stages), "on_cpu": ", ".join(on_cpu) or None},
        advice="Encode a prompt once (pipe.encode_prompt) and pass prompt_embeds for each image"
        + (f"; {', '.join(on_cpu)} ran on the CPU." if on_cpu else "."),
    )


TIME_RULES = (target_missed, vae_takes_long, text_encoding_takes_long)
