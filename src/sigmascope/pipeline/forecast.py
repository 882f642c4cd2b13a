"""What an attempt is expected to take, before it is made, and whether there is room for that."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from sigmascope.monitor import current_recorder
from sigmascope.pipeline.prediction import Planned, Prediction, fits, predict_peak
from sigmascope.pipeline.prediction_learning import Experience, learn
from sigmascope.pipeline.ram import free_ram
from sigmascope.pipeline.strategies import Tiles
from sigmascope.pipeline.tiling import TilePlan, plan
from sigmascope.pipeline.weights_in_ram import nbytes_to_copy
from sigmascope.pipeline.work import Work
from sigmascope.probes import memory_snapshot
from sigmascope.probes.reading import attempt
from sigmascope.records.latents import Basis, EncodingRecord
from sigmascope.records.run import Run
from sigmascope.records.strategies import Strategy

_NOBODY_ASKED = "nothing was predicted"


@dataclass(frozen=True, slots=True)
class Expected:
    """Peak bytes beyond what is in use when the attempt begins; None with the reason in `unavailable`."""

    nbytes: int | None = None
    basis: Basis | None = None
    unavailable: Mapping[str, str] = field(default_factory=lambda: {"predicted_peak_bytes": _NOBODY_ASKED})


@dataclass(frozen=True, slots=True)
class Forecast:
    """Foretells attempts.

    Attributes:
        experience: What past runs took.
        enabled: False foretells nothing.
    """

    experience: Experience
    enabled: bool = True

    def of(self, work: Work, strategy: Strategy, tiles: Tiles | None, device: torch.device) -> Expected:
        """What a strategy will take. Never raises."""
        if not self.enabled:
            return Expected()
        planned = Planned(
            tuple(work.source.shape),
            work.direction,
            strategy,
            None if tiles is None else _plan(work, tiles),
            device_type=device.type,
            batch_at_once=None if tiles is None else len(work.one_by_one()[0]),
            moved_weights_bytes=nbytes_to_copy(work.vae.modules) if strategy == "cpu" else 0,
        )
        found = attempt(lambda: predict_peak(work.vae.vae, planned, self.experience))
        prediction = found.value or Prediction(unavailable={"bytes": found.reason or "it failed"})
        reason = prediction.unavailable.get("bytes")
        gaps = {} if reason is None else {"predicted_peak_bytes": reason}
        return Expected(prediction.bytes, prediction.basis, gaps)


def forecast_from(past: Iterable[Run | EncodingRecord], *, enabled: bool) -> Forecast:
    """A forecast that knows some past runs, and what the run that is being recorded has seen so far.

    Args:
        past: Runs or records.
        enabled: False foretells nothing.
    """
    known = list(past) if enabled else []
    recorder = current_recorder() if enabled else None
    if recorder is not None:
        own = attempt(recorder.run).value
        known += [] if own is None else [own]
    return Forecast(learn(known), enabled)


def why_not_fitting(expected: Expected, device: torch.device) -> str | None:
    """The reason with numbers, if a device cannot hold that much beside what it holds. Never raises."""
    memory = attempt(memory_snapshot).value
    if memory is None:
        return None
    memory = replace(memory, ram_available_bytes=free_ram().free_bytes)
    fitting, words = fits(Prediction(expected.nbytes, expected.basis), memory, str(device))
    return None if fitting else words


def _plan(work: Work, tiles: Tiles) -> TilePlan | None:
    factor = work.vae.facts.spatial_factor
    if factor is None:
        return None
    height, width = work.pixels
    return attempt(lambda: plan(height, width, tiles.side, tiles.overlap, factor)).value
