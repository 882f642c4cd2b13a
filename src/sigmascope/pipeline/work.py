"""One encoding or decoding, cut into what every strategy needs: parts, and how to finish what came of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sigmascope.pipeline.vaes.adapter import Vae
from sigmascope.pipeline.vaes.comfyui_vae import ComfyuiVae
from sigmascope.pipeline.vaes.outputs import Encoded, check_can_sample, check_count
from sigmascope.pipeline.vaes.pictures import Pictures, folded, unfolded
from sigmascope.records.strategies import Direction


@dataclass(slots=True)
class Encoding:
    """Pictures to latents.

    Attributes:
        vae: The VAE's adapter.
        pictures: What goes in.
        sample: Whether to draw from the distribution.
        generator: Of that draw.
        output_device: Where the result shall be; None: where the VAE leaves it.
        source: What goes in: batch first, height and width last.
    """

    vae: Vae
    pictures: Pictures
    sample: bool = False
    generator: torch.Generator | None = None
    output_device: torch.device | None = None
    direction: Direction = "encoding"
    source: Tensor = field(init=False)
    _last: Encoded | None = field(default=None, init=False)

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

    def finish(self, raw: Tensor) -> Tensor:
        """Draw from the distribution, or take its mode; frames get an axis of their own again."""
        posterior = None if self._last is None else self._last.posterior
        self._last = None
        latent = Encoded(raw, posterior).latent(sample=self.sample, generator=self.generator)
        if self.vae.facts.is_video is False:
            check_count(latent, self.source, "latents", "pictures")
        return unfolded(latent, self.pictures.frames)

    def _note(self, encoded: Encoded) -> Tensor:
        if self.sample:
            check_can_sample(encoded)
        self._last = Encoded(encoded.tensor.new_empty(0), encoded.posterior)
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

    def finish(self, raw: Tensor) -> Tensor:
        """Frames get an axis of their own again."""
        if self.vae.facts.is_video is False:
            check_count(raw, self.source, "pictures", "latents")
        return raw if isinstance(self.vae, ComfyuiVae) else unfolded(raw, self._frames)


Work = Encoding | Decoding
"""What there is to do, by whichever strategy."""
