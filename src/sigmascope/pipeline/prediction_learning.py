"""What past encodings and decodings really took, for the predictions of those to come."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sigmascope.records.arithmetic import MIB
from sigmascope.records.latents import RECORD_FACT, EncodingRecord, StrategyAttempt
from sigmascope.records.latents_plain import encoding_record
from sigmascope.records.run import Run
from sigmascope.records.strategies import Direction, Strategy

SMALLEST_BYTES = 64 * MIB
"""Below this a process's memory says more of what it had kept from before than of the attempt."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What must be alike for one attempt to say something of another."""

    class_name: str
    direction: Direction
    strategy: Strategy
    device_type: str


@dataclass(frozen=True, slots=True)
class Experience:
    """What was learned, by kind of attempt.

    Attributes:
        ratios: Measured peaks over those counted from the config.
        rates: Measured bytes for each element (pixels or latents, all channels) that the VAE was given at once.
    """

    ratios: Mapping[Kind, tuple[float, ...]] = field(default_factory=dict)
    rates: Mapping[Kind, tuple[float, ...]] = field(default_factory=dict)

    def peak(self, kind: Kind, elements: int, counted_bytes: int | None) -> int | None:
        """The peak to expect: what was counted times the median ratio, or the median rate times the size.

        Args:
            kind: Of attempt.
            elements: That the VAE is given at once.
            counted_bytes: From the config; None where it tells nothing.

        Returns:
            Bytes, or None if nothing was learned of that kind.
        """
        known, factor = (self.rates, elements) if counted_bytes is None else (self.ratios, counted_bytes)
        values = known.get(kind)
        return None if not values else round(statistics.median(values) * factor)


def learn(past: Iterable[Run | EncodingRecord]) -> Experience:
    """Learn from runs that were saved, or from records as `encode_latents` gives them.

    Attempts that succeeded count, if their peak was measured and is 64 MB or more. A ratio comes only from a
    prediction that was itself made from the config: one that had learned already would count twice.

    Args:
        past: `Run`s, whose stages hold the records, or the records themselves. A stage whose record cannot be
            read is passed over.
    """
    ratios: dict[Kind, list[float]] = defaultdict(list)
    rates: dict[Kind, list[float]] = defaultdict(list)
    for record in _records(past):
        for attempt in record.attempts:
            measured = attempt.measured_peak_bytes or 0
            kind = _kind(record, attempt)
            if kind is None or measured < SMALLEST_BYTES:
                continue
            if attempt.prediction_basis == "config" and attempt.predicted_peak_bytes:
                ratios[kind].append(measured / attempt.predicted_peak_bytes)
            elements = _elements(record, attempt)
            if elements:
                rates[kind].append(measured / elements)
    return Experience(_tuples(ratios), _tuples(rates))


def _records(past: Iterable[Run | EncodingRecord]) -> Iterable[EncodingRecord]:
    for one in past:
        if isinstance(one, EncodingRecord):
            yield one
            continue
        for stage in one.walk():
            record = _record(stage.facts.get(RECORD_FACT))
            if record is not None:
                yield record


def _record(plain: object) -> EncodingRecord | None:
    if not isinstance(plain, Mapping):
        return None
    try:
        return encoding_record(plain)
    except (ValueError, TypeError, LookupError):
        return None


def _kind(record: EncodingRecord, attempt: StrategyAttempt) -> Kind | None:
    if (
        record.vae is None
        or attempt.outcome != "succeeded"
        or attempt.name == "dummy"
        or attempt.device is None
    ):
        return None
    device_type = attempt.device.split(":")[0]
    return Kind(record.vae.class_name, record.direction, attempt.name, device_type)


def _elements(record: EncodingRecord, attempt: StrategyAttempt) -> int | None:
    """How many the VAE was given at once: of one picture or video if it was in tiles."""
    given = record.input
    if given is None or None in (given.batch, given.channels, given.height, given.width):
        return None
    sides = [given.height or 0, given.width or 0]
    batch = given.batch or 0
    if attempt.tile is not None:
        factor = _factor(record)
        if factor is None:
            return None
        tile = (attempt.tile.height // factor, attempt.tile.width // factor)
        sides = [min(pair) for pair in zip(sides, tile, strict=True)]
        batch = 1
    return math.prod((batch, given.frames or 1, given.channels or 0, *sides))


def _factor(record: EncodingRecord) -> int | None:
    """Pixels along one element of the input."""
    if record.direction == "encoding":
        return 1
    return None if record.vae is None else record.vae.spatial_factor


def _tuples(values: Mapping[Kind, list[float]]) -> dict[Kind, tuple[float, ...]]:
    return {kind: tuple(measured) for kind, measured in values.items()}
