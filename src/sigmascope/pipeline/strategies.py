"""The strategies of encoding and decoding: all at once, in tiles, or on the CPU.

`Encoding` and `Decoding` cut the work into the parts that every strategy needs, and know how to finish what comes
out of them. `direct`, `tiled` and `on_cpu` do the work, and each leaves the VAE as it found it, whatever ends it.
A result with NaN or Inf ends all three with an error, as running out of memory does.
`checked` and `check_tiles` refuse options that make no sense before anything is done.
"""

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, SupportsIndex, cast

import torch
from torch import Tensor

from sigmascope.errors import ConfigError, ModelMismatchError, NonFiniteError
from sigmascope.pipeline.image_preprocessing import Pictures, folded, unfolded
from sigmascope.pipeline.model_state import as_before, for_inference, put_in_ram
from sigmascope.pipeline.tile_plan import plan
from sigmascope.pipeline.tiling import in_tiles
from sigmascope.pipeline.vae_adapters import ComfyuiVae, Encoded, Vae
from sigmascope.records.latents import STRATEGIES, Direction, Strategy, TileFacts

_CPU = torch.device("cpu")
_USUAL_FACTOR = 8
"""Pixels along one latent element of the usual VAEs, where the VAE does not say."""
_ROUNDINGS: tuple[Literal["down"], Literal["up"]] = ("down", "up")
_LARGEST_TILE = 512
_SMALLEST_LATENT_TILE = 8
"""Tiles that are tried where none are asked for go from so many pixels down to so many latent elements."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes in pixels. An overlap of None is a quarter of a tile."""

    side: int
    overlap: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a strategy made. `tile` says how it was cut, where it was."""

    tensor: Tensor
    tile: TileFacts | None = None


@dataclass(slots=True)
class Encoding:
    """Pictures to latents.

    Attributes:
        vae: The VAE's adapter.
        pictures: What goes in.
        sample: Whether to draw from the distribution.
        generator: Of that draw.
        output_device: Where to put the result; None: where the VAE leaves it.
        source: What goes in: batch first, height and width last.
    """

    vae: Vae
    pictures: Pictures
    sample: bool = False
    generator: torch.Generator | None = None
    output_device: torch.device | None = None
    direction: Direction = "encoding"
    source: Tensor = field(init=False)
    _posterior: type[Any] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.source = self.pictures.tensor

    @property
    def pixels(self) -> tuple[int, int]:
        """Height and width."""
        height, width = self.source.shape[-2:]
        return height, width

    def one_by_one(self) -> Sequence[Tensor]:
        """Each picture or video."""
        return torch.split(self.source, 1)

    def part(self, part: Tensor, device: torch.device) -> Tensor:
        """Latents, or the parameters of their distribution."""
        return self._note(self.vae.encode(part, self.pictures.values, device))

    def vae_tiles(self, part: Tensor, tile: int, overlap: int) -> Tensor | None:
        """ComfyUI cuts its own."""
        if not isinstance(self.vae, ComfyuiVae):
            return None
        return self._note(self.vae.encode_tiled(part, self.pictures.values, tile, overlap))

    def compared(self, raw: Tensor) -> Tensor:
        """What neighbouring tiles are compared by: the latent itself."""
        return Encoded(raw, self._posterior).latent(sample=False, generator=None)

    def finish(self, raw: Tensor) -> Tensor:
        """Draw from the distribution, or take its mode; frames get an axis of their own again."""
        latent = Encoded(raw, self._posterior).latent(sample=self.sample, generator=self.generator)
        _check_count(self, latent, "latents", "pictures")
        return unfolded(latent, self.pictures.frames)

    def _note(self, encoded: Encoded) -> Tensor:
        if self.sample and encoded.posterior is None:
            raise ConfigError(
                "sample: this VAE gives no distribution to draw from.",
                hint="Leave sample=False.",
            )
        self._posterior = encoded.posterior
        return encoded.tensor


@dataclass(slots=True)
class Decoding:
    """Latents to pictures. Attributes as of `Encoding`."""

    vae: Vae
    latents: Tensor
    output_device: torch.device | None = None
    direction: Direction = "decoding"
    generator: torch.Generator | None = None
    source: Tensor = field(init=False)
    _frames: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.source = self.latents
        if self.vae.facts.is_video is False:
            self.source, self._frames = folded(self.latents)

    @property
    def pixels(self) -> tuple[int, int]:
        """Height and width of the pictures to come."""
        factor = self.vae.facts.spatial_factor or 1
        height, width = self.source.shape[-2:]
        return height * factor, width * factor

    def one_by_one(self) -> Sequence[Tensor]:
        """Each picture or video, unless the VAE mixes them."""
        return (self.source,) if self.vae.decodes_batch_together else torch.split(self.source, 1)

    def part(self, part: Tensor, device: torch.device) -> Tensor:
        """The pictures of some latents."""
        return self.vae.decode(part, device, self._frames or self.source.shape[0])

    def vae_tiles(self, part: Tensor, tile: int, overlap: int) -> Tensor | None:
        """ComfyUI cuts its own."""
        return self.vae.decode_tiled(part, tile, overlap) if isinstance(self.vae, ComfyuiVae) else None

    def compared(self, raw: Tensor) -> Tensor:
        """What neighbouring tiles are compared by."""
        return raw

    def finish(self, raw: Tensor) -> Tensor:
        """Frames get an axis of their own again."""
        _check_count(self, raw, "pictures", "latents")
        return raw if isinstance(self.vae, ComfyuiVae) else unfolded(raw, self._frames)


Work = Encoding | Decoding
"""What there is to do, by whichever strategy."""


def _check_count(work: Work, made: Tensor, what: str, of: str) -> None:
    """Refuse more or fewer results than were asked for, of a VAE that takes each picture by itself."""
    given = len(work.source)
    if work.vae.facts.is_video is False and made.shape[:1] != (given,):
        raise ModelMismatchError(
            f"The VAE gave {what} of shape {tuple(made.shape)} for {given} {of}.",
            hint=f"The first axis of its result should have one entry for each of the {of}.",
        )


def direct(work: Work) -> Outcome:
    """The whole picture at once, where the VAE computes, with the VAE's own tiles if its host has switched them on."""
    with _undisturbed(work):
        result = _finite(work, work.finish(work.part(work.source, work.vae.device)))
    return Outcome(copy_back(result, work.output_device or work.vae.home), work.vae.own_tiles(work.pixels))


def _finite(work: Work, result: Tensor) -> Tensor:
    """The result itself, once its device has found every element finite: one reduction, no copy.

    Raises:
        NonFiniteError: Some are NaN or Inf; the message counts them.
    """
    broken = not_finite(result)
    if broken is None:
        return result
    what = "latents" if work.direction == "encoding" else "pictures"
    raise NonFiniteError(f"{broken} among the {result.numel():,} elements of the {what}")


def not_finite(tensor: Tensor) -> str | None:
    """How many elements are NaN and Inf, in words; None if all are finite, or if the dtype has neither."""
    if tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
        return None
    values = tensor.detach()
    if values.itemsize == 1:  # of float8, few operations exist
        values = values.float()
    low, high = torch.aminmax(values)  # NaN comes through; isfinite() would hold three more of its size
    if bool(torch.isfinite(low) & torch.isfinite(high)):
        return None
    counts = {"NaN": int(values.isnan().sum()), "Inf": int(values.isinf().sum())}
    return " and ".join(f"{count:,} {name}" for name, count in counts.items() if count)


@contextmanager
def _undisturbed(work: Work, **switches: object) -> Iterator[None]:
    vae = work.vae
    with as_before(*vae.kept), for_inference(vae.vae, **switches):
        yield


def copy_back(tensor: Tensor, device: torch.device) -> Tensor:
    """Take a result to where it is expected."""
    return tensor.to(device)


def tiled(work: Work, tiles: Tiles, *, apart: str | None = None) -> Outcome:
    """Picture by picture, in tiles."""
    with _undisturbed(work, **work.vae.switches_in_tiles):
        raw, facts = _in_tiles(work, tiles, work.vae.device, apart=apart)
        result = _finite(work, work.finish(raw))
    return Outcome(copy_back(result, work.output_device or work.vae.home), facts)


def _in_tiles(
    work: Work, tiles: Tiles, device: torch.device, *, by_vae: bool = True, apart: str | None = None
) -> tuple[Tensor, TileFacts]:
    """What the VAE gives for all parts, one after the other, and how they were cut."""
    parts = work.one_by_one()
    if by_vae:
        asked = tiles_asked_for(work, tiles)
        whole = work.vae_tiles(work.source, tiles.side, asked.overlap_height)
        if whole is not None:
            return whole, replace(asked, norm_statistics="per_tile", norm_reason="the VAE cut its own tiles")
    factor = work.vae.facts.spatial_factor or _measured_factor(work, tiles, device)
    seen: list[TileFacts] = []
    output: Tensor | None = None
    for index, part in enumerate(parts):
        made, facts = _one_in_tiles(part, work, tiles, factor, device, apart)
        if len(parts) == 1:
            return made, facts
        seen.append(facts)
        if output is None:
            output = made.new_empty(made.shape[0] * len(parts), *made.shape[1:])
        place = output[index * made.shape[0] : (index + 1) * made.shape[0]]
        if place.shape != made.shape:
            raise ModelMismatchError(
                f"The VAE gave {tuple(made.shape)} for one picture and {tuple(place.shape)} for another of its size.",
                hint="Leave tiles out of strategies=.",
            )
        place.copy_(made)
    assert output is not None  # there is at least one part
    return output, _of_all(seen)


def _of_all(seen: Sequence[TileFacts]) -> TileFacts:
    """Of several pictures: how they were cut, and the worst of what that cost."""
    worst = next(
        (facts for kind in ("per_tile", "estimated") for facts in seen if facts.norm_statistics == kind),
        seen[0],
    )
    differences = [facts.overlap_difference for facts in seen if facts.overlap_difference is not None]
    return replace(worst, overlap_difference=max(differences, default=None))


def tiles_asked_for(work: Work, tiles: Tiles, *, by_vae: bool = True) -> TileFacts:
    """What is known of tiles before anything is cut, also of the VAE's own."""
    cuts_its_own = by_vae and isinstance(work.vae, ComfyuiVae)
    shared = tiles.side // 4 if tiles.overlap is None else tiles.overlap
    if tiles.overlap is None and cuts_its_own:
        # ComfyUI fills what lies between whole latent elements with NaN.
        shared -= shared % (work.vae.facts.spatial_factor or 1)
    height, width = (min(tiles.side, side) for side in work.pixels)
    return TileFacts(height, width, shared, shared, by="vae" if cuts_its_own else "sigmascope")


def _measured_factor(work: Work, tiles: Tiles, device: torch.device) -> int:
    """Pixels along one latent element, found by putting one tile through the VAE.

    Raises:
        ModelMismatchError: What comes out is not smaller (or larger) by a whole number, the same both ways.
    """
    side = tiles.side if work.direction == "encoding" else max(tiles.side // _USUAL_FACTOR, 1)
    # Shortened to multiples of the usual factor, so that nothing is left over.
    lengths = [min(side, length) for length in work.source.shape[-2:]]
    height, width = (length // _USUAL_FACTOR * _USUAL_FACTOR or length for length in lengths)
    corner = work.source[:1, ..., :height, :width]
    made = work.part(corner, device)
    sides = list(zip(corner.shape[-2:], made.shape[-2:], strict=False)) if made.ndim > 2 else []
    ratios = {
        large / small if small else 0.0 for large, small in (sorted(pair, reverse=True) for pair in sides)
    }
    factor = ratios.pop() if len(ratios) == 1 else 0.0
    if factor < 1 or factor != int(factor):
        raise ModelMismatchError(
            f"The VAE made {tuple(made.shape)} of {tuple(corner.shape)}: "
            "the factor between the two is not a whole number, so they cannot be cut into tiles.",
            hint="Leave tiles out of strategies=.",
        )
    return int(factor)


def _one_in_tiles(
    part: Tensor, work: Work, tiles: Tiles, factor: int, device: torch.device, apart: str | None
) -> tuple[Tensor, TileFacts]:
    """Decode or encode in tiles. If a side is not a multiple of the factor, try each way in which VAEs round it."""
    scale = factor if work.direction == "decoding" else 1
    height, width = part.shape[-2] * scale, part.shape[-1] * scale

    for rounding in _ROUNDINGS:
        try:
            return in_tiles(
                lambda tile: work.part(tile, device),
                part,
                plan(height, width, tiles.side, tiles.overlap, factor, rounding=rounding),
                modules=work.vae.modules,
                apart=apart,
                compared=work.compared,
            )
        except ModelMismatchError:
            if rounding == _ROUNDINGS[-1] or (height % factor == 0 and width % factor == 0):
                raise
    raise AssertionError  # the last one returns or raises


def on_cpu(work: Work, tiles: Tiles | None = None, *, in_float32: bool = False) -> Outcome:
    """With the weights in RAM; the result is copied back to where it is expected.

    Args:
        work: What there is to do.
        tiles: Cut it into these there too.
        in_float32: Widen weights of half precision, and compute in float32. The result is of the VAE's own type
            all the same, unless that cannot hold it.
    """
    vae = work.vae
    own_dtype = vae.latent_dtype
    switches = {
        **({} if tiles is None else vae.switches_in_tiles),
        **(vae.float32_switches if in_float32 else {}),
    }
    with (
        as_before(vae.vae, *vae.modules, also_on_success=True),
        for_inference(vae.vae, **switches),
        torch.autocast("cpu", enabled=False) if in_float32 else nullcontext(),
    ):
        put_in_ram(vae.modules, in_float32=in_float32)
        if tiles is None:
            raw, facts = work.part(work.source, _CPU), vae.own_tiles(work.pixels)
        else:
            apart = "RAM does not hold the whole"  # which is why there are tiles
            raw, facts = _in_tiles(work, tiles, _CPU, by_vae=False, apart=apart)
        result = _finite(work, work.finish(raw))
        del raw
    if in_float32:
        narrow = result.to(own_dtype)
        result = result if not_finite(narrow) else narrow
        del narrow
    return Outcome(copy_back(result, work.output_device or work.vae.home), facts)


@dataclass(frozen=True, slots=True)
class Choices:
    """Which strategies, in which order, and with which tiles.

    Attributes:
        strategies: In order.
        only_what_fits: Whether to pass over what is not expected to fit ("auto").
        tile: Side of a tile in pixels; None: several, one after the other, each half the one before.
        overlap: What neighbours share, in pixels; None is a quarter of a tile.
    """

    strategies: tuple[Strategy, ...]
    only_what_fits: bool = False
    tile: int | None = None
    overlap: int | None = None

    def ladder(self, work: Work) -> list[Tiles]:
        """The tiles to try, largest first."""
        if self.tile is not None:
            return [Tiles(self.tile, self.overlap)]
        step = (work.vae.facts.spatial_factor or _USUAL_FACTOR) * work.vae.halvings
        least = 0 if self.overlap is None else self.overlap * work.vae.halvings + step
        smallest = max(_SMALLEST_LATENT_TILE * step // work.vae.halvings, _multiple(least + step - 1, step))
        half = max(work.pixels) // 2
        sides = [max(_multiple(min(_LARGEST_TILE, half), step), smallest)]
        while sides[-1] > smallest:
            sides.append(max(_multiple(sides[-1] // 2, step), smallest))
        return [Tiles(side, self.overlap) for side in sides]


def _multiple(length: int, factor: int) -> int:
    return length // factor * factor


def checked(
    strategies: str | Iterable[str], tile: object, overlap: object, *, dummy: bool, decodes: bool
) -> Choices:
    """The choices, or why they make no sense.

    Raises:
        ConfigError: A strategy that does not exist, one twice, or none; or a size that is no whole number.
    """
    sizes = _pixels("tile", tile), _pixels("overlap", overlap)
    auto = strategies == "auto"
    if isinstance(strategies, str) and not auto:
        strategies = (strategies,)
    known = STRATEGIES[:-1] if decodes else STRATEGIES
    wanted: list[Any] = list(STRATEGIES[:-1]) if auto else list(strategies)
    if dummy and "dummy" not in wanted:
        wanted.append("dummy")
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted or len(set(wanted)) < len(wanted):
        raise ConfigError(
            f"strategies: {wanted!r} "
            + (f"holds {unknown[0]!r}" if unknown else "is empty or names a strategy twice")
            + ".",
            hint=f"Choose from {', '.join(known)}, each at most once, or give 'auto'.",
        )
    return Choices(tuple(wanted), auto, *sizes)


def _pixels(name: str, size: object) -> int | None:
    """A size as an int, also of NumPy's; None as it is."""
    if size is None:
        return None
    try:
        return operator.index(cast(SupportsIndex, size))
    except TypeError as error:
        raise ConfigError(
            f"{name}: {size!r:.60} is no whole number of pixels.",
            hint=f"Give an int, such as {name}={_LARGEST_TILE if name == 'tile' else _LARGEST_TILE // 4}.",
        ) from error


def check_tiles(choices: Choices, work: Work) -> None:
    """Refuse sizes that cannot work before anything is tried, whichever strategy comes first.

    Raises:
        ConfigError: The hint names sizes that can.
    """
    factor = work.vae.facts.spatial_factor
    uses_tiles = "tiled" in choices.strategies or choices.tile is not None
    if not uses_tiles or factor is None or (choices.tile is None and choices.overlap is None):
        return
    height, width = work.pixels
    for tiles in choices.ladder(work):
        plan(height, width, tiles.side, tiles.overlap, factor)
        _check_halves(tiles, work.vae.halvings, factor)


def _check_halves(tiles: Tiles, halvings: int, factor: int) -> None:
    """ComfyUI goes over a picture with tiles of half the height or half the width too."""
    if halvings == 1:
        return
    half = tiles.side // halvings
    if tiles.side % (halvings * factor):
        raise ConfigError(
            f"tile: ComfyUI halves tiles, and half of {tiles.side} is not a multiple of the VAE's factor {factor}.",
            hint=f"Take a multiple of {halvings * factor}.",
        )
    if tiles.overlap is not None and tiles.overlap >= half:
        raise ConfigError(
            f"overlap: ComfyUI halves tiles, and {tiles.overlap} pixels would cover the whole half of a tile of {tiles.side}.",
            hint=f"Take {half - factor} at most.",
        )
