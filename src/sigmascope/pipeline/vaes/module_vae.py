"""diffusers' VAEs, and any other object with `encode` and `decode` that takes pictures in [-1, 1]."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from sigmascope.errors import ConfigError
from sigmascope.pipeline.restore import modules_in, tensors_of
from sigmascope.pipeline.vaes.hooks import execution_device, has_diffusers_hooks
from sigmascope.pipeline.vaes.outputs import Encoded, decoded, encoded
from sigmascope.pipeline.vaes.values import Values, rescaled
from sigmascope.records.latents import VaeFacts

_WITH_FRAME_COUNT = ("AutoencoderKLTemporalDecoder",)
"""Decoders that mix the pictures of a batch, and must be told how many belong together."""
_TILES_ONLY = ("AutoencoderKLAllegro",)
"""They cannot do without their own tiles."""
_OF_PICTURES = ("AutoencoderKLQwenImage", "AutoencoderKLQwenImage21")
"""They have an axis for frames and make pictures: several are a batch, and no video."""


class ModuleVae:
    """One VAE, whatever its class.

    Args:
        vae: With `encode`, `decode` or both.
        facts: What is known of it.

    Attributes:
        values: In which range its pictures are.
        default_values: What the numbers of a floating-point picture mean, whatever its layout; None: that decides.
        modules: Its weights.
        kept: What is put back as it was when an attempt fails.
        switches: Attributes to set on it while it works, so that it cuts no tiles of its own.
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
        self.switches: dict[str, object] = _switches(vae)
        self.one_each = type(vae).__name__ in _OF_PICTURES
        self.decodes_batch_together = _takes_frame_count(vae)

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
        floating = (one.dtype for one in tensors_of(self.modules) if one.is_floating_point())
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
        latents = latents.to(device, self.dtype or latents.dtype)
        if self.decodes_batch_together:
            return decoded(self.vae.decode(latents, num_frames=frames or 1))
        return decoded(self.vae.decode(latents))

    def _require(self, method: str) -> None:
        if not callable(getattr(self.vae, method, None)):
            raise ConfigError(
                f"vae: {type(self.vae).__name__} has no {method}().",
                hint="Give a VAE of diffusers or ComfyUI, or any object with that method.",
            )


def _switches(vae: object) -> dict[str, object]:
    """What keeps it from cutting tiles of its own."""
    has_tiles = isinstance(getattr(vae, "use_tiling", None), bool) and type(vae).__name__ not in _TILES_ONLY
    return {"use_tiling": False} if has_tiles else {}


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
