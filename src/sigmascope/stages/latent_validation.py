"""All findings of an encoding or decoding, and the checks that they make up.

They are about the pictures that go into a VAE or come out of it, about the latent, about the VAE afterwards,
and about the device's memory.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sigmascope.records.latents import (
    VAE_STAGES,
    Direction,
    Strategy,
    StrategyAttempt,
    VaeFacts,
    findings_of_attempts,
    without_known,
)
from sigmascope.records.memory import MemoryImpact, change, mib
from sigmascope.records.run import Finding
from sigmascope.stages.baseline import check_of, device_before_and_after
from sigmascope.stages.image_facts import Video
from sigmascope.stages.latent_facts import reference_frames, vace_findings
from sigmascope.stages.schema import (
    Check,
    LatentAnalysis,
    LatentValidation,
    MemoryEfficiency,
    ModelStateDict,
    PicturesDict,
)

_FAILURES = ("error", "critical")
_FRAGMENTED, _KEPT_BELOW = 0.5, 0.5
_WORTH_TELLING_MB = 256.0
_FOLDED_PATCH = 2
_INPUT_RANGE_LIMIT = 1.05
"""What rounding and resizing may leave outside [-1, 1]."""
_DECODED_RANGE_LIMIT = 4.0
"""How far decoders go beyond [-1, 1], which is cut off when pictures are made of it."""
_BYTE_LIMIT = 255


class PicturesAndLatent(NamedTuple):
    """The pictures and the latent, whichever of them is the output, and WAN-VACE's conditioning."""

    pictures: PicturesDict
    latent: LatentAnalysis
    video: Video
    vace: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CodingFacts:
    """What the findings are drawn from."""

    direction: Direction
    media: PicturesAndLatent
    vae: VaeFacts | None
    vae_before: Mapping[str, Any] | None
    vae_now: ModelStateDict
    attempts: tuple[StrategyAttempt, ...]
    strategy: Strategy | None
    efficiency: MemoryEfficiency
    impact: MemoryImpact | None
    dummy: bool


def validation_findings(facts: CodingFacts, of_record: Iterable[Finding] = ()) -> dict[str, list[Finding]]:
    """Findings by what they are about: `strategies`, `input`, `output`, `vae`, `memory`."""
    media, encodes = facts.media, facts.direction == "encoding"
    pictures = [*picture_findings(media.pictures, decoded=not encodes)]
    pictures += cut_findings(media.video, facts.vae) if encodes else missing_pictures(media.pictures)
    latent = [
        *latent_findings(media.latent, media.vace, frames_over(media.video, facts.vae)),
        *vace_findings(media.vace, media.latent, facts.vae),
    ]
    _, before, after = device_before_and_after(facts.impact)
    growth_mb = mib(change(before.allocated_bytes, after.allocated_bytes))
    tried = list(findings_of_attempts(facts.attempts, facts.strategy, facts.direction, dummy=facts.dummy))
    own = {
        "input": pictures if encodes else latent,
        "output": latent if encodes else pictures,
        "vae": list(vae_findings(facts.vae_before, facts.vae_now)),
        "memory": list(memory_findings(facts.efficiency, mib(after.reserved_bytes), growth_mb)),
    }
    return {
        "strategies": tried + without_known(of_record, tried),
        **{
            subject: [replace(finding, stage=VAE_STAGES[facts.direction]) for finding in found]
            for subject, found in own.items()
        },
    }


def missing_pictures(pictures: PicturesDict) -> Iterator[Finding]:
    """Pictures that a decoding should have given."""
    if pictures["shape"] is None:
        reason = pictures["unavailable"]["shape"]
        yield Finding("pictures_missing", "error", f"There are no pictures: {reason}.")


def failures_of(findings: Iterable[Finding]) -> list[Finding]:
    """Those that make a check fail."""
    return [finding for finding in findings if finding.severity in _FAILURES]


def validation_of(facts: CodingFacts, findings: Mapping[str, list[Finding]]) -> LatentValidation:
    """The checks: what failed in `messages`, what is worth knowing in `notes`."""
    every = [finding for part in findings.values() for finding in part]
    pictures, latent = facts.media.pictures["shape"] is not None, facts.media.latent["shape"] is not None
    return {
        "success": not failures_of(every),
        "input": _check(findings["input"], known=pictures if facts.direction == "encoding" else latent),
        "output": _check(findings["output"], known=True),
        "vae": _check(findings["vae"], known=facts.vae_now["changed"] is not None),
        "notes": [
            *(finding.message for finding in every if finding.severity not in _FAILURES),
            *_unread(facts),
        ],
    }


def _check(findings: list[Finding], *, known: bool) -> Check:
    return check_of((finding.message for finding in failures_of(findings)), known=known)


def _unread(facts: CodingFacts) -> Iterator[str]:
    """What was not checked for NaN and Inf."""
    for name, of_subject in (("pictures", facts.media.pictures), ("latents", facts.media.latent)):
        reason = of_subject["unavailable"].get("nan_count")
        if of_subject["shape"] is not None and reason is not None:
            yield f"The {name} were not checked for NaN and Inf: {reason}."


def picture_findings(pictures: PicturesDict, *, decoded: bool = False) -> Iterator[Finding]:
    """Findings about pictures by themselves."""
    if pictures["length"] == 0:
        yield Finding("pictures_empty", "error", "The video has no frames.", {"frames": 0})
    if len(pictures["sizes"]) > 1:
        sizes = ", ".join(f"{width}x{height}" for height, width in pictures["sizes"][:6])
        message = f"The pictures are of different sizes: {sizes}."
        advice = "Resize or crop them to one size: all frames of a video must match."
        evidence = {"sizes": len(pictures["sizes"])}
        yield Finding("pictures_of_mixed_sizes", "error", message, evidence, advice)
    not_finite, words = not_finite_in(pictures)
    if not_finite:
        yield Finding("pictures_not_finite", "error", f"The pictures hold {words}.", not_finite)
    yield from _pictures_out_of_range(pictures, _DECODED_RANGE_LIMIT if decoded else _INPUT_RANGE_LIMIT)
    if pictures["shape"] is not None and pictures["length"] is None:
        reason = pictures["unavailable"].get("layout", "")
        message = f"The axes of the pictures are unknown: {reason}."
        yield Finding("pictures_layout_unknown", "warning", message)


def not_finite_in(facts: Mapping[str, Any]) -> tuple[dict[str, int], str]:
    """How many elements are NaN and Inf, by these names and in words; neither where there are none or nobody looked."""
    counts = {"NaN": facts.get("nan_count"), "Inf": facts.get("inf_count")}
    not_finite = {name: count for name, count in counts.items() if count}
    return not_finite, " and ".join(f"{count:,} {name}" for name, count in not_finite.items())


def _pictures_out_of_range(pictures: PicturesDict, limit: float) -> Iterator[Finding]:
    low, high, dtype = pictures["min"], pictures["max"], pictures["dtype"] or ""
    if low is None or high is None:
        return
    is_float = "float" in dtype
    least, most = (-limit, limit) if is_float else (0, _BYTE_LIMIT)
    if least <= low and high <= most:
        return
    expected = "[-1, 1] or [0, 1]" if is_float else "[0, 255]"
    by_255 = is_float and low >= 0 and high > _BYTE_LIMIT / 5
    message = f"The pictures run from {low:.4g} to {high:.4g}; {dtype} is expected in {expected}."
    advice = "They look like bytes: divide by 255." if by_255 else "Check how they were normalised."
    yield Finding("pictures_out_of_range", "warning", message, {"min": low, "max": high}, advice)


def latent_findings(latent: LatentAnalysis, vace: Mapping[str, Any], frames_over: int) -> Iterator[Finding]:
    """Findings about a latent by itself.

    Args:
        latent: What is known of it.
        vace: WAN-VACE's conditioning beside it, which has its content and may add frames of a reference.
        frames_over: Frames that fill no chunk; some VAEs (Cosmos) make a latent frame of them, others none.
    """
    if latent["shape"] is None:
        reason = latent["unavailable"]["shape"]
        yield Finding("latent_missing", "error", f"There is no latent: {reason}.")
        return
    if latent["num_elements"] == 0:
        yield Finding("latent_empty", "error", f"The latent {latent['shape']} has no elements.")
    values: Mapping[str, Any] = latent["statistics"] or {}
    not_finite, words = not_finite_in(values)
    if not_finite:
        message = f"{words} among the {latent['num_elements']:,} elements of the latent."
        half = latent["dtype"] == "float16"
        advice = "Run the VAE in float32 or bfloat16: many overflow in float16." if half else None
        evidence = {**not_finite, "elements": latent["num_elements"]}
        yield Finding("latent_not_finite", "error", message, evidence, advice)
    low, several = values.get("min"), (latent["num_elements"] or 0) > 1
    if not vace and several and low is not None and low == values["max"]:
        message = f"Every element of the latent is {low:.4g}."
        advice = (
            "This is normal for an empty start latent, and for WanVaceToVideo, "
            "which puts the content into the conditioning."
        )
        yield Finding("latent_constant", "warning", message, {"value": low}, advice)
    yield from _latent_shape_unexpected(latent, reference_frames(latent, vace), frames_over)


def _latent_shape_unexpected(
    latent: LatentAnalysis, added_frames: int, frames_over: int
) -> Iterator[Finding]:
    expected, own = latent["expected_shape"], _own_shape(latent)
    if expected is None or own is None:
        return
    possible = [expected]
    if len(expected) == 4:
        channels, frames, *sides = expected
        possible = [[channels, frames + added_frames + over, *sides] for over in {0, bool(frames_over)}]
    if any(_shapes_agree(own, shape) for shape in possible):
        return
    found, wanted = ("x".join(map(str, sizes)) for sizes in (own, possible[0]))
    axes = f"(channels, {'frames, ' if len(expected) == 4 else ''}height, width)"
    message = f"The latent is {found} but the VAE and the pictures give {wanted} {axes}."
    advice = "Check that the latent was made from these pictures by this VAE."
    evidence = {"found": found, "expected": wanted}
    yield Finding("latent_shape_unexpected", "error", message, evidence, advice)


def _own_shape(latent: LatentAnalysis) -> list[int] | None:
    """[channels, frames, height, width], without frames where it has no axis of them."""
    sizes = [latent["channels"], latent["frames"], latent["height"], latent["width"]]
    known = [size for index, size in enumerate(sizes) if size is not None or index != 1]
    return None if None in known else [size for size in known if size is not None]


def _shapes_agree(own: list[int], expected: list[int]) -> bool:
    """Sides may be rounded up; 2x2 latent pixels may be folded into the channels, as FLUX.2's are."""
    if len(own) != len(expected):
        return len(own) == 4 and own[1] == 1 and _shapes_agree([own[0], *own[2:]], expected)
    if own[0] == expected[0] * _FOLDED_PATCH**2:
        own = [expected[0], *own[1:-2], own[-2] * _FOLDED_PATCH, own[-1] * _FOLDED_PATCH]
        expected = [*expected[:-2], *(side // _FOLDED_PATCH * _FOLDED_PATCH for side in expected[-2:])]
    sides = all(side in (wanted, wanted + 1) for side, wanted in zip(own[-2:], expected[-2:], strict=True))
    return own[:-2] == expected[:-2] and sides


def cut_findings(video: Video, vae: VaeFacts | None) -> Iterator[Finding]:
    """Rows, columns and frames that a VAE leaves out since its factors do not divide them."""
    if vae is None:
        return
    factor = vae.spatial_factor or 1
    rest = {name: (side or 0) % factor for name, side in (("height", video.height), ("width", video.width))}
    if any(rest.values()):
        size = f"{video.width}x{video.height}"
        message = (
            f"{size} is not a multiple of the VAE's factor {factor}: the VAE crops or pads rows or columns."
        )
        yield Finding("pictures_cut", "info", message, {"factor": factor, **rest})
    time, over = vae.temporal_factor or 1, frames_over(video, vae)
    if over:
        form = f"{time}·k + 1" if vae.first_frame_apart else f"{time}·k"
        message = f"{video.length} frames are not {form}: the last {over} get no latent frame of their own."
        evidence = {"frames": video.length, "over": over, "factor": time}
        yield Finding("frames_cut", "info", message, evidence)


def frames_over(video: Video, vae: VaeFacts | None) -> int:
    """Frames at the end that fill no chunk of a video VAE's."""
    if vae is None or not vae.is_video or not video.length:
        return 0
    return (video.length - (1 if vae.first_frame_apart else 0)) % (vae.temporal_factor or 1)


def vae_findings(before: Mapping[str, object] | None, now: ModelStateDict) -> Iterator[Finding]:
    """A VAE that is not as it was: on another device, of another type, with other patches."""
    changed = [name for name in now["changed"] or () if name != "model_id"]
    if not changed or before is None:
        return
    evidence = {name: f"{before.get(name)} → {now.get(name)}" for name in changed}
    words = ", ".join(f"{name} {values}" for name, values in evidence.items())
    advice = "Restore it, or the next stage runs on another device or in another dtype."
    yield Finding("vae_changed", "warning", f"The VAE has changed: {words}.", evidence, advice)


def memory_findings(
    efficiency: MemoryEfficiency, reserved_mb: float | None, growth_mb: float | None
) -> Iterator[Finding]:
    """Memory of the device that is reserved and not used, or that the stage kept."""
    share, cleanup = efficiency["fragmentation"], efficiency["cleanup_effectiveness"]
    if share is not None and share > _FRAGMENTED and (reserved_mb or 0) * share > _WORTH_TELLING_MB:
        message = f"{100 * share:.0f} % of {reserved_mb:,.0f} MB that the allocator reserves is unused."
        advice = (
            "torch.cuda.empty_cache() frees it for later stages; PYTORCH_CUDA_ALLOC_CONF="
            "expandable_segments:True reduces fragmentation."
        )
        evidence = {"fragmentation": share, "reserved_mb": reserved_mb}
        yield Finding("memory_fragmented", "info", message, evidence, advice)
    if cleanup is not None and cleanup < _KEPT_BELOW and (growth_mb or 0) > _WORTH_TELLING_MB:
        message = f"{100 * cleanup:.0f} % of the memory taken was released; {growth_mb:,.0f} MB are kept."
        evidence = {"cleanup_effectiveness": cleanup, "growth_mb": growth_mb}
        advice = "Move the VAE off the device when it is done."
        yield Finding("memory_kept", "info", message, evidence, advice)
