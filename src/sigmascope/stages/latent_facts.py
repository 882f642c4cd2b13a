"""What a latent is and how far it is compressed, and what WAN-VACE's conditioning holds beside it.

Known forms of a latent: a tensor or array; ComfyUI's `{"samples": tensor}`, alone or in a node's outputs;
diffusers' outputs with `latent_dist`, `latents`, `latent` or `sample`; any mapping or sequence of these.

WAN-VACE's conditioning holds the content that its latent does not. ComfyUI's WanVaceToVideo gives a latent
(batch, 16, frames, h, w) of zeros, and in both conditionings `vace_frames` (1, 32, frames, h, w): what to
change and what to keep, 16 channels each, and `vace_mask` (1, 64, frames, h, w): the 8x8 pixels of each
latent pixel. A reference picture is one latent frame more at the beginning (`trim_latent`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sigmascope.probes.reading import node_outputs, read_host
from sigmascope.probes.tensors import as_tensor, leaves_of, quick_facts, tensor_facts
from sigmascope.records.facts import TensorFacts
from sigmascope.records.latents import Layout, SampleFacts, VaeFacts
from sigmascope.records.memory import MIB
from sigmascope.records.run import Finding
from sigmascope.stages.latent_layout import (
    Axes,
    Sizes,
    Unpacked,
    Video,
    expected_latent,
    latent_layout,
    sizes_of,
    unpacked,
)
from sigmascope.stages.schema import LatentAnalysis, StatisticsDict

_TYPES = {4: "Image Latent", 5: "Video Latent"}
UNKNOWN_TYPE = "Unknown Latent"
_NO_FACTOR = "the VAE's factor is unknown"
_TENSOR_KEYS = ("latent_type", "shape", "dtype", "device", "size_mb", "num_elements", "statistics")
_AXES_KEYS = ("batch_size", "frames", "channels", "height", "width", "latent_layout", "layout_evidence")
_COMPRESSION_KEYS = (
    "spatial_compression",
    "temporal_compression",
    "nominal_spatial_compression",
    "nominal_temporal_compression",
)
_SHAPE_KEYS = ("unpacked_shape", "expected_shape")
Part = tuple[dict[str, Any], dict[str, str]]
_LATENT_NAMES = ("samples", "latents", "latent", "init_latent", "latent_samples", "encodings", "z", "sample")
_VACE_NAMES = ("vace_frames", "vace_mask")
_HALVES = 2  # of `vace_frames`: what to change, and what to keep


@dataclass(frozen=True, slots=True)
class Judged:
    """A latent's tensor facts with the axes that they were read by."""

    tensor: TensorFacts
    axes: Axes | None
    sizes: Sizes
    unpacked: Unpacked | None = None

    def sample(self, form: str) -> SampleFacts:
        """The same as a record keeps it."""
        sizes = self.sizes
        layout = None if self.axes is None else self.axes.layout
        return SampleFacts(
            self.tensor, layout, sizes.batch, sizes.frames, sizes.channels, sizes.height, sizes.width, form
        )


def latent_analysis(judged: Judged, structure: str, vae: VaeFacts | None, video: Video) -> LatentAnalysis:
    """Everything that is known of one latent.

    Args:
        judged: The latent and its axes.
        structure: In what it was.
        vae: What made it.
        video: What it was made of.
    """
    parts = (
        _tensor_part(judged),
        _axes_part(judged),
        _compression_part(judged.sizes, vae, video),
        _shapes_part(judged, vae, video),
    )
    values: dict[str, Any] = {name: value for part, _ in parts for name, value in part.items()}
    unavailable = {name: reason for _, reasons in parts for name, reason in reasons.items()}
    status = "not_finite" if judged.tensor.nan_count or judged.tensor.inf_count else "success"
    return {"status": status, "structure": structure, **values, "unavailable": unavailable}  # type: ignore[typeddict-item]


def _tensor_part(judged: Judged) -> Part:
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


def _axes_part(judged: Judged) -> Part:
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
        return values, dict.fromkeys(_AXES_KEYS, f"no layout is known for a latent of {rank} axes")
    missing = (name for name in _AXES_KEYS if values[name] is None)
    return values, dict.fromkeys(missing, f"{axes.layout} has none")


def _compression_part(sizes: Sizes, vae: VaeFacts | None, video: Video) -> Part:
    spatial, temporal = spatial_compression(video, sizes), temporal_compression(video, sizes)
    factor, time = (None, None) if vae is None else (vae.spatial_factor, vae.temporal_factor)
    values = {
        "spatial_compression": spatial,
        "temporal_compression": temporal,
        "nominal_spatial_compression": None if factor is None else float(factor**2),
        "nominal_temporal_compression": None if time is None else float(time),
    }
    reasons = dict(zip(_COMPRESSION_KEYS, (*_why_no_compression(video), _NO_FACTOR, _NO_FACTOR), strict=True))
    return values, {name: reasons[name] for name, value in values.items() if value is None}


def _why_no_compression(video: Video) -> tuple[str, str]:
    sides = video.height is not None and video.width is not None
    return (
        "the latent's sides are unknown" if sides else "the size of the pictures is unknown",
        "the latent has no frames" if video.length is not None else "the number of frames is unknown",
    )


def _shapes_part(judged: Judged, vae: VaeFacts | None, video: Video) -> Part:
    expected = expected_latent(vae, video).shape
    values = {
        "unpacked_shape": None if judged.unpacked is None else list(judged.unpacked.shape),
        "expected_shape": expected,
    }
    unknown = "it takes the VAE's channels and factor, and the size of the pictures"
    reasons = {"unpacked_shape": "it is not packed", "expected_shape": unknown}
    return values, {name: reasons[name] for name, value in values.items() if value is None}


class FoundLatent(NamedTuple):
    """The tensor and in what it was. `reason` says why there is none; `raised`: its own code failed."""

    tensor: Tensor | None
    structure: str
    reason: str | None = None
    raised: bool = False


def no_latent(found: FoundLatent) -> LatentAnalysis:
    """The analysis of a latent that is not there."""
    status = "missing" if found.structure == "none" else "failed" if found.raised else "no_tensor"
    names = (*_TENSOR_KEYS, *_AXES_KEYS, *_COMPRESSION_KEYS, *_SHAPE_KEYS)
    reasons = dict.fromkeys(names, found.reason or "there is no latent")
    empty: dict[str, Any] = dict.fromkeys(names)
    return {"status": status, "structure": found.structure, **empty, "unavailable": reasons}  # type: ignore[typeddict-item]


def find_latent(output: object) -> FoundLatent:
    """The latent in an output. Nothing is computed: of a distribution its mean is taken. Never raises."""
    output = node_outputs(output)
    if output is None:
        return FoundLatent(None, "none", "no latent was given")
    structure = _structure(output)
    reading = read_host(lambda: _find_in(output))
    if reading.reason is not None:
        return FoundLatent(None, structure, reading.reason, raised=True)
    reason = f"no tensor was found in it ({structure})"
    return FoundLatent(reading.value, structure, reason if reading.value is None else None)


def _structure(output: object) -> str:
    if as_tensor(output) is not None:
        return "tensor"
    if isinstance(output, Mapping):
        plain = "mapping" if type(output) is dict else type(output).__name__
        return "ComfyUI latent" if "samples" in output else plain
    return "sequence" if type(output) in (list, tuple) else type(output).__name__


def _find_in(output: Any, depth: int = 0) -> Tensor | None:
    tensor = as_tensor(output)
    if tensor is not None or depth > 3:
        return tensor
    named = _held_by_name(output)
    if named is not None:
        return _find_in(named, depth + 1)
    if isinstance(output, list | tuple):
        return _in_sequence(output, depth)
    floating = (leaf.tensor for leaf in leaves_of(output) if leaf.tensor.is_floating_point())
    return next(floating, None)


def _held_by_name(output: Any) -> Any:
    """What a distribution has as its mean, or a mapping or an output under one of the names."""
    if isinstance(output, list) or type(output) is tuple:
        return None
    distribution = _value(output, "latent_dist") or output
    if callable(getattr(distribution, "mode", None)):
        return getattr(distribution, "mean", None)
    held = (_value(output, name) for name in _LATENT_NAMES)
    return next((one for one in held if one is not None and not callable(one)), None)


def _value(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _in_sequence(output: list[Any] | tuple[Any, ...], depth: int) -> Tensor | None:
    """A latent by its name in one of the items; else several tensors of one shape as a batch, or the first."""
    for item in output:
        if isinstance(item, Mapping) and "samples" in item:
            return _find_in(item, depth + 1)
    tensors = [as_tensor(item) for item in output]
    if len(tensors) > 1 and all(tensor is not None for tensor in tensors):
        known = [tensor for tensor in tensors if tensor is not None]
        if len({tensor.shape for tensor in known}) == 1 and known[0].ndim == 3:
            return torch.stack(known)
    found = (_find_in(item, depth + 1) for item in output)
    return next((tensor for tensor in found if tensor is not None), None)


def judge(
    latent: Tensor, vae: VaeFacts | None, video: Video, layout: Layout | None, statistics: bool | None
) -> Judged:
    """Read a latent: which axes it has, unpacked where it is packed.

    Args:
        latent: Of any rank.
        vae: What made it.
        video: What it was made of.
        layout: What the caller says of its axes.
        statistics: Whether to read values, as in `probes.tensor_facts`.
    """
    facts = quick_facts(latent, statistics)
    if layout in (None, "packed"):
        whole = unpacked(facts.shape, vae, video.length, video.height, video.width)
        if whole is not None:
            sizes = Sizes(whole.batch, whole.frames, whole.channels, whole.height, whole.width)
            words = f"{facts.shape[1]} tokens of {whole.patch}x{whole.patch} latent pixels"
            return Judged(facts, Axes("packed", words), sizes, whole)
    channels = None if vae is None else vae.latent_channels
    axes = latent_layout(facts.shape, channels, expected_latent(vae, video).frames, layout)
    return Judged(facts, axes, Sizes() if axes is None else sizes_of(facts.shape, axes.layout))


def counted(judged: Judged, latent: Tensor) -> Judged:
    """With NaN and Inf counted in any case, which waits for the latent's device: it is small.

    Args:
        judged: Whose other values may have been left alone.
        latent: What was judged.
    """
    facts = judged.tensor
    if facts.nan_count is not None:
        return judged
    read = tensor_facts(latent, statistics=True)
    reasons = dict(facts.unavailable)
    for name in ("nan_count", "inf_count"):
        reasons.pop(name, None)
        if name in read.unavailable:
            reasons[name] = read.unavailable[name]
    counts = replace(facts, nan_count=read.nan_count, inf_count=read.inf_count, unavailable=reasons)
    return replace(judged, tensor=counts)


def vace_analysis(output: object, statistics: bool | None) -> dict[str, Any]:
    """Shape, type, size and values of each part; an empty dict where there is none. Never raises.

    `trim_latent` counts the latent frames of a reference picture, at the beginning.

    Args:
        output: What the node gave: (positive, negative, latent, trim_latent), or a conditioning.
        statistics: Whether to read values, as in `probes.tensor_facts`.
    """
    output = node_outputs(output)
    parts: dict[str, Any] = {
        name: _vace_part(tensor, statistics) for name, tensor in find_vace(output).items()
    }
    if parts and isinstance(output, list | tuple):
        trim = output[-1]
        parts["trim_latent"] = trim if isinstance(trim, int) else 0
    return parts


def _vace_part(tensor: Tensor, statistics: bool | None) -> dict[str, Any]:
    facts = tensor_facts(tensor, statistics=statistics)
    return {
        "shape": list(facts.shape),
        "dtype": facts.dtype,
        "device": facts.device,
        "size_mb": facts.nbytes / MIB,
        "statistics": statistics_of(facts),
        "unavailable": dict(facts.unavailable),
    }


def reference_frames(latent: LatentAnalysis, vace: Mapping[str, Any]) -> int:
    """How many latent frames of a reference picture stand before those of the video.

    WAN-VACE's node says so beside its latent. Of the latent alone it shows by one frame more than the video's, and
    by its zeros where its values were read: its content is in the conditioning.

    Args:
        latent: What is known of it.
        vace: What `vace_analysis` gave.
    """
    if vace:
        return int(vace.get("trim_latent", 0))
    expected, values = latent["expected_shape"], latent["statistics"]
    read = () if values is None else (values["min"], values["max"])
    is_empty = all(value in (None, 0.0) for value in read)
    return int(is_empty and len(expected or ()) == 4 and latent["frames"] == (expected or [0, 0])[1] + 1)


def find_vace(output: object) -> dict[str, Tensor]:
    """`vace_frames` and `vace_mask` in a node's outputs or a conditioning, the last one of each. Never raises."""
    output = node_outputs(output)
    if not isinstance(output, list | tuple):
        return {}
    named = read_host(lambda: {leaf.name: leaf.tensor for leaf in leaves_of(output)}).value or {}
    return {name: named[name] for name in _VACE_NAMES if name in named}


def vace_findings(
    vace: Mapping[str, Any], latent: LatentAnalysis, vae: VaeFacts | None, stage: str
) -> Iterator[Finding]:
    """Parts of the conditioning that do not fit the latent, or hold NaN.

    Args:
        vace: What `vace_analysis` gave.
        latent: The latent beside it.
        vae: What encoded; where it is unknown, a factor of 8 is taken, which is WAN's.
        stage: The stage's name.
    """
    channels, side = latent["channels"], (None if vae is None else vae.spatial_factor) or 8
    wanted = {
        "vace_frames": None if channels is None else _HALVES * channels,
        "vace_mask": side * side,
    }
    grid = [latent["frames"], latent["height"], latent["width"]]
    for name in _VACE_NAMES:
        facts = vace.get(name)
        if facts is None:
            continue
        shape = facts["shape"]
        expected = [wanted[name], *grid]
        if None not in expected and shape[1:] != expected:
            message = f"{name} is {shape[1:]} where the latent asks for {expected} (channels, frames, height, width)."
            evidence = {"found": "x".join(map(str, shape)), "expected": "x".join(map(str, expected))}
            yield Finding("vace_shape_unexpected", "error", message, evidence, stage=stage)
        broken = {
            key: facts["statistics"][key] for key in ("nan_count", "inf_count") if facts["statistics"][key]
        }
        if broken:
            message = f"{name} is not finite: {broken}."
            yield Finding("vace_not_finite", "error", message, broken, stage=stage)


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
