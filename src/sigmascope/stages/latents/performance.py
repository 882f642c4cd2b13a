"""`performance_analysis` of SPEC section 5: pixels, bytes and frames a second."""

from sigmascope.records.arithmetic import MIB
from sigmascope.stages.latents.expected import Video
from sigmascope.stages.latents.typed import PerformanceAnalysis
from sigmascope.stages.memory_now import checked_seconds

COLOURS = 3
_RATES = ("pixels_per_second", "mb_per_second", "frames_per_second")


def performance_analysis(
    elapsed: object,
    strategy: str | None,
    video: Video,
    *,
    colours: int | None = None,
    input_mb: float | None = None,
) -> PerformanceAnalysis:
    """Sizes and rates of an encoding or decoding.

    Data is counted at a byte a colour (the seed's 16 frames of 512x512 are 12 MB), so that rates compare
    whatever type the pictures were handed over in; `input_mb` has their real size.

    Args:
        elapsed: Seconds.
        strategy: What it is called.
        video: Frames, height and width.
        colours: Of the pictures; 3 unless they are known to be others.
        input_mb: Their size in memory.
    """
    seconds, why_no_time = checked_seconds(elapsed)
    if seconds == 0:
        seconds, why_no_time = None, "it took no measurable time"
    pixels = _pixels(video)
    megabytes = None if pixels is None else pixels * (colours or COLOURS) / MIB
    rates = {
        "pixels_per_second": _rate(pixels, seconds),
        "mb_per_second": _rate(megabytes, seconds),
        "frames_per_second": _rate(video.length, seconds),
    }
    unavailable = _reasons(video, pixels, strategy, checked_seconds(elapsed), input_mb)
    unavailable |= {
        name: why_no_time or "the size of the video is unknown" for name in _RATES if rates[name] is None
    }
    return {
        "total_pixels": pixels,
        "total_mb": megabytes,
        "input_mb": input_mb,
        "elapsed_time": checked_seconds(elapsed)[0],
        "strategy_used": strategy,
        "pixels_per_second": rates["pixels_per_second"],
        "mb_per_second": rates["mb_per_second"],
        "frames_per_second": rates["frames_per_second"],
        "video_dimensions": {"length": video.length, "height": video.height, "width": video.width},
        "unavailable": unavailable,
    }


def _pixels(video: Video) -> int | None:
    if video.length is None or video.height is None or video.width is None:
        return None
    return video.length * video.height * video.width


def _rate(amount: int | float | None, seconds: float | None) -> float | None:
    return None if amount is None or seconds is None else amount / seconds


def _reasons(
    video: Video,
    pixels: int | None,
    strategy: str | None,
    elapsed: tuple[float | None, str | None],
    input_mb: float | None,
) -> dict[str, str]:
    reasons: dict[str, str] = {}
    if pixels is None:
        sizes = {"frames": video.length, "height": video.height, "width": video.width}
        missing = ", ".join(name for name, size in sizes.items() if size is None)
        reasons |= dict.fromkeys(("total_pixels", "total_mb"), f"unknown of the video: {missing}")
    if elapsed[0] is None:
        reasons["elapsed_time"] = elapsed[1] or "unknown"
    if strategy is None:
        reasons["strategy_used"] = "no strategy was named"
    if input_mb is None:
        reasons["input_mb"] = "the pictures were not looked at"
    return reasons
