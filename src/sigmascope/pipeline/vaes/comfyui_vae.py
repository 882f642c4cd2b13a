"""ComfyUI's `VAE` object: it moves its own weights, and where memory runs out it would go on in tiles silently."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from sigmascope.errors import ConfigError
from sigmascope.pipeline.vaes.outputs import Encoded
from sigmascope.pipeline.vaes.values import Values, rescaled
from sigmascope.records.latents import VaeFacts

_FALLBACKS = (
    "encode_tiled_",
    "encode_tiled_1d",
    "encode_tiled_3d",
    "decode_tiled_",
    "decode_tiled_1d",
    "decode_tiled_3d",
)
"""What `encode` and `decode` call when memory ran out; the nodes for tiles call `encode_tiled`, `decode_tiled`."""


def is_comfyui(vae: object) -> bool:
    """Whether it is ComfyUI's VAE, told by what it holds."""
    return hasattr(vae, "first_stage_model") and hasattr(vae, "downscale_ratio")


class ComfyuiVae:
    """ComfyUI's VAE. Pictures go in and come out with channels last, in [0, 1]. Attributes as of `ModuleVae`.

    Args:
        vae: As a loader node gives it.
        facts: What is known of it.
    """

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
        self.switches: dict[str, object] = {}

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
        return torch.cat([encode(one) for one in self._nodes_pictures(pixels, values)])

    def _nodes_pictures(self, pixels: Tensor, values: Values) -> list[Tensor]:
        """What its nodes hand over: all pictures, or the frames of one video after the other."""
        pixels = rescaled(pixels, values, self.values)
        if pixels.ndim == 4:
            return [pixels.movedim(1, -1)]
        return [video.movedim(0, -1) for video in pixels]

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
        return self._as_output(vae.first_stage_model.encode(prepared))

    def _decode_by_hand(self, latents: Tensor) -> Tensor:
        vae = self.vae
        pixels = self._as_output(vae.first_stage_model.decode(latents.to("cpu", vae.vae_dtype)))
        processed: Tensor = vae.process_output(pixels)
        return processed.movedim(1, -1)

    def _as_output(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.latent_dtype)


def _for_anybody(compute: Callable[[], Tensor]) -> Tensor:
    """Compute in inference mode, which ComfyUI's tiles cannot do without; the result works outside of it too."""
    if torch.is_inference_mode_enabled():
        return compute()
    with torch.inference_mode():
        result = compute()
    return result.clone()


@contextmanager
def _no_silent_fallback(vae: Any) -> Iterator[None]:
    """Make running out of memory an error again, so that it can be told and counted."""
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
