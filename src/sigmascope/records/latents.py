"""What became of a VAE's encoding or decoding: what went in, every strategy that was tried, what came out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sigmascope.records.facts import TensorFacts
from sigmascope.records.finding import Finding
from sigmascope.records.peak import PeakMemory
from sigmascope.records.strategies import (
    STRATEGIES,
    Direction,
    Outcome,
    Strategy,
    attempt_stage,
    strategy_label,
    strategy_number,
)

__all__ = [
    "RECORD_FACT",
    "STRATEGIES",
    "Basis",
    "Direction",
    "EncodingEvent",
    "EncodingRecord",
    "Layout",
    "Outcome",
    "SampleFacts",
    "Strategy",
    "StrategyAttempt",
    "TileFacts",
    "VaeFacts",
    "attempt_stage",
    "strategy_label",
    "strategy_number",
]

Layout = Literal["BCHW", "BHWC", "BCFHW", "BFCHW", "BFHWC", "CFHW", "FCHW", "FHWC", "CHW", "HWC", "packed"]
"""What each axis is: batch, channels, frames, height, width. Packed is (batch, patches, channels of a patch)."""

Basis = Literal["config", "learned"]

RECORD_FACT = "vae_record"
"""Under which name a stage of a run keeps `EncodingRecord.as_dict()`."""


@dataclass(frozen=True, slots=True)
class TileFacts:
    """The tiles of one attempt, in pixels whichever way the VAE went; `count` is by frame or chunk.

    `by` says who cut them: "sigmascope", or "vae" where the VAE's own tiling did.
    """

    height: int
    width: int
    overlap_height: int
    overlap_width: int
    count: int | None = None
    by: Literal["sigmascope", "vae"] = "sigmascope"


@dataclass(frozen=True, slots=True)
class StrategyAttempt:
    """One strategy that was tried, or passed over.

    Both peaks count the same: bytes beyond what was in use on `device` when the attempt began. Weights that
    the attempt itself moves there belong to them, weights that were there do not.

    Attributes:
        name: Which strategy.
        outcome: "failed" is out of memory or another error; "skipped" was never begun.
        seconds: From its beginning to its end, with what was moved there and back; None if skipped.
        reason: Why it failed or was skipped, in words with numbers.
        error_type: The class of what was raised, such as "OutOfMemoryError".
        device: Where the VAE ran, such as "cuda:0".
        peak: Memory at its highest while it ran; times count from its beginning.
        predicted_peak_bytes: What was expected before it began.
        prediction_basis: From the VAE's config, or learned from past runs.
        measured_peak_bytes: What was seen.
        tile: The tiles, where it was cut into some.
        unavailable: The reason for each figure that is None.
    """

    name: Strategy
    outcome: Outcome
    seconds: float | None = None
    reason: str | None = None
    error_type: str | None = None
    device: str | None = None
    peak: PeakMemory | None = None
    predicted_peak_bytes: int | None = None
    prediction_basis: Basis | None = None
    measured_peak_bytes: int | None = None
    tile: TileFacts | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SampleFacts:
    """Pictures or latents: one tensor, and what its axes are. `form` is what the caller handed over.

    `frames` is None for pictures. Of packed latents, height and width are those after unpacking, in latent
    pixels, and `channels` those of the VAE.
    """

    tensor: TensorFacts
    layout: Layout | None = None
    batch: int | None = None
    frames: int | None = None
    channels: int | None = None
    height: int | None = None
    width: int | None = None
    form: str = "tensor"
    unavailable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VaeFacts:
    """What a VAE's class and config say of the latents that it makes.

    `temporal_factor` is 1 for a VAE of pictures. With `first_frame_apart` (causal video VAEs) f frames give
    (f - 1) // temporal_factor + 1 latent frames. `source` says where the facts are from.
    """

    class_name: str
    latent_channels: int | None = None
    image_channels: int | None = None
    spatial_factor: int | None = None
    temporal_factor: int | None = None
    first_frame_apart: bool = False
    is_video: bool | None = None
    dtype: str | None = None
    device: str | None = None
    nbytes: int | None = None
    source: str = ""
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def latent_frames(self, frames: int) -> int | None:
        """How many latent frames that many frames give; None if the factor is unknown."""
        if self.temporal_factor is None or frames < 1:
            return None
        if self.first_frame_apart:
            return (frames - 1) // self.temporal_factor + 1
        return max(1, frames // self.temporal_factor)


@dataclass(frozen=True, slots=True)
class EncodingRecord:
    """One encoding (or decoding) from first to last. `strategy` is the one that gave `output`.

    `dummy` is true exactly where the output is no encoding but a stand-in of the same shape.
    """

    direction: Direction = "encoding"
    success: bool = False
    strategy: Strategy | None = None
    attempts: tuple[StrategyAttempt, ...] = ()
    seconds: float | None = None
    vae: VaeFacts | None = None
    input: SampleFacts | None = None
    output: SampleFacts | None = None
    dummy: bool = False
    findings: tuple[Finding, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)

    @property
    def strategy_label(self) -> str | None:
        """The seed's name of the strategy that succeeded, such as "Direct VAE Encoding"."""
        return None if self.strategy is None else strategy_label(self.strategy, self.direction)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values: sizes in MiB, seconds. `latents_plain.encoding_record` reads it back whole."""
        from sigmascope.records.latents_plain import as_plain

        return as_plain(self)


@dataclass(frozen=True, slots=True)
class EncodingEvent:
    """What happens while it goes on, for lines in real time.

    "began" has `input`; "attempt_began" has `strategy`; "attempt_ended" has `attempt`; "ended" has `record`.
    """

    kind: Literal["began", "attempt_began", "attempt_ended", "ended"]
    direction: Direction = "encoding"
    input: SampleFacts | None = None
    strategy: Strategy | None = None
    attempt: StrategyAttempt | None = None
    record: EncodingRecord | None = None
