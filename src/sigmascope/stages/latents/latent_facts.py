"""`latent_analysis` of SPEC section 5: what a latent is, and how far it is compressed."""

from typing import Any

from sigmascope.records.arithmetic import MIB
from sigmascope.records.facts import TensorFacts
from sigmascope.records.latents import VaeFacts
from sigmascope.stages.latents.expected import Video, expected_latent
from sigmascope.stages.latents.finding_latent import FoundLatent
from sigmascope.stages.latents.judging import Judged
from sigmascope.stages.latents.layouts import Sizes
from sigmascope.stages.latents.typed import LatentAnalysis
from sigmascope.stages.text.typed import StatisticsDict

_TYPES = {4: "Image Latent", 5: "Video Latent"}
UNKNOWN_TYPE = "Unknown Latent"
_NO_FACTOR = "the VAE's factor is unknown"
_TENSOR = ("latent_type", "shape", "dtype", "device", "size_mb", "num_elements", "statistics")
_AXES = ("batch_size", "frames", "channels", "height", "width", "latent_layout", "layout_evidence")
_COMPRESSION = (
    "spatial_compression",
    "temporal_compression",
    "nominal_spatial_compression",
    "nominal_temporal_compression",
)
_SHAPES = ("unpacked_shape", "expected_shape")


def latent_analysis(judged: Judged, structure: str, vae: VaeFacts | None, video: Video) -> LatentAnalysis:
    """Everything that is known of one latent.

    Args:
        judged: The latent and its axes.
        structure: In what it was.
        vae: What made it.
        video: What it was made of.
    """
    parts = (
        _tensor(judged),
        _axes(judged),
        _compression(judged.sizes, vae, video),
        _shapes(judged, vae, video),
    )
    values: dict[str, Any] = {name: value for part, _ in parts for name, value in part.items()}
    unavailable = {name: reason for _, reasons in parts for name, reason in reasons.items()}
    return {"status": "success", "structure": structure, **values, "unavailable": unavailable}  # type: ignore[typeddict-item]


def no_latent(found: FoundLatent) -> LatentAnalysis:
    """The analysis of a latent that is not there."""
    status = "missing" if found.structure == "none" else "failed" if found.raised else "no_tensor"
    names = (*_TENSOR, *_AXES, *_COMPRESSION, *_SHAPES)
    reasons = dict.fromkeys(names, found.reason or "there is no latent")
    empty: dict[str, Any] = dict.fromkeys(names)
    return {"status": status, "structure": found.structure, **empty, "unavailable": reasons}  # type: ignore[typeddict-item]


Part = tuple[dict[str, Any], dict[str, str]]


def _tensor(judged: Judged) -> Part:
    facts = judged.tensor
    rank = len(facts.shape if judged.unpacked is None else judged.unpacked.shape)
    values = {
        "latent_type": _TYPES.get(rank, UNKNOWN_TYPE),
        "shape": list(facts.shape),
        "dtype": facts.dtype,
        "device": facts.device,
        "size_mb": facts.nbytes / MIB,
        "num_elements": facts.num_elements,
        "statistics": statistics_of(facts),
    }
    return values, dict(facts.unavailable)


def _axes(judged: Judged) -> Part:
    sizes, axes = judged.sizes, judged.axes
    values = {
        "batch_size": sizes.batch,
        "frames": sizes.frames,
        "channels": sizes.channels,
        "height": sizes.height,
        "width": sizes.width,
        "latent_layout": None if axes is None else axes.layout,
        "layout_evidence": None if axes is None else axes.evidence,
    }
    rank = len(judged.tensor.shape)
    if axes is None:
        return values, dict.fromkeys(_AXES, f"no layout is known for a latent of {rank} axes")
    missing = (name for name in _AXES if values[name] is None)
    return values, dict.fromkeys(missing, f"{axes.layout} has none")


def _compression(sizes: Sizes, vae: VaeFacts | None, video: Video) -> Part:
    spatial, temporal = spatial_compression(video, sizes), temporal_compression(video, sizes)
    factor, time = (None, None) if vae is None else (vae.spatial_factor, vae.temporal_factor)
    values = {
        "spatial_compression": spatial,
        "temporal_compression": temporal,
        "nominal_spatial_compression": None if factor is None else float(factor**2),
        "nominal_temporal_compression": None if time is None else float(time),
    }
    reasons = dict(zip(_COMPRESSION, (*_why_no_compression(video), _NO_FACTOR, _NO_FACTOR), strict=True))
    return values, {name: reasons[name] for name, value in values.items() if value is None}


def _why_no_compression(video: Video) -> tuple[str, str]:
    sides = video.height is not None and video.width is not None
    return (
        "the latent's sides are unknown" if sides else "the size of the pictures is unknown",
        "the latent has no frames" if video.length is not None else "the number of frames is unknown",
    )


def _shapes(judged: Judged, vae: VaeFacts | None, video: Video) -> Part:
    expected = expected_latent(vae, video).shape
    values = {
        "unpacked_shape": None if judged.unpacked is None else list(judged.unpacked.shape),
        "expected_shape": expected,
    }
    unknown = "it takes the VAE's channels and factor, and the size of the pictures"
    reasons = {"unpacked_shape": "it is not packed", "expected_shape": unknown}
    return values, {name: reasons[name] for name, value in values.items() if value is None}


def spatial_compression(video: Video, sizes: Sizes) -> float | None:
    """(H·W) / (h·w): pixels of a picture by those of its latent."""
    if video.height is None or video.width is None or not sizes.height or not sizes.width:
        return None
    return video.height * video.width / (sizes.height * sizes.width)


def temporal_compression(video: Video, sizes: Sizes) -> float | None:
    """Frames by latent frames; of pictures that were encoded one by one, those by latents."""
    if video.length is None:
        return None
    if sizes.frames is None:
        return 1.0 if sizes.batch and sizes.batch == video.length else None
    return video.length / sizes.frames if sizes.frames else None


def statistics_of(facts: TensorFacts) -> StatisticsDict:
    """The values of a tensor, as the analyses show them."""
    return {
        "min": facts.min,
        "max": facts.max,
        "mean": facts.mean,
        "std": facts.std,
        "nan_count": facts.nan_count,
        "inf_count": facts.inf_count,
    }
