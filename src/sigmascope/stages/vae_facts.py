"""What a VAE's class and config say of its latents: channels, factors of space and time, causal or not.

Everything is known by names, configs and layers, so that neither diffusers nor ComfyUI is imported.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from sigmascope.probes.models import module_facts, modules_in
from sigmascope.probes.reading import read_host
from sigmascope.records.latents import VaeFacts
from sigmascope.records.memory import mib
from sigmascope.records.run import ModuleFacts
from sigmascope.stages.baseline import facts_as
from sigmascope.stages.schema import VaeDict

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
    reading = read_host(lambda: _facts(inner_vae(vae)))
    if reading.value is not None:
        return reading.value
    reason = reading.reason or "it could not be read"
    return VaeFacts(type(vae).__name__, unavailable=dict.fromkeys(_FACTS, reason))


def _facts(vae: object) -> VaeFacts:
    module = module_facts(vae)
    if vae is None:
        return _unknown("NoneType", "no VAE was given", module)
    if is_comfyui_vae(vae):
        return _comfyui(vae, module)
    config = getattr(vae, "config", None)
    if isinstance(config, Mapping):
        facts = config_facts(vae, config)
        return VaeFacts(type(vae).__name__, **_weight_facts(module), **_with_reasons(facts, "config"))
    return _unknown(type(vae).__name__, f"{type(vae).__name__} has no config that is known", module)


def _unknown(class_name: str, reason: str, module: ModuleFacts) -> VaeFacts:
    return VaeFacts(class_name, **_weight_facts(module), unavailable=dict.fromkeys(_FACTS, reason))


def _weight_facts(module: ModuleFacts) -> dict[str, Any]:
    """Where most of the weights are, of which type, and their bytes."""
    return {
        "dtype": max(module.dtypes, key=lambda name: module.dtypes[name], default=None),
        "device": max(module.devices, key=lambda name: module.devices[name], default=None),
        "nbytes": module.nbytes,
    }


def is_comfyui_vae(vae: object) -> bool:
    """Whether it is ComfyUI's VAE, told by what it holds."""
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
    return VaeFacts(name, **_weight_facts(module), **_with_reasons(facts, "ComfyUI's VAE"))


def _temporal_factor_of(latent_frames: Callable[[int], Any]) -> tuple[int | None, bool]:
    """Factor and causality of a function from frames to latent frames, found by asking it.

    A causal one begins with one latent frame for one frame, and its second needs a whole factor more.
    """
    for frames in range(2, _MOST_FRAMES):
        if latent_frames(frames) >= 2:
            causal = latent_frames(1) == 1 and latent_frames(2 * frames - 1) >= 3
            return (frames - 1, True) if causal else (frames // 2, False)
    return None, False


def _with_reasons(facts: dict[str, Any], source: str) -> dict[str, Any]:
    missing = [name for name in _FACTS if facts.get(name) is None]
    return {
        **facts,
        "source": source,
        "unavailable": dict.fromkeys(missing, f"neither {source} nor layers tell"),
    }


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


def whole(number: object) -> int | None:
    """A positive whole number, of whatever type; None for anything else."""
    if isinstance(number, bool) or not isinstance(number, int | float) or number < 1:
        return None
    integer = int(number)
    return integer if integer == number else None


def vae_dict(facts: VaeFacts) -> VaeDict:
    """The VAE's facts as an analysis holds them."""
    return facts_as(VaeDict, facts, size_mb=mib(facts.nbytes), unavailable=dict(facts.unavailable))
