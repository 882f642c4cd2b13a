"""One interface to every VAE: diffusers', ComfyUI's, or any object with `encode` and `decode`.

`adapted` chooses the adapter. `ModuleVae` is for diffusers' VAEs, and for any other object that takes pictures in
[-1, 1]. `ComfyuiVae` is for ComfyUI's `VAE` object, which moves its own weights, and which would silently go on in
tiles when memory runs out. `encoded` and `decoded` read what a VAE gives: tensors, distributions, and what
libraries wrap them in.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from sigmascope.errors import ConfigError, ModelMismatchError
from sigmascope.pipeline.image_preprocessing import Values, rescaled
from sigmascope.pipeline.model_state import execution_device, has_diffusers_hooks, modules_in, tensors_of
from sigmascope.records.latents import NEEDS_TILES, TileFacts, VaeFacts
from sigmascope.stages.latent_facts import inner_vae, is_comfyui_vae, vae_facts

_PICTURE_VAES_WITH_FRAMES = ("AutoencoderKLQwenImage", "AutoencoderKLQwenImage21")
"""VAEs that have an axis for frames but make pictures: several pictures are a batch, not a video."""
_WITH_FRAME_COUNT = ("AutoencoderKLTemporalDecoder",)
"""Decoders that mix the pictures of a batch, and must be told how many belong together."""
_ENCODED = ("latent_dist", "latents", "latent", "sample", "samples")
_RESULT_NAMES = ("sample", "samples", "images", "frames")
"""Names under which `encode` and `decode` may give their result; the first that is there counts."""
_FALLBACKS = (
    "encode_tiled_",
    "encode_tiled_1d",
    "encode_tiled_3d",
    "decode_tiled_",
    "decode_tiled_1d",
    "decode_tiled_3d",
)
"""What ComfyUI's `encode` and `decode` call when memory ran out; its nodes for tiles call `encode_tiled` and
`decode_tiled`, which are none of these."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A latent, or the parameters of the distribution that it is drawn from."""

    tensor: Tensor
    posterior: type[Any] | None = None

    def latent(self, *, sample: bool, generator: torch.Generator | None) -> Tensor:
        """The distribution's mode, or a draw from it; the latent itself where there is no distribution."""
        if self.posterior is None:
            return self.tensor
        distribution = self.posterior(self.tensor)
        drawn: Tensor = distribution.sample(generator=generator) if sample else distribution.mode()
        return drawn


class ModuleVae:
    """One VAE, whatever its class.

    Attributes:
        values: In which range its pictures are.
        default_values: What the numbers of a floating-point picture mean, whatever its layout; None: the layout decides.
        modules: Its weights.
        kept: What is put back as it was when an attempt fails.
        switches_in_tiles: Attributes to set on it while it works on one of our tiles, so that it cuts none of its own.
            What is put through it whole it cuts as its host has set it.
        float32_switches: Attributes to set on it, beside its weights, for it to compute in float32.
        one_each: Whether several pictures are as many pictures, though it has an axis for frames.
        halvings: How far tiles are cut smaller than asked for: 1, not at all.
        decodes_batch_together: Whether pictures of a batch cannot be decoded one by one.
    """

    values: Values = "signed"
    default_values: Values | None = None
    halvings = 1

    def __init__(self, vae: Any, facts: VaeFacts) -> None:
        self.vae = vae
        self.facts = facts
        self.modules = modules_in(vae)
        self.kept: tuple[object, ...] = (vae, *(module for module in self.modules if module is not vae))
        cuts = isinstance(getattr(vae, "use_tiling", None), bool) and type(vae).__name__ not in NEEDS_TILES
        self.switches_in_tiles: dict[str, object] = {"use_tiling": False} if cuts else {}
        self.float32_switches: dict[str, object] = {}
        self.one_each = type(vae).__name__ in _PICTURE_VAES_WITH_FRAMES
        self.decodes_batch_together = _takes_frame_count(vae)

    def own_tiles(self, pixels: tuple[int, int]) -> TileFacts | None:
        """The tiles that it cuts a picture of this height and width into, as its host has set it.

        None: it is put through whole, or is one that computes rightly in its tiles alone, or does not say how it cuts.
        """
        if not self.switches_in_tiles or not self.vae.use_tiling:
            return None
        sides = [_tile_side(self.vae, side) for side in ("height", "width")]
        if None in sides:
            return None
        (height, in_common), (width, beside) = (side for side in sides if side is not None)
        if pixels[0] <= height and pixels[1] <= width:
            return None
        return TileFacts(min(height, pixels[0]), min(width, pixels[1]), in_common, beside, by="vae")

    @property
    def device(self) -> torch.device:
        """Where it computes: where a hook of accelerate's will move it, or where its weights are."""
        place = execution_device(self.modules)
        if place is None:
            first = next(tensors_of(self.modules), None)
            place = getattr(self.vae, "device", None) if first is None else first.device
        return torch.device("cpu") if place is None else torch.device(place)

    @property
    def home(self) -> torch.device:
        """Where its results are."""
        return self.device

    @property
    def dtype(self) -> torch.dtype | None:
        """Of its weights, or what diffusers' hooks cast them to; None if it has none and does not tell."""
        told = getattr(self.vae, "dtype", None)
        if isinstance(told, torch.dtype) and has_diffusers_hooks(self.modules):
            return told
        floating = (tensor.dtype for tensor in tensors_of(self.modules) if tensor.is_floating_point())
        dtype = next(floating, told)
        return dtype if isinstance(dtype, torch.dtype) else None

    @property
    def latent_dtype(self) -> torch.dtype:
        """That of its weights; float32 without any."""
        return self.dtype or torch.float32

    def encode(self, pixels: Tensor, values: Values, device: torch.device) -> Encoded:
        """Encode a part of the pictures on `device`, where the weights are by now."""
        self._require("encode")
        pixels = rescaled(pixels.to(device), values, self.values)
        return encoded(self.vae.encode(pixels.to(self.dtype or pixels.dtype)))

    def decode(self, latents: Tensor, device: torch.device, frames: int | None = None) -> Tensor:
        """Decode a part of the latents on `device`.

        Args:
            latents: As `encode` made them.
            device: Where the weights are by now.
            frames: How many of the batch are one video, where they are.
        """
        self._require("decode")
        counted = {"num_frames": frames or 1} if self.decodes_batch_together else {}
        return decoded(self.vae.decode(latents.to(device, self.dtype or latents.dtype), **counted))

    def _require(self, method: str) -> None:
        if not callable(getattr(self.vae, method, None)):
            raise ConfigError(
                f"vae: {type(self.vae).__name__} has no {method}().",
                hint="Give a VAE of diffusers or ComfyUI, or any object with that method.",
            )


def _tile_side(vae: object, side: Literal["height", "width"]) -> tuple[int, int] | None:
    """How long a tile of diffusers' is in pixels, and how much of it its neighbour has too; None: the VAE does not say."""
    length = getattr(vae, f"tile_sample_min_{side}", getattr(vae, "tile_sample_min_size", None))
    if not isinstance(length, int):
        return None
    if isinstance(stride := getattr(vae, f"tile_sample_stride_{side}", None), int):
        return length, length - stride
    share = getattr(vae, f"tile_overlap_factor_{side}", getattr(vae, "tile_overlap_factor", None))
    return (length, int(length * share)) if isinstance(share, float) else None


def _takes_frame_count(vae: object) -> bool:
    """By class first: diffusers wraps `decode`, and the wrapper hides its parameters."""
    if type(vae).__name__ in _WITH_FRAME_COUNT:
        return True
    decode = getattr(vae, "decode", None)
    if decode is None or isinstance(decode, nn.Module):
        return False
    try:
        parameter = inspect.signature(decode).parameters.get("num_frames")
    except (TypeError, ValueError):  # compiled or built in: it has no signature
        return False
    return parameter is not None and parameter.default is inspect.Parameter.empty


def encoded(output: object) -> Encoded:
    """Read what `encode` gave: diffusers' outputs, tuples of them, mappings, or a bare tensor.

    Raises:
        ModelMismatchError: There is no tensor in it.
    """
    encoding = _unwrapped(output, _ENCODED)
    if isinstance(encoding, Tensor):
        return Encoded(encoding)
    parameters = getattr(encoding, "parameters", None)
    if isinstance(parameters, Tensor) and hasattr(encoding, "mode"):
        return Encoded(parameters, type(encoding))
    mode = _mode_of(encoding)
    if isinstance(mode, Tensor):
        return Encoded(mode)
    raise _no_tensor("encode", output)


def _unwrapped(output: object, names: tuple[str, ...]) -> Any:
    for _ in range(3):  # a tuple that holds a mapping that holds the tensor is as deep as it gets
        if isinstance(output, Tensor):
            return output
        inner = _inner(output, names)
        if inner is None:
            return output
        output = inner
    return output


def _inner(output: object, names: tuple[str, ...]) -> object:
    if isinstance(output, Mapping):  # diffusers' outputs are mappings too
        return next((output[name] for name in names if name in output), None)
    if isinstance(output, tuple | list):
        return output[0] if output else None
    candidates = (getattr(output, name, None) for name in names)
    return next((value for value in candidates if value is not None and not callable(value)), None)


def _mode_of(distribution: Any) -> object:
    """A method in diffusers, a property in `torch.distributions`, where some have none."""
    try:
        mode = distribution.mode
    except (AttributeError, NotImplementedError):
        return None
    return mode() if callable(mode) else mode


def _no_tensor(method: str, output: object) -> ModelMismatchError:
    return ModelMismatchError(
        f"The VAE's {method} gave a {type(output).__name__} that holds no tensor.",
        hint=f"Its {method} should give a tensor, or what diffusers' {method} gives.",
    )


def decoded(output: object) -> Tensor:
    """The pictures in what `decode` gave.

    Raises:
        ModelMismatchError: There is no tensor in it.
    """
    decoding = _unwrapped(output, _RESULT_NAMES)
    if isinstance(decoding, Tensor):
        return decoding
    raise _no_tensor("decode", output)


class ComfyuiVae:
    """ComfyUI's VAE. Pictures go in and come out with channels last, in [0, 1]. Attributes as of `ModuleVae`."""

    values: Values = "unit"
    default_values: Values | None = "unit"
    decodes_batch_together = False

    def __init__(self, vae: Any, facts: VaeFacts) -> None:
        if vae.first_stage_model is None:
            raise ConfigError(
                "vae: ComfyUI loaded no VAE into this object.",
                hint="Take a checkpoint that has one, or load a VAE by itself.",
            )
        self.vae = vae
        self.facts = facts
        self.modules: list[nn.Module] = [vae.first_stage_model]
        self.kept: tuple[object, ...] = (vae,)  # its weights are ComfyUI's own to move
        self.halvings = 1 if getattr(vae, "latent_dim", 2) == 3 else 2
        self.one_each = bool(getattr(vae, "not_video", False))
        self.switches_in_tiles: dict[str, object] = {}
        self.float32_switches: dict[str, object] = {"vae_dtype": torch.float32}

    def own_tiles(self, _pixels: tuple[int, int]) -> None:
        """None: it cuts tiles only when asked to."""

    @property
    def device(self) -> torch.device:
        """Where ComfyUI loads it to compute."""
        return torch.device(self.vae.device)

    @property
    def home(self) -> torch.device:
        """Where ComfyUI keeps what is between two nodes."""
        return torch.device(getattr(self.vae, "output_device", "cpu"))

    @property
    def dtype(self) -> torch.dtype | None:
        """Of its weights."""
        dtype: torch.dtype = self.vae.vae_dtype
        return dtype

    @property
    def latent_dtype(self) -> torch.dtype:
        """What ComfyUI keeps between two nodes: float32 in versions that do not tell."""
        dtype: torch.dtype = getattr(self.vae, "vae_output_dtype", lambda: torch.float32)()
        return dtype

    def encode(self, pixels: Tensor, values: Values, device: torch.device) -> Encoded:
        """Encode without tiles: by ComfyUI on its own device, by hand on any other."""
        encode = self.vae.encode if device == self.device else self._encode_by_hand
        with _no_silent_fallback(self.vae):
            return Encoded(_for_anybody(lambda: self._each(encode, pixels, values)))

    def encode_tiled(self, pixels: Tensor, values: Values, tile: int, overlap: int) -> Encoded:
        """Encode in ComfyUI's own tiles, of pixels."""
        encode = partial(self.vae.encode_tiled, tile_x=tile, tile_y=tile, overlap=overlap)
        return Encoded(_for_anybody(lambda: self._each(encode, pixels, values)))

    def decode(self, latents: Tensor, device: torch.device, frames: int | None = None) -> Tensor:
        """Decode without tiles: by ComfyUI on its own device, by hand on any other."""
        decode = self.vae.decode if device == self.device else self._decode_by_hand
        with _no_silent_fallback(self.vae):
            return _for_anybody(lambda: decode(latents))

    def decode_tiled(self, latents: Tensor, tile: int, overlap: int) -> Tensor:
        """Decode in ComfyUI's own tiles, whose sizes are given in pixels of the picture."""
        factor = self.facts.spatial_factor or 1
        side, shared = tile // factor, overlap // factor
        return _for_anybody(lambda: self.vae.decode_tiled(latents, tile_x=side, tile_y=side, overlap=shared))

    def _each(self, encode: Callable[[Tensor], Tensor], pixels: Tensor, values: Values) -> Tensor:
        """Encode what its nodes hand over: all pictures, or the frames of one video after the other."""
        pixels = rescaled(pixels, values, self.values).movedim(1, -1)
        return torch.cat([encode(given) for given in ([pixels] if pixels.ndim == 4 else pixels)])

    def _encode_by_hand(self, pixels: Tensor) -> Tensor:
        """What `VAE.encode` computes, on the CPU, past ComfyUI's placement of weights."""
        vae = self.vae
        if hasattr(vae, "vae_encode_crop_pixels"):
            pixels = vae.vae_encode_crop_pixels(pixels)
        pixels = pixels.movedim(-1, 1)
        if getattr(vae, "latent_dim", 2) == 3:
            single = getattr(vae, "not_video", False)
            pixels = pixels.unsqueeze(2) if single else pixels.movedim(1, 0).unsqueeze(0)
        prepared = vae.process_input(pixels).to("cpu", vae.vae_dtype)
        latents: Tensor = vae.first_stage_model.encode(prepared)
        return latents.to(self.latent_dtype)

    def _decode_by_hand(self, latents: Tensor) -> Tensor:
        vae = self.vae
        pixels = vae.first_stage_model.decode(latents.to("cpu", vae.vae_dtype)).to(self.latent_dtype)
        processed: Tensor = vae.process_output(pixels)
        return processed.movedim(1, -1)


@contextmanager
def _no_silent_fallback(vae: Any) -> Iterator[None]:
    """Make running out of memory an error again, so that it can be reported and counted."""
    own = vars(vae)
    before = {name: own[name] for name in _FALLBACKS if name in own}
    own.update({name: _out_of_memory for name in _FALLBACKS if hasattr(vae, name)})
    try:
        yield
    finally:
        for name in _FALLBACKS:
            own.pop(name, None)
        own.update(before)


def _out_of_memory(*_: object, **__: object) -> NoReturn:
    raise torch.OutOfMemoryError("ComfyUI ran out of memory without tiles, and was about to go on in tiles.")


def _for_anybody(compute: Callable[[], Tensor]) -> Tensor:
    """Compute in inference mode, which ComfyUI's tiles need; the result works outside of it too."""
    if torch.is_inference_mode_enabled():
        return compute()
    with torch.inference_mode():
        result = compute()
    return result.clone()


Vae = ModuleVae | ComfyuiVae


def adapted(vae: object) -> Vae:
    """The adapter for a VAE, a pipeline that has one, or any object with `encode` or `decode`.

    Raises:
        ConfigError: ComfyUI's VAE object without a VAE in it.
    """
    inner = inner_vae(vae)
    facts = vae_facts(inner)
    return ComfyuiVae(inner, facts) if is_comfyui_vae(inner) else ModuleVae(inner, facts)
