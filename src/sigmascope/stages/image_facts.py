"""The pictures or video that go into a VAE or come out of it, in any form, and their axes.

Known forms: a tensor or array, ComfyUI's images [frames, height, width, colours], a list of PIL images,
arrays or tensors, a list of such lists, and a mapping that holds one of these. Nothing is copied or
converted. `pictures_dict` gives the facts as baselines and analyses hold them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from sigmascope.probes.reading import attempt, node_outputs
from sigmascope.probes.tensors import as_tensor, quick_facts
from sigmascope.records.latents import Layout, SampleFacts, VaeFacts
from sigmascope.records.memory import mib
from sigmascope.records.run import TensorFacts
from sigmascope.stages.schema import PicturesDict, as_dict

NAMES = (
    "frames",
    "video",
    "images",
    "image",
    "control_video",
    "pixel_values",
    "pixels",
    "sample",
    "samples",
    "reference_image",
)
"""What the pictures are called in a mapping or a pipeline's output, best first."""
COLOURS_AND_ALPHA = 4
_COLOURS = (3, 1, COLOURS_AND_ALPHA)
_SMALLEST_SIDE = 4
_COLOURS_LAST: dict[int, Layout] = {3: "HWC", 4: "BHWC", 5: "BFHWC"}
_COLOURS_BEFORE: dict[int, tuple[Layout, ...]] = {
    3: ("CHW",),
    4: ("BCHW", "CFHW"),
    5: ("BCFHW", "BFCHW"),
}
_VALUES = ("min", "max", "nan_count", "inf_count")
_AXES = ("batch_size", "length", "total_frames", "channels", "height", "width")
_NOT_READ = "a list of pictures is not one tensor"


@dataclass(frozen=True, slots=True)
class Pictures:
    """What is known of them. `sizes` has each (height, width) once; `facts` is None with a reason."""

    facts: SampleFacts | None
    sizes: tuple[tuple[int, int], ...] = ()
    reason: str | None = None

    @property
    def length(self) -> int | None:
        """How many pictures there are of one video, or in all."""
        if self.facts is None:
            return None
        return self.facts.batch if self.facts.frames is None else self.facts.frames

    @property
    def total_frames(self) -> int | None:
        """How many pictures there are in the whole batch."""
        if self.facts is None or self.facts.batch is None or self.facts.frames is None:
            return self.length
        return self.facts.batch * self.facts.frames


def read_pictures(data: object, vae: VaeFacts | None = None, statistics: bool | None = None) -> Pictures:
    """Facts about pictures or a video. Never raises."""
    read = attempt(lambda: _read(node_outputs(data), vae, statistics))
    return read.value or Pictures(None, reason=read.reason)


def _read(data: object, vae: VaeFacts | None, statistics: bool | None, form: str = "") -> Pictures:
    if data is None:
        return Pictures(None, reason="no pictures were given")
    tensor = as_tensor(data)
    if tensor is not None:
        kind = "array" if isinstance(data, np.ndarray) else "tensor"
        return _read_tensor(tensor, vae, statistics, form or kind)
    if isinstance(data, list | tuple):
        apart = without_mask(data)
        return _read_list(data, vae, statistics) if apart is data else _read(apart[0], vae, statistics)
    if _is_picture(data):
        return _read_list([data], vae, statistics)
    inner = held_by_name(data, NAMES)
    if inner is None:
        return Pictures(None, reason=f"{type(data).__name__} has no pictures in a known place")
    return _read(inner, vae, statistics, type(data).__name__)


def _read_tensor(tensor: Tensor, vae: VaeFacts | None, statistics: bool | None, form: str) -> Pictures:
    facts = quick_facts(tensor, statistics)
    channels, is_video = (None, False) if vae is None else (vae.image_channels, bool(vae.is_video))
    layout = picture_layout(facts.shape, channels, is_video=is_video)
    if layout is None:
        reason = f"no axis of {facts.shape} can be colours"
        return Pictures(SampleFacts(facts, form=form, unavailable={"layout": reason}))
    sizes = sizes_of(facts.shape, layout)
    sample = SampleFacts(
        facts,
        layout,
        sizes.batch if "B" in layout else 1,
        sizes.frames,
        sizes.channels,
        sizes.height,
        sizes.width,
        form,
    )
    return Pictures(sample, ((sizes.height or 0, sizes.width or 0),))


def _read_list(items: Sequence[object], vae: VaeFacts | None, statistics: bool | None) -> Pictures:
    """A list of pictures, of videos, or of one tensor that is a video."""
    if not items:
        why = dict.fromkeys((*_VALUES, "layout"), "the list is empty")
        empty = TensorFacts((0,), "unknown", "cpu", 0, 0, unavailable=why)
        return Pictures(SampleFacts(empty, frames=0, batch=1, form="empty list"))
    read = [_read_item(item, vae, statistics) for item in items]
    known = [item.facts for item in read if item.facts is not None]
    if len(known) < len(read):
        reasons = (item.reason for item in read if item.facts is None)
        return Pictures(None, reason=next(reasons, None))
    sizes = tuple(dict.fromkeys(size for item in read for size in item.sizes))
    if len(known) == 1 and known[0].tensor.shape[3:]:
        return Pictures(replace(known[0], form=f"list of 1 {known[0].form}"), sizes)
    return Pictures(_together(known, is_nested=isinstance(items[0], list | tuple)), sizes)


def _read_item(item: object, vae: VaeFacts | None, statistics: bool | None) -> Pictures:
    return _read_image(item) if _is_picture(item) else _read(item, vae, statistics)


def _read_image(image: Any) -> Pictures:
    """A PIL image: its mode tells the type; the file behind it is not read for that."""
    width, height = image.size
    colours = len(image.getbands())
    bits = {"F": 32, "I": 32}.get(image.mode, 16 if "16" in image.mode else 8)
    dtype = {"F": "float32", "I": "int32"}.get(image.mode, "uint16" if bits == 16 else "uint8")
    elements = width * height * colours
    facts = TensorFacts(
        (height, width, colours),
        dtype,
        "cpu",
        elements * bits // 8,
        elements,
        unavailable=dict.fromkeys(_VALUES, "the pixels of PIL images are not read"),
    )
    sample = SampleFacts(facts, "HWC", 1, None, colours, height, width, form="PIL images")
    return Pictures(sample, ((height, width),))


def _is_picture(thing: object) -> bool:
    """Whether it is a PIL image, which has bands and a size of two."""
    return callable(getattr(thing, "getbands", None)) and hasattr(thing, "size")


def _together(known: Sequence[SampleFacts], *, is_nested: bool) -> SampleFacts:
    """One sample of many: sizes are the first one's, bytes the sum, values those of all."""
    first, tensors = known[0], [sample.tensor for sample in known]
    per_item = (first.frames if is_nested else first.frames or 1) or 0
    shape = (len(known), *first.tensor.shape)
    facts = TensorFacts(
        shape,
        first.tensor.dtype,
        first.tensor.device,
        sum(tensor.nbytes for tensor in tensors),
        sum(tensor.num_elements for tensor in tensors),
        min=_fold(min, [tensor.min for tensor in tensors]),
        max=_fold(max, [tensor.max for tensor in tensors]),
        nan_count=_fold(sum, [tensor.nan_count for tensor in tensors]),
        inf_count=_fold(sum, [tensor.inf_count for tensor in tensors]),
        unavailable={**first.tensor.unavailable, **dict.fromkeys(("mean", "std"), _NOT_READ)},
    )
    is_batch = is_nested or first.frames is not None
    return SampleFacts(
        facts,
        None,
        len(known) if is_batch else 1,
        per_item if is_batch else len(known),
        first.channels,
        first.height,
        first.width,
        form=first.form if first.form.startswith("PIL") else f"list of {first.form}s",
        unavailable={"layout": "a list has none"},
    )


def _fold(combine: Any, values: Sequence[Any]) -> Any:
    return None if any(value is None for value in values) else combine(values)


def held_by_name(thing: object, names: Sequence[str]) -> Any:
    """What a mapping or a pipeline's output holds under the first of these names that it has."""
    held = (thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None) for name in names)
    return next((value for value in held if value is not None and not callable(value)), None)


def pictures_dict(pictures: Pictures) -> PicturesDict:
    """The pictures' facts as an analysis holds them."""
    facts = pictures.facts
    if facts is None:
        return as_dict(PicturesDict, why=pictures.reason, sizes=[])
    tensor = facts.tensor
    reasons = {**tensor.unavailable, **facts.unavailable}
    return as_dict(
        PicturesDict,
        facts,
        dict.fromkeys(_AXES, reasons.get("layout", "")) | reasons,
        **{name: getattr(tensor, name) for name in ("dtype", "device", *_VALUES)},
        shape=list(tensor.shape),
        size_mb=mib(tensor.nbytes),
        batch_size=facts.batch,
        length=pictures.length,
        total_frames=pictures.total_frames,
        sizes=[list(size) for size in pictures.sizes],
    )


def picture_layout(
    shape: Sequence[int], channels: int | None = None, *, is_video: bool = False
) -> Layout | None:
    """The layout of pictures or videos as pipelines and ComfyUI hand them over; None if no axis can be colours.

    Args:
        shape: Of 3 to 5 axes. The last wins where it and an earlier one could both be colours. A first axis of 1
            is a batch, such as a mask's, and a grey picture's colour only to a VAE that takes such.
        channels: What the VAE takes; otherwise 3, 1 or 4 are colours.
        is_video: Whether the first of 4 axes counts frames and not separate pictures.
    """
    layout = _picture_layout(shape, channels)
    return {"BCHW": "FCHW", "BHWC": "FHWC"}.get(layout or "", layout) if is_video else layout  # type: ignore[return-value]


def _picture_layout(shape: Sequence[int], channels: int | None) -> Layout | None:
    """Colours are on the last axis, wherever that may be; else where the likeliest number of them is."""
    colours = tuple(dict.fromkeys((channels, *_COLOURS) if channels else _COLOURS))
    if shape[-1:] and shape[-1] in colours and min(shape[-3:-1], default=0) > _SMALLEST_SIDE:
        return _COLOURS_LAST.get(len(shape))
    layouts = _COLOURS_BEFORE.get(len(shape), ())
    fitting = (layout for count in colours for layout in layouts if shape[layout.index("C")] == count)
    return next((layout for layout in fitting if layout[0] != "C" or shape[0] != 1 or channels == 1), None)


def without_mask(items: Sequence[object]) -> Sequence[object]:
    """The pictures of a list: ComfyUI's LoadImage gives (batch, height, width, colours) and a mask without colours.

    The mask may come first.
    """
    if len(items) != 2:
        return items
    shapes = [tuple(getattr(item, "shape", ())) for item in items]
    mask, picture = sorted(shapes, key=len)
    beside = len(picture) == 4 and len(mask) == 3 and picture[0] == mask[0]
    if not beside or picture_layout(picture) != "BHWC":
        return items
    place = shapes.index(picture)
    return items[place : place + 1]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a tensor by what its axes are; None for an axis that it lacks."""

    batch: int | None = None
    frames: int | None = None
    channels: int | None = None
    height: int | None = None
    width: int | None = None


def sizes_of(shape: Sequence[int], layout: Layout) -> Sizes:
    """The sizes of a shape in a layout that names every axis of it.

    Raises:
        ValueError: The layout has another number of axes.
    """
    by_letter = dict(zip(layout, shape, strict=True))
    return Sizes(*(by_letter.get(letter) for letter in "BFCHW"))


@dataclass(frozen=True, slots=True)
class Video:
    """Frames, height and width of the pictures, in pixels; None where it is unknown or makes no sense."""

    length: int | None = None
    height: int | None = None
    width: int | None = None

    def or_else(self, other: "Video") -> "Video":
        """This video, with unknown sizes taken from another."""
        return Video(
            other.length if self.length is None else self.length,
            other.height if self.height is None else self.height,
            other.width if self.width is None else self.width,
        )


def video_of(length: object, height: object, width: object) -> Video:
    """The dimensions that a caller names; a value that makes no sense is unknown."""
    return Video(whole(length, least=0), whole(height), whole(width))


def whole(number: object, least: int = 1) -> int | None:
    """A whole number of any type, `least` or more; None for anything else."""
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        return None
    return int(number) if number == int(number) and number >= least else None
