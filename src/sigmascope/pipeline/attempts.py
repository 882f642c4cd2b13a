"""Attempts to encode or decode: which ones to make, what each is expected to take, and how each ended.

`Tries` gives the attempts one at a time: each is planned only when the one before it has failed. `Forecast` says
what memory an attempt is expected to take, and `why_not_fitting` whether there is room for that. `made` runs an
attempt, watched and timed; if memory runs out or the result is not finite, nothing of it remains but its record.
`why_not_finite` tells what a result with NaN or Inf comes from: what went in, the weights, or half precision.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sigmascope import monitor
from sigmascope.errors import NonFiniteError
from sigmascope.monitor.recorder import LiveStage
from sigmascope.pipeline.model_state import (
    HALVES,
    nbytes_to_copy,
    nbytes_widened,
    why_not_in_float32,
    why_not_in_ram,
)
from sigmascope.pipeline.out_of_memory import free_memory, free_ram, let_go, why_not_enough
from sigmascope.pipeline.peak_prediction import Experience, Planned, Prediction, fits, learn, predict_peak
from sigmascope.pipeline.strategies import (
    Choices,
    Outcome,
    Tiles,
    Work,
    direct,
    not_finite,
    on_cpu,
    tiled,
    tiles_asked_for,
)
from sigmascope.pipeline.tiles_together import why_apart
from sigmascope.pipeline.tiling import TilePlan, plan
from sigmascope.pipeline.vae_adapters import ComfyuiVae
from sigmascope.probes import memory_snapshot
from sigmascope.probes.reading import attempt, describe, is_out_of_memory
from sigmascope.records.latents import (
    Basis,
    Direction,
    EncodingRecord,
    Strategy,
    StrategyAttempt,
    TileFacts,
    attempt_stage,
)
from sigmascope.records.run import Run, Stage

NOT_MEASURED = "nothing watched the attempt"
_NOBODY_ASKED = "nothing was predicted"
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Expected:
    """Peak bytes beyond what is in use when the attempt begins; None with the reason in `unavailable`."""

    nbytes: int | None = None
    basis: Basis | None = None
    unavailable: Mapping[str, str] = field(default_factory=lambda: {"predicted_peak_bytes": _NOBODY_ASKED})


@dataclass(frozen=True, slots=True)
class Try:
    """A strategy with all that it takes.

    Attributes:
        name: Which strategy.
        run: Does it.
        device: Where the VAE runs.
        tile: How it will be cut, where that is known before.
        expected: What it will take.
        in_float32: Whether it widens a VAE of half precision.
    """

    name: Strategy
    run: Callable[[], Outcome]
    device: torch.device
    tile: TileFacts | None = None
    expected: Expected = field(default_factory=Expected)
    in_float32: bool = False

    def record(self) -> StrategyAttempt:
        """What is known before it is made: that it was not."""
        return StrategyAttempt(
            self.name,
            "skipped",
            device=str(self.device),
            predicted_peak_bytes=self.expected.nbytes,
            prediction_basis=self.expected.basis,
            tile=self.tile,
            unavailable=self.expected.unavailable,
        )


@dataclass(frozen=True, slots=True)
class Passed:
    """A strategy that is not even tried, and why."""

    attempt: StrategyAttempt

    @classmethod
    def over(cls, one: Try, reason: str) -> "Passed":
        """Pass over a try."""
        return cls(replace(one.record(), outcome="skipped", reason=reason))


@dataclass(frozen=True, slots=True)
class Forecast:
    """Foretells attempts.

    Attributes:
        experience: What past runs took.
        enabled: False foretells nothing.
    """

    experience: Experience
    enabled: bool = True

    def of(
        self,
        work: Work,
        strategy: Strategy,
        tiles: Tiles | None,
        device: torch.device,
        *,
        together: bool = False,
    ) -> Expected:
        """What a strategy will take. Never raises."""
        if not self.enabled:
            return Expected()
        planned = Planned(
            tuple(work.source.shape),
            work.direction,
            strategy,
            None if tiles is None else _tile_plan(work, tiles),
            device_type=device.type,
            batch_at_once=None if tiles is None else len(work.one_by_one()[0]),
            moved_weights_bytes=nbytes_to_copy(work.vae.modules) if strategy == "cpu" else 0,
            together=together,
        )
        found = attempt(lambda: predict_peak(work.vae.vae, planned, self.experience))
        prediction = found.value or Prediction(unavailable={"bytes": found.reason or "it failed"})
        reason = prediction.unavailable.get("bytes")
        gaps = {} if reason is None else {"predicted_peak_bytes": reason}
        return Expected(prediction.bytes, prediction.basis, gaps)


def _tile_plan(work: Work, tiles: Tiles) -> TilePlan | None:
    factor = work.vae.facts.spatial_factor
    if factor is None:
        return None
    height, width = work.pixels
    return attempt(lambda: plan(height, width, tiles.side, tiles.overlap, factor)).value


def _tile_facts(work: Work, tiles: Tiles, *, by_vae: bool) -> TileFacts:
    """As they are planned, where we cut them and know the VAE's factor."""
    asked = tiles_asked_for(work, tiles, by_vae=by_vae)
    cut = None if asked.by == "vae" else _tile_plan(work, tiles)
    return asked if cut is None else cut.facts()


@dataclass(frozen=True, slots=True)
class Tries:
    """All that may be tried, in the order asked for.

    Args:
        work: What there is to do.
        choices: Which strategies and tiles.
        forecast: What each is expected to take.
        dummy: Makes the stand-in, where one was asked for.
    """

    work: Work
    choices: Choices
    forecast: Forecast
    dummy: Callable[[], Outcome] | None = None

    def __iter__(self) -> Iterator[Try | Passed]:
        kinds = {"direct": self._direct, "tiled": self._tiled, "cpu": self._cpu, "dummy": self._dummy}
        for strategy in self.choices.strategies:
            yield from kinds[strategy]()

    def after_not_finite(self, diagnosis: "Diagnosis") -> Iterator[Try | Passed]:
        """What is left to try where a result held NaN or Inf, which smaller pieces would not mend.

        Args:
            diagnosis: What that came from.
        """
        if diagnosis.float32_may_help and "cpu" in self.choices.strategies:
            one = self._cpu_in_float32()
            reason = why_not_in_float32(self.work.vae.modules) or self._why_not_enough_ram(one)
            yield one if reason is None else Passed.over(one, reason)
        if "dummy" in self.choices.strategies:
            yield from self._dummy()

    def _cpu_in_float32(self) -> Try:
        """Everything takes twice what it takes in half precision, and so do weights that are in RAM already."""
        work, modules = self.work, self.work.vae.modules
        expected = self.forecast.of(work, "cpu", None, _CPU)
        nbytes = nbytes_widened(modules)
        if expected.nbytes is not None:
            nbytes = 2 * expected.nbytes + nbytes - 2 * nbytes_to_copy(modules)
            expected = replace(expected, nbytes=max(nbytes, 0))
        return Try("cpu", lambda: on_cpu(work, in_float32=True), _CPU, None, expected, in_float32=True)

    def _direct(self) -> Iterator[Try | Passed]:
        work = self.work
        yield self._unless_too_large(self._try("direct", lambda: direct(work), work.vae.device))

    def _tiled(self) -> Iterator[Try | Passed]:
        """The largest tiles that fit, or from the largest on where nothing is foretold."""
        ladder = self.choices.ladder(self.work)
        for index, tiles in enumerate(ladder):
            one = self._unless_too_large(self._in_tiles(tiles))
            if isinstance(one, Try) or index == len(ladder) - 1:
                yield one

    def _in_tiles(self, tiles: Tiles) -> Try:
        """Side by side, unless those that wait have no room in the RAM that they compute in."""
        work = self.work
        together = not isinstance(work.vae, ComfyuiVae) and why_apart(work.vae.modules) is None
        one = self._try("tiled", lambda: tiled(work, tiles), work.vae.device, tiles, together=together)
        in_ram = together and one.device.type == "cpu"
        reason = why_not_fitting(one.expected, _CPU) if in_ram else None
        if reason is None:
            return one
        return self._try("tiled", lambda: tiled(work, tiles, apart=reason), work.vae.device, tiles)

    def _cpu(self) -> Iterator[Try | Passed]:
        """At once if RAM can hold that, else in the largest tiles that fit."""
        work = self.work
        one = self._try("cpu", lambda: on_cpu(work), _CPU)
        reason = why_not_in_ram(work.vae.modules) or self._why_not_enough_ram(one)
        if reason is not None and not why_not_in_ram(work.vae.modules):
            cut = (self._cpu_in_tiles(tiles) for tiles in self.choices.ladder(work))
            fitting = next((smaller for smaller in cut if self._why_not_enough_ram(smaller) is None), None)
            one, reason = (one, reason) if fitting is None else (fitting, None)
        yield one if reason is None else Passed.over(one, reason)

    def _cpu_in_tiles(self, tiles: Tiles) -> Try:
        work = self.work
        return self._try("cpu", lambda: on_cpu(work, tiles), _CPU, tiles)

    def _dummy(self) -> Iterator[Try | Passed]:
        place = self.work.output_device or self.work.vae.home
        if self.dummy is not None:
            yield Try("dummy", self.dummy, place, expected=Expected())

    def _why_not_enough_ram(self, one: Try) -> str | None:
        if one.expected.nbytes is None:
            copies = nbytes_widened if one.in_float32 else nbytes_to_copy
            return why_not_enough(copies(self.work.vae.modules), free_ram())
        return why_not_fitting(one.expected, _CPU)

    def _unless_too_large(self, one: Try) -> Try | Passed:
        reason = why_not_fitting(one.expected, one.device) if self.choices.only_what_fits else None
        return one if reason is None else Passed.over(one, reason)

    def _try(
        self,
        name: Strategy,
        run: Callable[[], Outcome],
        device: torch.device,
        tiles: Tiles | None = None,
        *,
        together: bool = False,
    ) -> Try:
        facts = None if tiles is None else _tile_facts(self.work, tiles, by_vae=name == "tiled")
        expected = self.forecast.of(self.work, name, tiles, device, together=together)
        return Try(name, run, device, facts, expected)


def made(
    one: Try, direction: Direction, generator: torch.Generator | None
) -> tuple[Outcome | None, StrategyAttempt]:
    """Make the attempt. Running out of memory is an outcome, and so is a result that is not finite.

    Anything else that is raised passes unchanged. After a failure nothing of the attempt is alive, caches of the
    device are emptied, and the generator is as it was.

    Args:
        one: What to try.
        direction: Whether it encodes or decodes.
        generator: That may be drawn from.
    """
    handled = sys.exception()
    state = None if generator is None else generator.get_state()
    stage = monitor.stage(attempt_stage(one.name, direction))
    record = one.record()
    outcome: Outcome | None = None
    began = time.perf_counter()
    try:
        with stage:
            outcome = one.run()
            _wait_for(one.device)
        record = replace(record, outcome="succeeded", tile=outcome.tile or one.tile)
    except BaseException as error:
        if not (is_out_of_memory(error) or isinstance(error, NonFiniteError)):
            raise
        outcome = None
        record = failed(record, error)
        let_go(error, handled)
    record = replace(record, seconds=time.perf_counter() - began)
    if outcome is None:
        _clean_up(one.device, generator, state)
    return outcome, _with_memory(record, stage, one.device)


def _wait_for(device: torch.device) -> None:
    """Let the device finish, so that its time counts and its errors are those of this attempt."""
    synchronize = getattr(getattr(torch, device.type, None), "synchronize", None)
    if device.type in ("cpu", "meta") or synchronize is None:
        return
    if device.type == "mps":  # it is one device and takes no name of it
        synchronize()
    else:
        synchronize(device)


def _clean_up(device: torch.device, generator: torch.Generator | None, state: torch.Tensor | None) -> None:
    free_memory(device)
    if generator is not None and state is not None:
        generator.set_state(state)


def _with_memory(record: StrategyAttempt, stage: object, device: torch.device) -> StrategyAttempt:
    seen = attempt(stage.record).value if isinstance(stage, LiveStage) else None
    if seen is None or seen.peak is None:
        reasons = dict.fromkeys(("peak", "measured_peak_bytes"), NOT_MEASURED)
        return replace(record, unavailable={**record.unavailable, **reasons})
    measured = _growth(seen, device)
    reasons = {} if measured is not None else {"measured_peak_bytes": "its memory could not be read"}
    return replace(
        record,
        peak=seen.peak,
        measured_peak_bytes=measured,
        unavailable={**record.unavailable, **reasons},
    )


def _growth(stage: Stage, device: torch.device) -> int | None:
    """Peak beyond what was in use on the device when the stage began; of the process, on the CPU."""
    if stage.peak is None or stage.memory is None:
        return None
    before = stage.memory.baseline
    if device.type == "cpu":
        return _above(stage.peak.rss_bytes, before.process_rss_bytes)
    name = str(device)
    if ":" not in name:  # a device without a number is the current one
        name = before.device_in_use() or name
    return _above(stage.peak.accelerator(name).allocated_bytes, before.accelerator(name).allocated_bytes)


def _above(highest: int | None, start: int | None) -> int | None:
    return None if start is None or highest is None else max(highest - start, 0)


def failed(record: StrategyAttempt, error: BaseException) -> StrategyAttempt:
    """The record of an attempt that ended in an error, of which only words are kept."""
    return replace(record, outcome="failed", reason=describe(error), error_type=type(error).__name__)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What NaN or Inf in a result come from.

    Attributes:
        cause: In words.
        advice: What to do about it.
        float32_may_help: Whether what went in and the weights are finite, and of half precision.
    """

    cause: str
    advice: str
    float32_may_help: bool = False


def why_not_finite(one: Try, work: Work, strategies: Iterable[str]) -> Diagnosis:
    """What the result of an attempt is not finite for; what went in comes first, then the weights.

    Args:
        one: The attempt.
        work: What it had to do; the VAE is as before by now.
        strategies: Those that may be tried.
    """
    what = "pictures" if work.direction == "encoding" else "latents"
    broken = attempt(lambda: not_finite(work.source)).value
    if broken:
        return Diagnosis(
            f"the {what} that went in hold {broken}", f"Repair the {what}: no strategy can make up for them."
        )
    weights = attempt(lambda: _broken_weights(work)).value
    if weights:
        return Diagnosis(
            f"the VAE's weights are not finite: {weights}", "Load the VAE again, or another file."
        )
    dtype = work.vae.dtype
    if one.in_float32 or dtype not in HALVES:
        return Diagnosis(
            f"the VAE makes them of finite {what} with finite weights"
            + (", in float32 too" if one.in_float32 else ""),
            f"Check that the {what} are in the range that this VAE was trained on.",
        )
    name = str(dtype).removeprefix("torch.")
    wider = "bfloat16 or float32" if dtype == torch.float16 else "float32"
    also = "" if "cpu" in strategies else ', or name "cpu" in strategies=, which then computes in float32'
    return Diagnosis(f"the VAE overflows in {name}", f"Use {wider}{also}.", float32_may_help=True)


def _broken_weights(work: Work) -> str | None:
    """The first of them by name with its counts, and how many more there are."""
    named = {
        name: broken
        for module in work.vae.modules
        for name, tensor in _named_tensors(module)
        if (broken := attempt(lambda tensor=tensor: not_finite(tensor)).value)  # type: ignore[misc]
    }
    if not named:
        return None
    name, broken = next(iter(named.items()))
    more = f", and {len(named) - 1} more" if len(named) > 1 else ""
    return f"{name} ({broken}){more}"


def _named_tensors(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def forecast_from(past: Iterable[Run | EncodingRecord], *, enabled: bool) -> Forecast:
    """A forecast that knows some past runs, and what the run that is being recorded has seen so far.

    Args:
        past: Runs or records.
        enabled: False foretells nothing.
    """
    known = list(past) if enabled else []
    recorder = monitor.current_recorder() if enabled else None
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
