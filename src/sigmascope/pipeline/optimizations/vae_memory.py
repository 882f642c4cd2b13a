"""VAE slicing and tiling: decode image by image, or tile by tile, to need less memory at once."""

from collections.abc import Iterator
from typing import Any, Final

from torch import nn

from sigmascope import units
from sigmascope.pipeline.optimizations.interface import Circumstances, Considered, Kind
from sigmascope.pipeline.optimizations.memory_budget import tile_side, vae_peak
from sigmascope.pipeline.pipeline_parts import models_of
from sigmascope.pipeline.plan import Choice, NotTaken
from sigmascope.records.memory import MIB

SLICING: Final = "vae_slicing"
TILING: Final = "vae_tiling"


def consider_slicing(found: Circumstances) -> Considered:
    """For several images whose decoding at once does not fit."""
    for name, vae in _vaes(found):
        yield _slicing(found, name, vae)


def _vaes(found: Circumstances) -> Iterator[tuple[str, nn.Module]]:
    yield from found.subject.of_role("vae").items()


def _slicing(found: Circumstances, name: str, vae: nn.Module) -> Choice | NotTaken:
    asked = found.config.vae_slicing
    refusal = _settled(SLICING, name, vae, "use_slicing", asked)
    if refusal is not None:
        return refusal
    batch = found.call.batch_size
    if asked == "auto" and (batch == 1 or _decoding_fits(found, name, found.vae_bytes) is not False):
        why = "one image at a time is planned" if batch == 1 else _fitting_words(found, name, found.vae_bytes)
        return NotTaken(SLICING, name, why)
    return Choice(
        SLICING,
        name,
        f"pipe.{name}.enable_slicing()",
        f"{batch} images are decoded at once. {_fitting_words(found, name, found.vae_bytes)}",
        "the memory of one image; a little time",
        "memory",
        "rounding",
        numbers={"peak_mb": None if found.vae_bytes is None else found.vae_bytes / MIB},
        necessary=asked == "auto",
    )


def _settled(kind: str, name: str, vae: nn.Module, switch: str, asked: object) -> NotTaken | None:
    if asked is False:
        return NotTaken(kind, name, "switched off")
    if not hasattr(vae, switch) or not hasattr(vae, switch.replace("use", "enable", 1)):
        return NotTaken(kind, name, f"{type(vae).__name__} does not offer it")
    if getattr(vae, switch) is True:
        return NotTaken(kind, name, "it is on already")
    return None


def _decoding_fits(found: Circumstances, name: str, peak: int | None) -> bool | None:
    """None: not known."""
    room = _room(found)
    return None if peak is None or room is None else peak + _resident(found, name) <= room


def _room(found: Circumstances) -> int | None:
    return found.room_bytes if found.hardware.is_accelerator else found.hardware.ram_available_bytes


def _resident(found: Circumstances, name: str) -> int:
    """Weights that are on the device while the VAE works."""
    if not found.hardware.is_accelerator:
        return 0
    offloaded = any(one.options.get("how") in ("model", "group") for one in found.chosen)
    return found.weights.get(name, 0) if offloaded else found.total_bytes


def _fitting_words(found: Circumstances, name: str, peak: int | None) -> str:
    if peak is None:
        return f"What decoding takes is not known: {found.unavailable.get('vae_mb', 'no reason is known')}."
    room = _room(found)
    if room is None:
        return f"Decoding takes about {units.mib(peak)} MB, and how much there is could not be read."
    return (
        f"Decoding takes about {units.mib(peak)} MB beside {units.mib(_resident(found, name))} MB of weights, "
        f"in {units.mib(room)} MB."
    )


def consider_tiling(found: Circumstances) -> Considered:
    """For an image whose decoding at once does not fit."""
    for name, vae in _vaes(found):
        yield _tiling(found, name, vae)


def _tiling(found: Circumstances, name: str, vae: nn.Module) -> Choice | NotTaken:
    asked = found.config.vae_tiling
    refusal = _settled(TILING, name, vae, "use_tiling", asked)
    if refusal is not None:
        return refusal
    peak = vae_peak(found, batch_at_once=1).bytes if found.has(SLICING) else found.vae_bytes
    if asked == "auto":
        tile = tile_side(vae)
        if tile is not None and max(found.call.height, found.call.width) <= tile:
            return NotTaken(TILING, name, f"an image of this size is one tile of {tile} pixels")
        if _decoding_fits(found, name, peak) is not False:
            return NotTaken(TILING, name, _fitting_words(found, name, peak))
    return Choice(
        TILING,
        name,
        f"pipe.{name}.enable_tiling()",
        _fitting_words(found, name, peak),
        "the memory of one tile; seams are blended, and colours may shift between tiles",
        "memory",
        "approximation",
        numbers={"peak_mb": None if peak is None else peak / MIB},
        necessary=asked == "auto",
    )


def apply_slicing(pipeline: Any, choice: Choice) -> None:
    """Switch it on."""
    _vae(pipeline, choice).enable_slicing()


def _vae(pipeline: Any, choice: Choice) -> Any:
    return models_of(pipeline)[choice.component]


def apply_tiling(pipeline: Any, choice: Choice) -> None:
    """Switch it on."""
    _vae(pipeline, choice).enable_tiling()


SLICING_KIND: Final = Kind(SLICING, consider_slicing, apply_slicing)
TILING_KIND: Final = Kind(TILING, consider_tiling, apply_tiling)
