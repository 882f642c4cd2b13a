"""Whether a choice paid."""

import math
from dataclasses import dataclass

from sigmascope import units
from sigmascope.analysis.compare_runs import FigureComparison
from sigmascope.errors import ConfigError
from sigmascope.pipeline.optimizing.images import ImageChange
from sigmascope.pipeline.optimizing.measurement import SetUp
from sigmascope.pipeline.optimizing.plan import Choice


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a choice stays, and why."""

    pays: bool
    words: str


@dataclass(frozen=True, slots=True)
class Demands:
    """What a choice must bring to stay.

    Attributes:
        least_gain: Share of time, or of the device's peak memory, to be saved.
        min_psnr: Against the pipeline as it was found, in dB; None: any image will do that is finite and not blank.

    Raises:
        ConfigError: A gain that is no share, or no number at all.
    """

    least_gain: float = 0.02
    min_psnr: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.least_gain < 1:
            raise ConfigError(f"least_gain is {self.least_gain}.", hint="Give a share from 0 to below 1.")
        if self.min_psnr is not None and not math.isfinite(self.min_psnr):
            raise ConfigError(f"min_psnr is {self.min_psnr}.", hint="Give dB, such as 30, or None.")


def judge(
    choice: Choice,
    before: SetUp,
    after: SetUp,
    time: FigureComparison | None,
    image: ImageChange,
    demands: Demands,
) -> Verdict:
    """Judge a choice by what was measured.

    It pays if it saves the least gain of time in the median and between the fastest runs, which other load on the
    machine disturbs least, and the ratio's interval says faster too; or if it saves as much of the device's peak
    memory, and no time is lost by a choice that was to bring time.

    Args:
        choice: The choice.
        before: The set-up without it.
        after: The set-up with it.
        time: The two compared; None: one of them did not run.
        image: Against the pipeline as it was found.
        demands: What it must bring.
    """
    least_gain = demands.least_gain
    if after.error is not None:
        without = "" if before.error is None else ", nor without it"
        return Verdict(False, f"It does not run{without}: {after.error.removesuffix('.')}.")
    broken = _why_broken(image, demands.min_psnr)
    if broken is not None:
        return Verdict(False, broken)
    if before.error is not None:
        return Verdict(True, "With it the pipeline runs.")
    faster, saved = _faster(time, before, after, least_gain), _saved(before, after)
    if faster:
        return Verdict(True, _time_words(time))
    if (
        saved is not None
        and saved >= least_gain
        and (choice.gains == "memory" or not _slower(time, least_gain))
    ):
        return Verdict(True, f"{_memory_words(before, after)} {_time_words(time)}")
    if choice.necessary:
        return Verdict(True, f"It is needed for the pipeline to fit. {_time_words(time)}")
    return Verdict(False, f"It did not pay. {_time_words(time)} {_memory_words(before, after)}")


def _why_broken(image: ImageChange, min_psnr: float | None) -> str | None:
    if image.non_finite:
        return f"It breaks the image: {image.non_finite} values are NaN or Inf."
    if image.blank:
        return "It breaks the image: all of it is one value."
    if min_psnr is None or image.identical:
        return None
    if image.psnr_db is None:
        return f"Whether the image is {min_psnr:g} dB from the first is not known: it is {image}."
    if image.psnr_db < min_psnr:
        return f"The image is {image.psnr_db:.1f} dB from the first, and {min_psnr:g} are asked for."
    return None


def _faster(time: FigureComparison | None, before: SetUp, after: SetUp, least_gain: float) -> bool:
    if time is None or time.ratio is None or time.ratio > 1 - least_gain:
        return False
    if min(after.seconds) > (1 - least_gain) * min(before.seconds):
        return False
    return time.upper is None or time.upper < 1


def _slower(time: FigureComparison | None, least_gain: float) -> bool:
    return time is not None and time.ratio is not None and time.ratio > 1 + least_gain


def _saved(before: SetUp, after: SetUp) -> float | None:
    """Share of the peak that went; None where the two are not of the same thing.

    The process's own peak tells of more than the pipeline, and does not come back down: it is no measure.
    """
    if not before.peak_bytes or after.peak_bytes is None or before.peak_of != after.peak_of:
        return None
    return None if before.peak_of == "process" else 1 - after.peak_bytes / before.peak_bytes


def _time_words(time: FigureComparison | None) -> str:
    if time is None or time.ratio is None:
        return "Times could not be compared."
    between = "" if time.lower is None or time.upper is None else f" ({time.lower:.3f} to {time.upper:.3f})"
    return f"{units.seconds(time.new)} instead of {units.seconds(time.baseline)}, {time.ratio:.3f} of it{between}."


def _memory_words(before: SetUp, after: SetUp) -> str:
    return f"Peak {units.mib(after.peak_bytes)} MB instead of {units.mib(before.peak_bytes)} MB."
