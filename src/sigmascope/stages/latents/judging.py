"""Read a latent: which axes it has, unpacked where it is packed."""

from dataclasses import dataclass

from torch import Tensor

from sigmascope.records.facts import TensorFacts
from sigmascope.records.latents import Layout, SampleFacts, VaeFacts
from sigmascope.stages.latents.expected import Video, expected_latent
from sigmascope.stages.latents.layouts import Axes, Sizes, latent_layout, sizes_of
from sigmascope.stages.latents.packed import Unpacked, unpacked
from sigmascope.stages.latents.values import quick_facts


@dataclass(frozen=True, slots=True)
class Judged:
    """A latent's tensor facts with the axes that they were read by."""

    tensor: TensorFacts
    axes: Axes | None
    sizes: Sizes
    unpacked: Unpacked | None = None

    def sample(self, form: str) -> SampleFacts:
        """The same as a record keeps it."""
        sizes = self.sizes
        layout = None if self.axes is None else self.axes.layout
        return SampleFacts(
            self.tensor, layout, sizes.batch, sizes.frames, sizes.channels, sizes.height, sizes.width, form
        )


def judge(
    latent: Tensor, vae: VaeFacts | None, video: Video, layout: Layout | None, statistics: bool | None
) -> Judged:
    """Read a latent: which axes it has, unpacked where it is packed.

    Args:
        latent: Of any rank.
        vae: What made it.
        video: What it was made of.
        layout: What the caller says of its axes.
        statistics: Whether to read values, as in `probes.tensor_facts`.
    """
    facts = quick_facts(latent, statistics)
    if layout in (None, "packed"):
        whole = unpacked(facts.shape, vae, video.length, video.height, video.width)
        if whole is not None:
            sizes = Sizes(whole.batch, whole.frames, whole.channels, whole.height, whole.width)
            words = f"{facts.shape[1]} tokens of {whole.patch}x{whole.patch} latent pixels"
            return Judged(facts, Axes("packed", words), sizes, whole)
    channels = None if vae is None else vae.latent_channels
    axes = latent_layout(facts.shape, channels, expected_latent(vae, video).frames, layout)
    return Judged(facts, axes, Sizes() if axes is None else sizes_of(facts.shape, axes.layout))
