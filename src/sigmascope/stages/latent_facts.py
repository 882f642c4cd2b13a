"""What a VAE says of its latents, what a latent is, how far it is compressed, and what WAN-VACE's conditioning adds.

Known forms of a latent: a tensor or array; ComfyUI's `{"samples": tensor}`, alone or in a node's outputs;
diffusers' outputs with `latent_dist`, `latents`, `latent` or `sample`; any mapping or sequence of these.

Its axes are told by the VAE's channels. Some transformers take latents as a list of patches: FLUX, FLUX.2 and
Qwen-Image make one token of 2x2 latent pixels, LTX of one: (batch, tokens, channels·p²).

WAN-VACE's conditioning holds the content that its latent does not. ComfyUI's WanVaceToVideo gives a latent
(batch, 16, frames, h, w) of zeros, and in both conditionings `vace_frames` (1, 32, frames, h, w): what to
change and what to keep, 16 channels each, and `vace_mask` (1, 64, frames, h, w): the 8x8 pixels of each
latent pixel. A reference picture is one latent frame more at the beginning (`trim_latent`).

Everything is known by names, configs and layers, so that neither diffusers nor ComfyUI is imported.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sigmascope.probes.models import module_facts, modules_in
from sigmascope.probes.reading import Reading, attempt, node_outputs
from sigmascope.probes.tensors import as_tensor, leaves_of, quick_facts, tensor_facts
from sigmascope.records.latents import Layout, VaeFacts
from sigmascope.records.memory import mib
from sigmascope.records.run import Finding, ModuleFacts, TensorFacts
from sigmascope.stages.baseline import NO_WEIGHTS, most_common, tensor_dict
from sigmascope.stages.image_facts import Sizes, Video, held_by_name, sizes_of, whole
from sigmascope.stages.schema import LatentAnalysis, VaeDict, as_dict

_TYPES = {4: "Image Latent", 5: "Video Latent"}
UNKNOWN_TYPE = "Unknown Latent"
_NO_FACTOR = "the VAE's factor is unknown"
_LATENT_NAMES = ("samples", "latents", "latent", "init_latent", "latent_samples", "encodings", "z", "sample")
_VACE_NAMES = ("vace_frames", "vace_mask")
_CANDIDATES: dict[int, tuple[Layout, ...]] = {
    5: ("BCFHW", "BFCHW"),
    4: ("BCHW", "CFHW", "BHWC"),
    3: ("CHW",),
}
"""The first is what VAEs give; a 3-D latent that is packed is known before this is asked."""
_PATCHES = (1, 2)  # latent pixels along a side of a token
_USUAL_PATCH = 2
_HALVES = 2  # of `vace_frames`: what to change, and what to keep


class LatentSearch(NamedTuple):
    """The tensor and in what it was. `reason` says why there is none; `raised`: its own code failed."""

    tensor: Tensor | None
    structure: str
    reason: str | None = None
    raised: bool = False


def find_latent(output: object) -> LatentSearch:
    """The latent in an output. Nothing is computed: of a distribution its mean is taken. Never raises."""
    output = node_outputs(output)
    if output is None:
        return LatentSearch(None, "none", "no latent was given")
    structure = _structure(output)
    reading = attempt(lambda: _find_in(output))
    if reading.reason is not None:
        return LatentSearch(None, structure, reading.reason, raised=True)
    reason = f"no tensor was found in it ({structure})"
    return LatentSearch(reading.value, structure, reason if reading.value is None else None)


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
    distribution = held_by_name(output, ("latent_dist",))
    distribution = output if distribution is None else distribution
    if callable(getattr(distribution, "mode", None)):
        return getattr(distribution, "mean", None)
    return held_by_name(output, _LATENT_NAMES)


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
    latents = (_find_in(item, depth + 1) for item in output)
    return next((tensor for tensor in latents if tensor is not None), None)


class Axes(NamedTuple):
    """A layout and the evidence for it."""

    layout: Layout
    evidence: str


@dataclass(frozen=True, slots=True)
class Unpacked:
    """The latent that tokens stand for. `frames` is None for pictures; `patch` is latent pixels along a side."""

    batch: int
    channels: int
    frames: int | None
    height: int
    width: int
    patch: int

    @property
    def shape(self) -> tuple[int, ...]:
        """(batch, channels, height, width), with frames after the channels if there are some."""
        frames = () if self.frames is None else (self.frames,)
        return (self.batch, self.channels, *frames, self.height, self.width)


class LatentReading(NamedTuple):
    """A latent's tensor facts with the axes that they were read by."""

    tensor: TensorFacts
    axes: Axes | None
    sizes: Sizes
    unpacked: Unpacked | None = None


def read_latent(
    latent: Tensor, vae: VaeFacts | None, video: Video, layout: Layout | None, statistics: bool | None
) -> LatentReading:
    """Read a latent: which axes it has, unpacked where it is packed."""
    facts = quick_facts(latent, statistics)
    if layout in (None, "packed"):
        whole = unpacked(facts.shape, vae, video.length, video.height, video.width)
        if whole is not None:
            sizes = Sizes(whole.batch, whole.frames, whole.channels, whole.height, whole.width)
            words = f"{facts.shape[1]} tokens of {whole.patch}x{whole.patch} latent pixels"
            return LatentReading(facts, Axes("packed", words), sizes, whole)
    channels = None if vae is None else vae.latent_channels
    axes = latent_layout(facts.shape, channels, _expected_frames(vae, video), layout)
    return LatentReading(facts, axes, Sizes() if axes is None else sizes_of(facts.shape, axes.layout))


def latent_layout(
    shape: Sequence[int], channels: int | None, frames: int | None, given: Layout | None = None
) -> Axes | None:
    """The layout of a latent; None for a rank that no layout has.

    Args:
        shape: Of 3 to 5 axes.
        channels: The VAE's latent channels, the best evidence.
        frames: How many latent frames are expected, the next best.
        given: The caller's layout, which is used unless it is impossible.
    """
    if given is not None and len(given) == len(shape) and given != "packed":
        return Axes(given, "the caller")
    candidates = _CANDIDATES.get(len(shape))
    if candidates is None:
        return None
    by_channels = _only_layout(candidates, shape, "C", channels)
    if by_channels is not None:
        return Axes(by_channels, f"the VAE's {channels} latent channels")
    by_frames = _only_layout(candidates, shape, "F", frames)
    if by_frames is not None:
        return Axes(by_frames, f"{frames} latent frames, as many as expected")
    either = channels is not None and shape[candidates[0].index("C")] == channels
    usual = "the VAE's latent channels match" if either else "the usual layout: no axis size decides"
    return Axes(candidates[0], usual)


def _only_layout(
    candidates: Iterable[Layout], shape: Sequence[int], axis: str, size: int | None
) -> Layout | None:
    """The one layout that has `size` on an axis; of several the first where they agree with it equally is none."""
    fitting = [layout for layout in candidates if axis in layout and size == shape[layout.index(axis)]]
    return fitting[0] if len(fitting) == 1 else None


def unpacked(
    shape: Sequence[int], vae: VaeFacts | None, length: int | None, height: int | None, width: int | None
) -> Unpacked | None:
    """What (batch, tokens, values) are unpacked; None if they fit no latent of pictures of that size.

    Args:
        shape: Of the packed latent.
        vae: Its channels and factors; without them FLUX's 2x2 patches are tried.
        length: Frames of the video.
        height: Of the pictures, in pixels.
        width: Likewise.
    """
    if len(shape) != 3 or height is None or width is None:
        return None
    batch, tokens, values = shape
    known = None if vae is None else vae.latent_channels
    for patch in _PATCHES:
        channels = values // patch**2
        factor = _packed_factor(tokens, patch, vae, height, width)
        fits = patch == _USUAL_PATCH if known is None else channels == known
        if factor is None or channels * patch**2 != values or not fits:
            continue
        high, wide = height // (factor * patch), width // (factor * patch)
        frames = _packed_frames(vae, length)
        if high * wide * (frames or 1) == tokens and tokens:
            return Unpacked(batch, channels, frames, high * patch, wide * patch, patch)
    return None


def _packed_factor(tokens: int, patch: int, vae: VaeFacts | None, height: int, width: int) -> int | None:
    """Picture pixels along a latent pixel: the VAE's, else what the number of tokens says."""
    if vae is not None and vae.spatial_factor is not None:
        return vae.spatial_factor
    if tokens < 1:
        return None
    factor = math.isqrt(height * width // (tokens * patch**2))
    return factor or None


def _packed_frames(vae: VaeFacts | None, length: int | None) -> int | None:
    """Latent frames of a VAE whose latents have an axis of them."""
    if vae is None or not vae.is_video or vae.temporal_factor == 1:
        return None
    return None if length is None else vae.latent_frames(length)


def expected_shape(vae: VaeFacts | None, video: Video) -> list[int] | None:
    """[channels, frames, height, width] that a VAE should give; a picture has no frames.

    None unless all is known. A side that the factor does not divide is cut off.
    """
    if vae is None or vae.latent_channels is None or vae.spatial_factor is None:
        return None
    if video.height is None or video.width is None:
        return None
    frames = _expected_frames(vae, video)
    sides = [side // vae.spatial_factor for side in (video.height, video.width)]
    return [vae.latent_channels, *([] if frames is None else [frames]), *sides]


def _expected_frames(vae: VaeFacts | None, video: Video) -> int | None:
    if vae is None or not vae.is_video or video.length is None:
        return None
    return vae.latent_frames(video.length)


def count_not_finite(reading: LatentReading, latent: Tensor) -> LatentReading:
    """The facts with NaN and Inf counted in any case. This waits for the latent's device, but a latent is small."""
    facts = reading.tensor
    if facts.nan_count is not None:
        return reading
    read, names = tensor_facts(latent, statistics=True), ("nan_count", "inf_count")
    reasons = {name: why for name, why in facts.unavailable.items() if name not in names}
    reasons |= {name: why for name, why in read.unavailable.items() if name in names}
    counts = replace(facts, nan_count=read.nan_count, inf_count=read.inf_count, unavailable=reasons)
    return reading._replace(tensor=counts)


def latent_analysis(
    reading: LatentReading, structure: str, vae: VaeFacts | None, video: Video
) -> LatentAnalysis:
    """All facts about one latent."""
    tensor, sizes, axes = tensor_dict(reading.tensor), reading.sizes, reading.axes
    rank = len(tensor["shape"])
    layout, evidence = (None, None) if axes is None else axes
    no_axis = f"no layout is known for a latent of {rank} axes" if axes is None else f"{layout} has none"
    return as_dict(
        LatentAnalysis,
        {**tensor, **_compression(sizes, vae, video)},
        batch_size=Reading(sizes.batch, no_axis),
        frames=Reading(sizes.frames, no_axis),
        channels=Reading(sizes.channels, no_axis),
        height=Reading(sizes.height, no_axis),
        width=Reading(sizes.width, no_axis),
        latent_layout=Reading(layout, no_axis),
        layout_evidence=Reading(evidence, no_axis),
        unpacked_shape=Reading(
            None if reading.unpacked is None else list(reading.unpacked.shape), "it is not packed"
        ),
        expected_shape=Reading(
            expected_shape(vae, video),
            "the VAE's channels and factor and the size of the pictures are needed",
        ),
        status="not_finite" if reading.tensor.nan_count or reading.tensor.inf_count else "success",
        structure=structure,
        latent_type=_TYPES.get(
            rank if reading.unpacked is None else len(reading.unpacked.shape), UNKNOWN_TYPE
        ),
    )


def no_latent(search: LatentSearch) -> LatentAnalysis:
    """The analysis of a latent that is not there."""
    status = "missing" if search.structure == "none" else "failed" if search.raised else "no_tensor"
    return as_dict(LatentAnalysis, why=search.reason, status=status, structure=search.structure)


def _compression(sizes: Sizes, vae: VaeFacts | None, video: Video) -> dict[str, Reading[float]]:
    """(H·W) / (h·w), and frames by latent frames; of pictures encoded one by one, those by latents."""
    area = None if video.height is None or video.width is None else video.height * video.width
    latent_area = (sizes.height or 0) * (sizes.width or 0)
    length, frames = video.length, sizes.frames
    if frames is None and length:
        frames = length if sizes.batch == length else None
    factor, time = (None, None) if vae is None else (vae.spatial_factor, vae.temporal_factor)
    return {
        "spatial_compression": Reading(
            area / latent_area if area is not None and latent_area else None,
            "the size of the pictures is unknown" if area is None else "the latent's sides are unknown",
        ),
        "temporal_compression": Reading(
            length / frames if length is not None and frames else None,
            "the number of frames is unknown" if length is None else "the latent has no frames",
        ),
        "nominal_spatial_compression": Reading(None if factor is None else float(factor**2), _NO_FACTOR),
        "nominal_temporal_compression": Reading(None if time is None else float(time), _NO_FACTOR),
    }


def vace_analysis(output: object, statistics: bool | None) -> dict[str, Any]:
    """Shape, type, size and values of each part; an empty dict where there is none. Never raises.

    `trim_latent` counts the latent frames of a reference picture, at the beginning.
    """
    output = node_outputs(output)
    parts: dict[str, Any] = {
        name: tensor_dict(tensor_facts(tensor, statistics=statistics))
        for name, tensor in find_vace(output).items()
    }
    if parts and isinstance(output, list | tuple):
        trim = output[-1]
        parts["trim_latent"] = trim if isinstance(trim, int) else 0
    return parts


def find_vace(output: object) -> dict[str, Tensor]:
    """`vace_frames` and `vace_mask` in a node's outputs or a conditioning, the last one of each. Never raises."""
    output = node_outputs(output)
    if not isinstance(output, list | tuple):
        return {}
    named = attempt(lambda: {leaf.name: leaf.tensor for leaf in leaves_of(output)}).value or {}
    return {name: named[name] for name in _VACE_NAMES if name in named}


def reference_frames(latent: LatentAnalysis, vace: Mapping[str, Any]) -> int:
    """How many latent frames of a reference picture stand before those of the video.

    WAN-VACE's node says so beside its latent. Of the latent alone it shows by one frame more than the video's, and
    by its zeros where its values were read: its content is in the conditioning.
    """
    if vace:
        return int(vace.get("trim_latent", 0))
    expected, values = latent["expected_shape"], latent["statistics"]
    read = () if values is None else (values["min"], values["max"])
    is_empty = all(value in (None, 0.0) for value in read)
    return int(is_empty and len(expected or ()) == 4 and latent["frames"] == (expected or [0, 0])[1] + 1)


def vace_findings(vace: Mapping[str, Any], latent: LatentAnalysis, vae: VaeFacts | None) -> Iterator[Finding]:
    """Parts of the conditioning that do not fit the latent, or hold NaN.

    Args:
        vace: What `vace_analysis` gave.
        latent: The latent beside it.
        vae: What encoded; where it is unknown, a factor of 8 is taken, which is WAN's.
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
            message = (
                f"{name} is {shape[1:]} but the latent needs {expected} (channels, frames, height, width)."
            )
            evidence = {"found": "x".join(map(str, shape)), "expected": "x".join(map(str, expected))}
            yield Finding("vace_shape_unexpected", "error", message, evidence)
        broken = {
            key: facts["statistics"][key] for key in ("nan_count", "inf_count") if facts["statistics"][key]
        }
        if broken:
            message = f"{name} is not finite: {broken}."
            yield Finding("vace_not_finite", "error", message, broken)


_HOLDERS = ("vae", "vae_model", "_orig_mod")
"""Where pipelines, an LBM model's VAE and torch.compile keep the VAE itself."""
_MOST_FRAMES = 65
_FACTS = ("latent_channels", "image_channels", "spatial_factor", "temporal_factor", "is_video")
_VIDEO_KEYS = frozenset(
    {"temperal_downsample", "temporal_compression_ratio", "temporal_expansions", "scale_factor_temporal"}
)
_LATENT_CHANNELS = ("latent_channels", "z_dim", "vq_embed_dim", "encoder_hidden_size")
_PICTURE_CHANNELS = ("in_channels", "input_channels", "out_channels")
_WIDTHS = ("down_block_out_channels", "encoder_block_out_channels", "block_out_channels")


def vae_facts(vae: object) -> VaeFacts:
    """The facts of a diffusers VAE, a ComfyUI VAE, a pipeline that has one, or an unknown one. Never raises.

    What neither config nor layers tell is None, with the reason in `unavailable`.
    """
    facts = attempt(lambda: _facts(inner_vae(vae)))
    return facts.value or unknown_vae(facts.reason, type(vae).__name__)


def _facts(vae: object) -> VaeFacts:
    module = module_facts(vae)
    if vae is None:
        return unknown_vae("no VAE was given", "NoneType")
    if is_comfyui_vae(vae):
        return _comfyui(vae, module)
    name, config = type(vae).__name__, getattr(vae, "config", None)
    if isinstance(config, Mapping):
        return _with_weights(name, module, config_facts(vae, config), "config")
    return _with_weights(name, module, {}, why=f"{name} has no known config")


def unknown_vae(reason: str | None, class_name: str = "") -> VaeFacts:
    """The facts of a VAE of which nothing is known."""
    names = (*_FACTS, "dtype", "device", "nbytes")
    return VaeFacts(class_name, unavailable=dict.fromkeys(names, reason or "unknown"))


def _with_weights(
    class_name: str, module: ModuleFacts, facts: Mapping[str, Any], source: str = "", *, why: str = ""
) -> VaeFacts:
    """The facts that `source` tells, and where most of the weights are, of which type, and their bytes."""
    weights = {
        "dtype": most_common(module.dtypes),
        "device": most_common(module.devices),
        "nbytes": module.nbytes,
    }
    reasons = dict.fromkeys(_FACTS, why or f"neither {source} nor its layers say")
    reasons |= dict.fromkeys(weights, module.unavailable.get("nbytes", NO_WEIGHTS))
    known = {**facts, **weights}
    missing = {name: reason for name, reason in reasons.items() if known.get(name) is None}
    return VaeFacts(class_name, **known, source=source, unavailable=missing)


def is_comfyui_vae(vae: object) -> bool:
    """Whether it is ComfyUI's VAE, judged by its attributes."""
    return hasattr(vae, "first_stage_model") and hasattr(vae, "downscale_ratio")


def _comfyui(vae: Any, module: ModuleFacts) -> VaeFacts:
    """ComfyUI's VAE: ratios are numbers, or a function of frames with two numbers for video."""
    down = vae.downscale_ratio
    over_time = down[0] if isinstance(down, tuple) else None
    factor, apart = _temporal_factor_of(over_time) if callable(over_time) else (1, False)
    is_video = getattr(vae, "latent_dim", 2) == 3
    facts = {
        "latent_channels": whole(getattr(vae, "latent_channels", None)),
        "image_channels": whole(getattr(vae, "output_channels", None)),
        "spatial_factor": whole(down[-1] if isinstance(down, tuple) else down),
        "temporal_factor": factor,
        "first_frame_apart": apart,
        "is_video": is_video,
    }
    name = type(getattr(vae, "first_stage_model", vae)).__name__
    return _with_weights(name, module, facts, "ComfyUI's VAE")


def _temporal_factor_of(latent_frames: Callable[[int], Any]) -> tuple[int | None, bool]:
    """Factor and causality of a function from frames to latent frames, found by asking it.

    A causal one begins with one latent frame for one frame, and its second needs a whole factor more.
    """
    for frames in range(2, _MOST_FRAMES):
        if latent_frames(frames) >= 2:
            causal = latent_frames(1) == 1 and latent_frames(2 * frames - 1) >= 3
            return (frames - 1, True) if causal else (frames // 2, False)
    return None, False


def inner_vae(vae: object) -> object:
    """The VAE inside a pipeline, a mapping with a `vae`, an LBM model's VAE or a compiled module."""
    for _ in range(len(_HOLDERS)):
        held = vae.get("vae") if isinstance(vae, Mapping) else _held(vae)
        if held is None:
            return vae
        vae = held
    return vae


def _held(vae: object) -> object:
    if is_comfyui_vae(vae):
        return None
    held = (getattr(vae, name, None) for name in _HOLDERS)
    return next((value for value in held if value is not None and not _is_function(value)), None)


def _is_function(thing: object) -> bool:
    return callable(thing) and not isinstance(thing, nn.Module)


def config_facts(vae: object, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `VaeFacts` that say something of latents, None where nothing tells."""
    is_video = _is_video(vae, config)
    return {
        "latent_channels": _first_number(config, _LATENT_CHANNELS),
        "image_channels": _picture_channels(config),
        "spatial_factor": _spatial(vae, config),
        "temporal_factor": _temporal(vae, config) if is_video else 1,
        "first_frame_apart": is_video and _is_causal(vae, config),
        "is_video": is_video,
    }


def _is_video(vae: object, config: Mapping[str, Any]) -> bool:
    """Whether frames have an axis of their own: a factor of time in the config, or 3-D layers to encode."""
    return bool(_VIDEO_KEYS & config.keys()) or any(
        isinstance(part, nn.Conv3d) for part in _encoder_parts(vae)
    )


def _encoder_parts(vae: object) -> Iterator[nn.Module]:
    encoder = getattr(vae, "encoder", vae)
    return modules_in(encoder) if isinstance(encoder, nn.Module) else iter(())


def _first_number(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    numbers = (whole(config.get(name)) for name in names)
    return next((number for number in numbers if number is not None), None)


def _picture_channels(config: Mapping[str, Any]) -> int | None:
    """Where `in_channels` counts what patches or Fourier features make of them, a picture still has 3."""
    if whole(config.get("patch_size")) is not None or "temporal_expansions" in config:
        return 3
    return _first_number(config, _PICTURE_CHANNELS)


def _spatial(vae: object, config: Mapping[str, Any]) -> int | None:
    stages = config.get("temperal_downsample")
    if isinstance(stages, list | tuple):  # WAN and Qwen-Image: the layers, whatever the config claims
        return (1 << len(stages)) * (whole(config.get("patch_size")) or 1)
    ratio = _own_attribute(vae, "spatial_compression_ratio")
    ratio = ratio or _first_number(config, ("spatial_compression_ratio", "scale_factor_spatial"))
    widths = next((config[name] for name in _WIDTHS if isinstance(config.get(name), list | tuple)), None)
    return ratio or (None if widths is None else 1 << (len(widths) - 1))


def _own_attribute(vae: object, name: str) -> int | None:
    """An attribute of the object itself: asking diffusers for one that only its config has makes it warn."""
    return whole(vars(vae).get(name))


def _temporal(vae: object, config: Mapping[str, Any]) -> int | None:
    stages = config.get("temperal_downsample")
    if isinstance(stages, list | tuple):
        return 1 << sum(map(bool, stages))
    expansions = config.get("temporal_expansions")
    if isinstance(expansions, list | tuple):
        return int(math.prod(expansions))
    ratio = _own_attribute(vae, "temporal_compression_ratio")
    return ratio or _first_number(config, ("temporal_compression_ratio", "scale_factor_temporal"))


def _is_causal(vae: object, config: Mapping[str, Any]) -> bool:
    causal = next((config[name] for name in ("encoder_causal", "is_causal") if name in config), None)
    if causal is not None:
        return bool(causal)
    return any("Causal" in type(part).__name__ for part in _encoder_parts(vae))


def vae_dict(facts: VaeFacts) -> VaeDict:
    """The VAE's facts as an analysis holds them."""
    return as_dict(VaeDict, facts, size_mb=Reading(mib(facts.nbytes), facts.unavailable.get("nbytes")))
