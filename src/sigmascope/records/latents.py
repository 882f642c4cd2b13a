"""A VAE's encoding or decoding: its input, every strategy that was tried, and its output.

There are four strategies, tried in the order of `STRATEGIES`. `encode_latents` and `decode_latents` leave an
`EncodingRecord` on their stage; where a caller's own engine was watched, `attempts_in` reads what was tried off
the stages inside it. Findings tell what a record shows: a stand-in, a failure, a fallback, a wrong prediction.

A record becomes plain JSON values and comes back, losing nothing. Sizes are in MiB at this border: a whole
number of bytes over 2²⁰ is exact in a float, so that bytes come back as they were.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Final, Literal

from sigmascope.records.memory import MIB, PeakMemory, mib
from sigmascope.records.run import Finding, Stage, TensorFacts
from sigmascope.records.serialization import from_plain
from sigmascope.units import rough_percent

Layout = Literal["BCHW", "BHWC", "BCFHW", "BFCHW", "BFHWC", "CFHW", "FCHW", "FHWC", "CHW", "HWC", "packed"]
"""What each axis is: batch, channels, frames, height, width. Packed is (batch, patches, channels of a patch)."""

Basis = Literal["config", "learned"]
RECORD_FACT = "vae_record"
"""Under which name a stage of a run keeps `EncodingRecord.as_dict()`."""

Strategy = Literal["direct", "tiled", "cpu", "dummy"]
Outcome = Literal["succeeded", "failed", "skipped"]
Direction = Literal["encoding", "decoding"]
NormStatistics = Literal["whole", "estimated", "per_tile"]
STRATEGIES: tuple[Strategy, ...] = ("direct", "tiled", "cpu", "dummy")
"""In the order in which they are tried."""

_LABELS: Mapping[Direction, Mapping[Strategy, str]] = {
    "encoding": {
        "direct": "Direct VAE Encoding",
        "tiled": "Tiled VAE Encoding",
        "cpu": "CPU Fallback Encoding",
        "dummy": "Emergency Dummy Latents",
    },
    "decoding": {
        "direct": "Direct VAE Decoding",
        "tiled": "Tiled VAE Decoding",
        "cpu": "CPU Fallback Decoding",
        "dummy": "Emergency Dummy Frames",
    },
}

# How `as_plain` renames what holds bytes.
_BYTES = {"nbytes": "size_mb"}
_ENDING, _MB_ENDING = "_bytes", "_mb"

VAE_STAGES: dict[Direction, str] = {"encoding": "latent_encoding", "decoding": "latent_decoding"}
"""The stage of a workflow that each direction belongs to."""

# For the findings.
_STAND_IN: dict[Direction, str] = {
    "encoding": "The latents are a placeholder, not an encoding: only shape, dtype and device match.",
    "decoding": "The pictures are a placeholder, not a decoding: only shape, dtype and device match.",
}
_NOT_FINITE = "NonFiniteError"
"""The `error_type` of an attempt whose result held NaN or Inf."""
_TILES_DIFFER, _TILES_DIFFER_MUCH = 0.01, 0.1
"""Relative L2 of neighbouring tiles where they overlap, from which on it is told."""
_OFF_BY = 2.0
_WORTH_TELLING_MB = 512.0
"""Below this, what a library loads when it is first used is as much."""


NEEDS_TILES: Final = ("AutoencoderKLAllegro", "AutoencoderKLMiniMaxH3")
"""VAEs that compute rightly in their own tiles alone: Allegro's raises without, and MiniMax-H3's, which diffusers ships
with tiling on, was trained on tiles of 256 pixels, by whose size its decoder measures positions."""


@dataclass(frozen=True, slots=True)
class TileFacts:
    """The tiles of one attempt, in pixels whichever way the VAE went; `count` is by frame or chunk.

    The overlaps are the smallest real ones, which may be larger than asked for; 0 where one tile is as high or wide as
    the picture. For a VAE's own tiles they are those asked for.

    Attributes:
        by: Who cut them: "sigmascope", or "vae" where the VAE's own tiling did.
        norm_statistics: What the VAE's group norms saw: the "whole" picture, a copy of it as small as a tile
            ("estimated"), or each tile by itself ("per_tile"); None of a single tile, and where nothing was computed.
        norm_reason: Why group norms did not see the whole picture; or, if they did, why attention did not.
        overlap_difference: Relative L2 difference of neighbours in their overlap, before blending; or of features under
            estimated statistics from those under the tiles' own, if that is larger. None if it was not measured. It
            only hints at the error of tiling, which may be larger or smaller.
    """

    height: int
    width: int
    overlap_height: int
    overlap_width: int
    count: int | None = None
    by: Literal["sigmascope", "vae"] = "sigmascope"
    norm_statistics: NormStatistics | None = None
    norm_reason: str | None = None
    overlap_difference: float | None = None


@dataclass(frozen=True, slots=True)
class StrategyAttempt:
    """One strategy that was tried, or passed over.

    Both peaks are bytes beyond what was in use on `device` when the attempt began. They include weights that the
    attempt itself moves there, but not weights that were there already.

    Attributes:
        name: Which strategy.
        outcome: "failed" is out of memory, a result with NaN or Inf, or another error; "skipped" was never begun.
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

    `dummy` is true exactly if the output is a placeholder of the same shape.
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
        """The name of the strategy that succeeded, such as "Direct VAE Encoding"."""
        return None if self.strategy is None else strategy_label(self.strategy, self.direction)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values: sizes in MiB, seconds. `encoding_record` reads it back whole."""
        return as_plain(self)


@dataclass(frozen=True, slots=True)
class EncodingEvent:
    """What happens while it goes on, for lines in real time.

    "began" has `input`; "attempt_began" has `strategy`, and `tile` if it cuts tiles; "attempt_ended" has `attempt`; "ended" has `record`.
    """

    kind: Literal["began", "attempt_began", "attempt_ended", "ended"]
    direction: Direction = "encoding"
    input: SampleFacts | None = None
    strategy: Strategy | None = None
    tile: TileFacts | None = None
    attempt: StrategyAttempt | None = None
    record: EncodingRecord | None = None


def strategy_label(strategy: Strategy, direction: Direction = "encoding") -> str:
    """What summaries call a strategy, such as "Direct VAE Encoding"."""
    return _LABELS[direction][strategy]


def strategy_number(strategy: Strategy) -> int:
    """1 to 4, as the summary counts them."""
    return STRATEGIES.index(strategy) + 1


def attempt_stage(strategy: Strategy, direction: Direction = "encoding") -> str:
    """The name of the stage, inside `latent_encoding` or `latent_decoding`, in which a strategy is tried."""
    return f"{strategy}_{direction}"


def as_plain(record: EncodingRecord) -> dict[str, Any]:
    """Dicts, lists and scalars; what was called `…_bytes` is `…_mb`."""
    plain: dict[str, Any] = _plain(record)
    return plain


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        named = ((field.name, getattr(value, field.name)) for field in fields(value))
        return dict(_plain_field(name, part) for name, part in named)
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


def _plain_field(name: str, value: Any) -> tuple[str, Any]:
    shown = _mb_name(name)
    return (name, _plain(value)) if shown is None else (shown, None if value is None else value / MIB)


def _mb_name(name: str) -> str | None:
    if name in _BYTES:
        return _BYTES[name]
    return name.removesuffix(_ENDING) + _MB_ENDING if name.endswith(_ENDING) else None


def encoding_record(plain: Mapping[str, Any]) -> EncodingRecord:
    """Restore the record from the values that `as_plain` made.

    Raises:
        ValueError: The values do not describe one; the message says where.
    """
    return from_plain(_in_bytes(plain), EncodingRecord, "record")


def _in_bytes(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(_field_in_bytes(name, part) for name, part in value.items())
    return [_in_bytes(part) for part in value] if isinstance(value, list | tuple) else value


def _field_in_bytes(name: str, value: Any) -> tuple[str, Any]:
    if name == "size_mb" and _is_size(value):
        return "nbytes", None if value is None else round(value * MIB)
    if name.endswith(_MB_ENDING) and _is_size(value):
        return name.removesuffix(_MB_ENDING) + _ENDING, None if value is None else round(value * MIB)
    return name, value if name in ("unavailable", "evidence") else _in_bytes(value)


def _is_size(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def record_in(stage: Stage | None) -> EncodingRecord | None:
    """The record that `encode_latents` or `decode_latents` left last on a stage or one inside it.

    Raises:
        ValueError: The stored fact is not an encoding record.
    """
    stages = () if stage is None else stage.walk()
    records = [part.facts[RECORD_FACT] for part in stages if RECORD_FACT in part.facts]
    return encoding_record(records[-1]) if records else None


def attempts_in(stage: Stage | None, direction: Direction) -> tuple[StrategyAttempt, ...]:
    """The strategies that were measured separately inside a stage, in order."""
    strategies = {attempt_stage(strategy, direction): strategy for strategy in STRATEGIES}
    inner = [] if stage is None else [part for part in stage.walk() if part.name in strategies]
    return tuple(_attempt(part, strategies[part.name]) for part in inner)


def _attempt(stage: Stage, strategy: Strategy) -> StrategyAttempt:
    details = stage.exception_details
    device = None if stage.peak is None or strategy == "cpu" else stage.peak.busiest_device()
    measured = _peak_growth(stage, device)
    reasons = {"predicted_peak_bytes": "nothing was predicted"}
    if measured is None:
        reasons["measured_peak_bytes"] = "its memory could not be read"
    return StrategyAttempt(
        strategy,
        "succeeded" if stage.success else "failed",
        stage.seconds,
        stage.error,
        None if details is None else details.type,
        device or "cpu",
        stage.peak,
        measured_peak_bytes=measured,
        unavailable=reasons,
    )


def _peak_growth(stage: Stage, device: str | None) -> int | None:
    """Bytes beyond those in use when the stage began: on the device, or of the process where there is none."""
    if stage.peak is None or stage.memory is None:
        return None
    before = stage.memory.baseline
    highest, start = stage.peak.rss_bytes, before.process_rss_bytes
    if device is not None:
        highest = stage.peak.accelerator(device).allocated_bytes
        start = before.accelerator(device).allocated_bytes
    return None if highest is None or start is None else max(0, highest - start)


def findings_of_record(record: EncodingRecord) -> tuple[Finding, ...]:
    """All that a record shows, and what the engine found itself."""
    own = findings_of_attempts(record.attempts, record.strategy, record.direction, dummy=record.dummy)
    return (*own, *without_known(record.findings, own))


def findings_of_attempts(
    attempts: Sequence[StrategyAttempt], strategy: Strategy | None, direction: Direction, *, dummy: bool
) -> tuple[Finding, ...]:
    """Findings from what was tried."""
    findings = [
        *_stand_in_finding(strategy, direction, dummy=dummy),
        *_failure_finding(attempts, strategy, direction),
    ]
    if not dummy:
        findings += _fallback_finding(attempts, strategy, direction)
        findings += _tiles_finding(attempts, direction)
    return (
        *findings,
        *(finding for attempt in attempts for finding in _misprediction_finding(attempt, direction)),
    )


def _stand_in_finding(strategy: Strategy | None, direction: Direction, *, dummy: bool) -> Iterator[Finding]:
    if dummy or strategy == "dummy":
        yield Finding(
            "dummy_latents",
            "critical",
            _STAND_IN[direction],
            {"strategy": strategy_label("dummy", direction)},
            "Do not use its results. Free memory, choose smaller tiles or fewer frames, and run it again.",
            VAE_STAGES[direction],
        )


def _failure_finding(
    attempts: Sequence[StrategyAttempt], strategy: Strategy | None, direction: Direction
) -> Iterator[Finding]:
    failed = [attempt for attempt in attempts if attempt.outcome == "failed"]
    if strategy is not None or not failed:
        return
    reasons = "; ".join(
        f"{strategy_label(attempt.name, direction)}: {attempt.reason or 'unknown'}" for attempt in failed
    )
    yield Finding(
        "vae_failed",
        "error",
        f"No strategy completed the {direction}. {reasons}",
        _evidence(failed),
        None  # the reason says what to do, and smaller pieces would not mend it
        if any(attempt.error_type == _NOT_FINITE for attempt in failed)
        else "Choose smaller tiles, fewer frames at a time or a smaller picture.",
        VAE_STAGES[direction],
    )


def _evidence(attempts: Sequence[StrategyAttempt]) -> dict[str, str | float | None]:
    reasons = {f"{attempt.name}_reason": attempt.reason for attempt in attempts}
    peaks = {f"{attempt.name}_measured_peak_mb": mib(attempt.measured_peak_bytes) for attempt in attempts}
    return {**reasons, **peaks}


def _fallback_finding(
    attempts: Sequence[StrategyAttempt], strategy: Strategy | None, direction: Direction
) -> Iterator[Finding]:
    """A strategy that gave way to another without the user's choice: what users ask to be told."""
    before = [attempt for attempt in attempts if attempt.outcome != "succeeded"]
    if strategy is None or not before or len(before) == len(attempts):
        return
    widened = strategy == "cpu" and any(attempt.error_type == _NOT_FINITE for attempt in before)
    names = " and ".join(
        f"{strategy_label(attempt.name, direction)} {_what_happened(attempt)}" for attempt in before
    )
    lost = sum(attempt.seconds or 0.0 for attempt in before)
    yield Finding(
        "vae_fallback",
        "warning",
        f"{names}: the output comes from {strategy_label(strategy, direction)}{', in float32' if widened else ''}.",
        {"strategy_number": strategy_number(strategy), "seconds_lost": lost, **_evidence(before)},
        _how_to_spare(strategy, widened=widened) if lost else None,
        VAE_STAGES[direction],
    )


def _tiles_finding(attempts: Sequence[StrategyAttempt], direction: Direction) -> Iterator[Finding]:
    """An output that is not what the whole would have given, as far as its tiles show."""
    made = next((attempt for attempt in attempts if attempt.outcome == "succeeded"), None)
    if made is None or made.tile is None:
        return
    tile = made.tile
    difference = tile.overlap_difference
    if difference is None:
        cost = _UNSEEN_COST if tile.by == "vae" else None
    else:
        cost = tiles_cost(difference) if difference >= _TILES_DIFFER else None
    if cost is None:
        return
    why = f" ({tile.norm_reason})" if tile.norm_reason else ""
    yield Finding(
        "vae_tiles_differ",
        "warning" if difference is not None and difference >= _TILES_DIFFER_MUCH else "info",
        f"{cost} Group norms saw {norms_saw(tile.norm_statistics)}{why}.",
        {"overlap_difference": difference, "norm_statistics": tile.norm_statistics, "count": tile.count},
        "Switch the VAE's own tiling off (vae.disable_tiling()): if memory runs out, the tiles that follow are nearer."
        if tile.by == "vae" and made.name != "tiled"
        else "Use larger tiles or a larger overlap.",
        VAE_STAGES[direction],
    )


_UNSEEN_COST = (
    "The VAE cut its own tiles, so their error was not measured. If norms see only their own tile, tiles often "
    "differ from the whole by 10 % or more."
)


def norms_saw(statistics: object) -> str:
    """What group norms saw, in words."""
    words = {
        "whole": "the whole picture",
        "estimated": "a copy of the picture, shrunk to a tile's size",
        "per_tile": "each tile separately",
    }
    return words.get(str(statistics), "-")


def tiles_cost(difference: float) -> str:
    """One sentence on how far neighbouring tiles disagree."""
    return (
        f"Tiles disagree by {rough_percent(difference)}. This only hints at the error against the untiled result, "
        "which may be larger or smaller."
    )


def _how_to_spare(strategy: Strategy, *, widened: bool) -> str:
    if widened:
        return "Use the VAE in float32, or in bfloat16 if it overflows in float16."
    return f"Start with {strategy!r} to skip the failed attempts."


def _what_happened(attempt: StrategyAttempt) -> str:
    if attempt.outcome == "skipped":
        return "was skipped"
    if attempt.error_type == _NOT_FINITE:
        return "gave NaN or Inf"
    words = f"{attempt.error_type} {attempt.reason}".lower()
    return "ran out of memory" if "memory" in words else "failed"


def _misprediction_finding(attempt: StrategyAttempt, direction: Direction) -> Iterator[Finding]:
    predicted, measured = mib(attempt.predicted_peak_bytes), mib(attempt.measured_peak_bytes)
    if attempt.outcome != "succeeded" or not predicted or not measured:
        return
    factor = measured / predicted
    if max(factor, 1 / factor) < _OFF_BY or abs(measured - predicted) < _WORTH_TELLING_MB:
        return
    yield Finding(
        "vae_peak_mispredicted",
        "info",
        f"{strategy_label(attempt.name, direction)} took {measured:,.0f} MB at its peak; the prediction was "
        f"{predicted:,.0f} MB.",
        {"predicted_mb": predicted, "measured_mb": measured, "factor": factor},
        "Predictions improve with each saved run.",
        VAE_STAGES[direction],
    )


def without_known(findings: Iterable[Finding], known: Iterable[Finding]) -> list[Finding]:
    """The findings whose id is not among the known ones; a hyphen counts as an underscore."""
    ids = {finding.id.replace("-", "_") for finding in known}
    return [finding for finding in findings if finding.id.replace("-", "_") not in ids]
