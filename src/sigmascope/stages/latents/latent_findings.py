"""What is wrong with a latent, with the VAE afterwards, and with the device's memory."""

from collections.abc import Iterator, Mapping
from typing import Any

from sigmascope.records.finding import Finding
from sigmascope.stages.latents.typed import LatentAnalysis, MemoryEfficiency
from sigmascope.stages.typed import ModelStateDict

_FRAGMENTED, _KEPT = 0.5, 0.5
_WORTH_TELLING_MB = 256.0
_PATCH = 2


def latent_findings(
    latent: LatentAnalysis, stage: str, vace: Mapping[str, Any] | None = None, frames_over: int = 0
) -> Iterator[Finding]:
    """Findings about a latent by itself.

    Args:
        latent: What is known of it.
        stage: The stage's name.
        vace: WAN-VACE's conditioning beside it, which has its content and may add frames of a reference.
        frames_over: Frames that fill no chunk; some VAEs (Cosmos) make a latent frame of them, others none.
    """
    if latent["shape"] is None:
        reason = latent["unavailable"]["shape"]
        yield Finding("latent_missing", "error", f"There is no latent: {reason}.", stage=stage)
        return
    if latent["num_elements"] == 0:
        yield Finding("latent_empty", "error", f"The latent {latent['shape']} has no elements.", stage=stage)
    yield from _latent_not_finite(latent, stage)
    if not vace:
        yield from _constant(latent, stage)
    yield from _unexpected_shape(latent, stage, (vace or {}).get("trim_latent", 0), frames_over)


def _latent_not_finite(latent: LatentAnalysis, stage: str) -> Iterator[Finding]:
    values = latent["statistics"]
    counts = {} if values is None else {"NaN": values["nan_count"], "Inf": values["inf_count"]}
    found = {name: count for name, count in counts.items() if count}
    if not found:
        return
    words = " and ".join(f"{count:,} {name}" for name, count in found.items())
    half = latent["dtype"] == "float16"
    yield Finding(
        "latent_not_finite",
        "error",
        f"{words} among the {latent['num_elements']:,} elements of the latent.",
        {**found, "elements": latent["num_elements"]},
        "Run the VAE in float32 or bfloat16: many overflow in float16." if half else None,
        stage,
    )


def _constant(latent: LatentAnalysis, stage: str) -> Iterator[Finding]:
    values = latent["statistics"]
    low, high = (None, None) if values is None else (values["min"], values["max"])
    if low is None or low != high or (latent["num_elements"] or 0) < 2:
        return
    yield Finding(
        "latent_constant",
        "warning",
        f"Every element of the latent is {low:.4g}.",
        {"value": low},
        "An empty latent to begin from is so, and that of WanVaceToVideo, whose content is in its conditioning.",
        stage,
    )


def _unexpected_shape(
    latent: LatentAnalysis, stage: str, added_frames: int, frames_over: int
) -> Iterator[Finding]:
    expected, found = latent["expected_shape"], _own_shape(latent)
    if expected is not None and len(expected) == 4:
        expected = [expected[0], expected[1] + added_frames, *expected[2:]]
    if expected is None or found is None or _agree(found, expected):
        return
    if len(expected) == 4 and frames_over and _agree(found, [expected[0], expected[1] + 1, *expected[2:]]):
        return
    yield Finding(
        "latent_shape_unexpected",
        "error",
        f"The latent is {_words(found)} where the VAE and the pictures give {_words(expected)} "
        f"(channels, {'frames, ' if len(expected) == 4 else ''}height, width).",
        {"found": _words(found), "expected": _words(expected)},
        "Check that the latent is of these pictures and this VAE.",
        stage,
    )


def _own_shape(latent: LatentAnalysis) -> list[int] | None:
    """[channels, frames, height, width], without frames where it has no axis of them."""
    sizes = [latent["channels"], latent["frames"], latent["height"], latent["width"]]
    known = [size for index, size in enumerate(sizes) if size is not None or index != 1]
    return None if None in known else [size for size in known if size is not None]


def _agree(found: list[int], expected: list[int]) -> bool:
    """Sides may be rounded up; 2x2 latent pixels may be folded into the channels, as FLUX.2's are."""
    if len(found) != len(expected):
        return len(found) == 4 and found[1] == 1 and _agree([found[0], *found[2:]], expected)
    if found[0] == expected[0] * _PATCH**2:
        found = [found[0] // _PATCH**2, *found[1:-2], found[-2] * _PATCH, found[-1] * _PATCH]
        expected = [*expected[:-2], *(side // _PATCH * _PATCH for side in expected[-2:])]
    sides = all(side in (wanted, wanted + 1) for side, wanted in zip(found[-2:], expected[-2:], strict=True))
    return found[:-2] == expected[:-2] and sides


def _words(shape: list[int]) -> str:
    return "x".join(map(str, shape))


def vae_findings(before: Mapping[str, object] | None, now: ModelStateDict, stage: str) -> Iterator[Finding]:
    """A VAE that is not as it was: on another device, of another type, with other patches."""
    changed = [name for name in now["changed"] or () if name != "model_id"]
    if not changed or before is None:
        return
    evidence = {name: f"{before.get(name)} → {now.get(name)}" for name in changed}
    words = ", ".join(f"{name} {values}" for name, values in evidence.items())
    yield Finding(
        "vae_changed",
        "warning",
        f"The VAE is not as it was: {words}.",
        evidence,
        "Put it back, or the next stage runs on another device or in another type.",
        stage,
    )


def memory_findings(
    efficiency: MemoryEfficiency, reserved_mb: float | None, growth_mb: float | None, stage: str
) -> Iterator[Finding]:
    """Memory of the device that is reserved and not used, or that the stage kept.

    Args:
        efficiency: Ratios after the stage.
        reserved_mb: What the allocator holds.
        growth_mb: By how much what is allocated grew.
        stage: The stage's name.
    """
    share, cleanup = efficiency["fragmentation"], efficiency["cleanup_effectiveness"]
    if share is not None and share > _FRAGMENTED and (reserved_mb or 0) * share > _WORTH_TELLING_MB:
        yield Finding(
            "memory_fragmented",
            "info",
            f"{100 * share:.0f} % of {reserved_mb:,.0f} MB that the allocator holds is not in use.",
            {"fragmentation": share, "reserved_mb": reserved_mb},
            "torch.cuda.empty_cache() gives it to the stages after, PYTORCH_CUDA_ALLOC_CONF="
            "expandable_segments:True keeps it whole.",
            stage,
        )
    if cleanup is not None and cleanup < _KEPT and (growth_mb or 0) > _WORTH_TELLING_MB:
        yield Finding(
            "memory_kept",
            "info",
            f"{100 * cleanup:.0f} % of the memory taken was given back; {growth_mb:,.0f} MB are kept.",
            {"cleanup_effectiveness": cleanup, "growth_mb": growth_mb},
            "Move the VAE off the device when it has done its work.",
            stage,
        )
