"""What is wrong with the pictures that go into a VAE or come out of it."""

from collections.abc import Iterator

from sigmascope.records.finding import Finding
from sigmascope.records.latents import VaeFacts
from sigmascope.stages.latents.expected import Video
from sigmascope.stages.latents.typed import PicturesDict

_GIVEN_LIMIT = 1.05
"""What rounding and resizing may leave outside [-1, 1]."""

_DECODED_LIMIT = 4.0
"""How far decoders go beyond [-1, 1], which is cut off when pictures are made of it."""

_BYTE_LIMIT = 255


def picture_findings(pictures: PicturesDict, stage: str, *, decoded: bool = False) -> Iterator[Finding]:
    """Findings about pictures by themselves.

    Args:
        pictures: What is known of them.
        stage: The stage's name.
        decoded: Whether a decoder made them, which may overshoot.
    """
    if pictures["length"] == 0:
        yield Finding("pictures_empty", "error", "The video has no frames.", {"frames": 0}, stage=stage)
    yield from _mixed(pictures, stage)
    yield from _pictures_not_finite(pictures, stage)
    yield from _out_of_range(pictures, stage, _DECODED_LIMIT if decoded else _GIVEN_LIMIT)
    if pictures["shape"] is not None and pictures["length"] is None:
        reason = pictures["unavailable"].get("layout", "")
        message = f"What the axes of the pictures are is unknown: {reason}."
        yield Finding("pictures_layout_unknown", "warning", message, stage=stage)


def _mixed(pictures: PicturesDict, stage: str) -> Iterator[Finding]:
    if len(pictures["sizes"]) > 1:
        sizes = ", ".join(f"{width}x{height}" for height, width in pictures["sizes"][:6])
        yield Finding(
            "pictures_of_mixed_sizes",
            "error",
            f"The pictures are of different sizes: {sizes}.",
            {"sizes": len(pictures["sizes"])},
            "Resize or crop them to one size: a video has one.",
            stage,
        )


def _pictures_not_finite(pictures: PicturesDict, stage: str) -> Iterator[Finding]:
    counts = {"NaN": pictures["nan_count"], "Inf": pictures["inf_count"]}
    found = {name: count for name, count in counts.items() if count}
    if found:
        words = " and ".join(f"{count:,} {name}" for name, count in found.items())
        yield Finding("pictures_not_finite", "error", f"The pictures hold {words}.", found, stage=stage)


def _out_of_range(pictures: PicturesDict, stage: str, limit: float) -> Iterator[Finding]:
    low, high, dtype = pictures["min"], pictures["max"], pictures["dtype"] or ""
    if low is None or high is None:
        return
    is_float = "float" in dtype
    least, most = (-limit, limit) if is_float else (0, _BYTE_LIMIT)
    if least <= low and high <= most:
        return
    expected = "[-1, 1] or [0, 1]" if is_float else "[0, 255]"
    by_255 = is_float and low >= 0 and high > _BYTE_LIMIT / 5
    yield Finding(
        "pictures_out_of_range",
        "warning",
        f"The pictures run from {low:.4g} to {high:.4g}; {dtype} is expected in {expected}.",
        {"min": low, "max": high},
        "They look like bytes: divide by 255." if by_255 else "Check how they were normalised.",
        stage,
    )


def frames_over(video: Video, vae: VaeFacts | None) -> int:
    """Frames at the end that fill no chunk of a video VAE's."""
    if vae is None or not vae.is_video or not video.length:
        return 0
    return (video.length - (1 if vae.first_frame_apart else 0)) % (vae.temporal_factor or 1)


def cut_findings(video: Video, vae: VaeFacts | None, stage: str) -> Iterator[Finding]:
    """Rows, columns and frames that a VAE leaves out since its factors do not divide them."""
    if vae is None:
        return
    factor = vae.spatial_factor or 1
    rest = {name: (side or 0) % factor for name, side in (("height", video.height), ("width", video.width))}
    if any(rest.values()):
        sizes = f"{video.width}x{video.height}"
        message = (
            f"{sizes} is no multiple of the VAE's factor {factor}: rows or columns are cut or filled up."
        )
        yield Finding("pictures_cut", "info", message, {"factor": factor, **rest}, stage=stage)
    time, over = vae.temporal_factor or 1, frames_over(video, vae)
    if over:
        form = f"{time}·k + 1" if vae.first_frame_apart else f"{time}·k"
        message = f"{video.length} frames are not {form}: the last {over} have no latent frame of their own."
        evidence = {"frames": video.length, "over": over, "factor": time}
        yield Finding("frames_cut", "info", message, evidence, stage=stage)
