"""The size of a video, and of the latent that a VAE makes of it."""

from dataclasses import dataclass

from sigmascope.records.latents import VaeFacts


@dataclass(frozen=True, slots=True)
class Video:
    """Frames, height and width of the pictures, in pixels; None where it is unknown or makes no sense."""

    length: int | None = None
    height: int | None = None
    width: int | None = None

    def or_else(self, other: "Video") -> "Video":
        """The same with what is unknown taken from another."""
        return Video(
            other.length if self.length is None else self.length,
            other.height if self.height is None else self.height,
            other.width if self.width is None else self.width,
        )


def video_of(length: object, height: object, width: object) -> Video:
    """The dimensions that a caller names, without those that are none."""
    return Video(_size(length, least=0), _size(height), _size(width))


def _size(size: object, least: int = 1) -> int | None:
    if (
        isinstance(size, bool)
        or not isinstance(size, int | float)
        or size != size
        or abs(size) == float("inf")
    ):
        return None
    return int(size) if size == int(size) and size >= least else None


@dataclass(frozen=True, slots=True)
class ExpectedLatent:
    """What a VAE should give for a video. `frames` is None for pictures, all else where it is unknown."""

    channels: int | None
    frames: int | None
    height: int | None
    width: int | None

    @property
    def shape(self) -> list[int] | None:
        """[channels, frames, height, width] without the frames of pictures; None unless all is known."""
        if self.channels is None or self.height is None or self.width is None:
            return None
        return [self.channels, *([] if self.frames is None else [self.frames]), self.height, self.width]


def expected_latent(vae: VaeFacts | None, video: Video) -> ExpectedLatent:
    """From the VAE's channels and factors; a side that the factor does not divide is cut off."""
    if vae is None:
        return ExpectedLatent(None, None, None, None)
    factor = vae.spatial_factor
    frames = vae.latent_frames(video.length) if vae.is_video and video.length is not None else None
    return ExpectedLatent(
        vae.latent_channels, frames, _divided(video.height, factor), _divided(video.width, factor)
    )


def _divided(side: int | None, factor: int | None) -> int | None:
    return None if side is None or factor is None else side // factor
