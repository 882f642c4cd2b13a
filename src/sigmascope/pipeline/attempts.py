"""Attempts to encode or decode: which ones to make, what each is expected to take, and how each ended.

`Tries` gives the attempts one at a time, each with the memory that it is expected to take: it is planned only when the
one before it has failed. `why_not_fitting` says whether there is room for that. `run_attempt` runs one, watched and
timed; if memory runs out or the result is not finite, nothing of it remains but its record.
`why_not_finite` tells what a result with NaN or Inf comes from: what went in, the weights, or half precision.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

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
from sigmascope.pipeline.out_of_memory import free_memory, free_ram, let_go, wait_for, why_not_enough
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
    Direction,
    EncodingRecord,
    Strategy,
    StrategyAttempt,
    TileFacts,
    attempt_stage,
)
from sigmascope.records.run import Run

NOT_MEASURED = "nothing watched the attempt"
_CPU = torch.device("cpu")


_NOTHING_PREDICTED = Prediction(unavailable={"bytes": "nothing was predicted"})


@dataclass(frozen=True, slots=True)
class Try:
    """A strategy with all that it takes."""

    name: Strategy
    run: Callable[[], Outcome]
    device: torch.device
    tile: TileFacts | None = None
    expected: Prediction = _NOTHING_PREDICTED
    in_float32: bool = False

    def record(self) -> StrategyAttempt:
        """What is known before it is made: that it was not."""
        reason = self.expected.unavailable.get("bytes")
        return StrategyAttempt(
            self.name,
            "skipped",
            device=str(self.device),
            predicted_peak_bytes=self.expected.bytes,
            prediction_basis=self.expected.basis,
            tile=self.tile,
            unavailable={} if reason is None else {"predicted_peak_bytes": reason},
        )

    def passed_over(self, reason: str) -> StrategyAttempt:
        """Its record where it is not even tried."""
        return replace(self.record(), reason=reason)


@dataclass(frozen=True, slots=True)
class Tries:
    """All that may be tried, in the order asked for: each to be made, or its record where it is passed over."""

    work: Work
    choices: Choices
    experience: Experience | None
    dummy: Callable[[], Outcome] | None = None

    def __iter__(self) -> Iterator[Try | StrategyAttempt]:
        kinds = {"direct": self._direct, "tiled": self._tiled, "cpu": self._cpu, "dummy": self._dummy}
        for strategy in self.choices.strategies:
            yield from kinds[strategy]()

    def after_not_finite(self, diagnosis: "Diagnosis") -> Iterator[Try | StrategyAttempt]:
        """What is left to try where a result held NaN or Inf, which smaller pieces would not mend."""
        if diagnosis.float32_may_help and "cpu" in self.choices.strategies:
            planned = self._cpu_in_float32()
            reason = why_not_in_float32(self.work.vae.modules) or self._why_not_enough_ram(planned)
            yield planned if reason is None else planned.passed_over(reason)
        if "dummy" in self.choices.strategies:
            yield from self._dummy()

    def _cpu_in_float32(self) -> Try:
        """Everything takes twice what it takes in half precision, and so do weights that are in RAM already."""
        work, modules = self.work, self.work.vae.modules
        planned = self._try("cpu", lambda: on_cpu(work, in_float32=True), _CPU)
        expected = planned.expected
        if expected.bytes is not None:
            nbytes = 2 * expected.bytes + nbytes_widened(modules) - 2 * nbytes_to_copy(modules)
            expected = replace(expected, bytes=max(nbytes, 0))
        return replace(planned, expected=expected, in_float32=True)

    def _direct(self) -> Iterator[Try | StrategyAttempt]:
        work = self.work
        yield self._unless_too_large(self._try("direct", lambda: direct(work), work.vae.device))

    def _tiled(self) -> Iterator[Try | StrategyAttempt]:
        """The largest tiles that fit, or from the largest on where nothing is foretold."""
        ladder = self.choices.ladder(self.work)
        for index, tiles in enumerate(ladder):
            planned = self._unless_too_large(self._in_tiles(tiles))
            if isinstance(planned, Try) or index == len(ladder) - 1:
                yield planned

    def _in_tiles(self, tiles: Tiles) -> Try:
        """Side by side, unless those that wait have no room in the RAM that they compute in."""
        work = self.work
        together = not isinstance(work.vae, ComfyuiVae) and why_apart(work.vae.modules) is None
        planned = self._try("tiled", lambda: tiled(work, tiles), work.vae.device, tiles, together=together)
        in_ram = together and planned.device.type == "cpu"
        reason = why_not_fitting(planned.expected, _CPU) if in_ram else None
        if reason is None:
            return planned
        return self._try("tiled", lambda: tiled(work, tiles, apart=reason), work.vae.device, tiles)

    def _cpu(self) -> Iterator[Try | StrategyAttempt]:
        """At once if RAM can hold that, else in the largest tiles that fit."""
        work = self.work
        whole = self._try("cpu", lambda: on_cpu(work), _CPU)
        unreadable = why_not_in_ram(work.vae.modules)
        if unreadable is not None:
            yield whole.passed_over(unreadable)
            return
        reason = self._why_not_enough_ram(whole)
        if reason is None:
            yield whole
            return
        for tiles in self.choices.ladder(work):
            in_tiles = self._try("cpu", partial(on_cpu, work, tiles), _CPU, tiles)
            if self._why_not_enough_ram(in_tiles) is None:
                yield in_tiles
                return
        yield whole.passed_over(reason)

    def _dummy(self) -> Iterator[Try | StrategyAttempt]:
        if self.dummy is not None:
            yield Try("dummy", self.dummy, self.work.output_device or self.work.vae.home)

    def _why_not_enough_ram(self, planned: Try) -> str | None:
        if planned.expected.bytes is None:
            copies = nbytes_widened if planned.in_float32 else nbytes_to_copy
            return why_not_enough(copies(self.work.vae.modules), free_ram())
        return why_not_fitting(planned.expected, _CPU)

    def _unless_too_large(self, planned: Try) -> Try | StrategyAttempt:
        only_what_fits = self.choices.only_what_fits
        reason = why_not_fitting(planned.expected, planned.device) if only_what_fits else None
        return planned if reason is None else planned.passed_over(reason)

    def _try(
        self,
        name: Strategy,
        run: Callable[[], Outcome],
        device: torch.device,
        tiles: Tiles | None = None,
        *,
        together: bool = False,
    ) -> Try:
        """An attempt, with how it will be cut and what it is expected to take. Never raises for want of either."""
        work, factor = self.work, self.work.vae.facts.spatial_factor
        facts: TileFacts | None = None
        cut: TilePlan | None = None
        if tiles is not None:
            facts = tiles_asked_for(work, tiles, by_vae=name == "tiled")
            if factor is not None:
                cut = attempt(lambda: plan(*work.pixels, tiles.side, tiles.overlap, factor)).value
            if cut is not None and facts.by != "vae":
                facts = cut.facts()
        if self.experience is None:
            return Try(name, run, device, facts)
        planned = Planned(
            tuple(work.source.shape),
            work.direction,
            name,
            cut,
            device_type=device.type,
            batch_at_once=None if tiles is None else len(work.one_by_one()[0]),
            moved_weights_bytes=nbytes_to_copy(work.vae.modules) if name == "cpu" else 0,
            together=together,
        )
        prediction = attempt(lambda: predict_peak(work.vae.vae, planned, self.experience))
        failure = Prediction(unavailable={"bytes": prediction.reason or "it failed"})
        return Try(name, run, device, facts, prediction.value or failure)


def run_attempt(
    planned: Try, direction: Direction, generator: torch.Generator | None
) -> tuple[Outcome | None, StrategyAttempt]:
    """Make the attempt. Running out of memory is an outcome, and so is a result that is not finite.

    Anything else that is raised passes unchanged. After a failure nothing of the attempt is alive, caches of the
    device are emptied, and the generator is as it was.
    """
    handled = sys.exception()
    state = None if generator is None else generator.get_state()
    stage = monitor.stage(attempt_stage(planned.name, direction))
    record = planned.record()
    outcome: Outcome | None = None
    began = time.perf_counter()
    try:
        with stage:
            outcome = planned.run()
            wait_for(planned.device)
        record = replace(record, outcome="succeeded", tile=outcome.tile or planned.tile)
    except BaseException as error:
        if not (is_out_of_memory(error) or isinstance(error, NonFiniteError)):
            raise
        outcome = None
        record = failed(record, error)
        let_go(error, handled)
    record = replace(record, seconds=time.perf_counter() - began)
    if outcome is None:
        free_memory(planned.device)
        if generator is not None and state is not None:
            generator.set_state(state)
    return outcome, _with_memory(record, stage, planned.device)


def _with_memory(record: StrategyAttempt, stage: object, device: torch.device) -> StrategyAttempt:
    """The record with its peak, and by how much that is beyond what was in use on the device when it began."""
    watched = attempt(stage.record).value if isinstance(stage, LiveStage) else None
    if watched is None or watched.peak is None:
        reasons = dict.fromkeys(("peak", "measured_peak_bytes"), NOT_MEASURED)
        return replace(record, unavailable={**record.unavailable, **reasons})
    highest: int | None = None
    start: int | None = None
    if watched.memory is not None:
        before = watched.memory.baseline
        if device.type == "cpu":
            highest, start = watched.peak.rss_bytes, before.process_rss_bytes
        else:
            name = str(device)
            if ":" not in name:  # a device without a number is the current one
                name = before.device_in_use() or name
            highest = watched.peak.accelerator(name).allocated_bytes
            start = before.accelerator(name).allocated_bytes
    record = replace(record, peak=watched.peak)
    if highest is None or start is None:
        reasons = {"measured_peak_bytes": "its memory could not be read"}
        return replace(record, unavailable={**record.unavailable, **reasons})
    return replace(record, measured_peak_bytes=max(highest - start, 0))


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


def why_not_finite(tried: Try, work: Work, strategies: Iterable[str]) -> Diagnosis:
    """What the result of an attempt is not finite for; what went in comes first, then the weights."""
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
    if tried.in_float32 or dtype not in HALVES:
        return Diagnosis(
            f"the VAE makes them of finite {what} with finite weights"
            + (", in float32 too" if tried.in_float32 else ""),
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


def experience_from(past: Iterable[Run | EncodingRecord]) -> Experience:
    """What some past runs took, and what the run that is being recorded has seen so far."""
    runs = list(past)
    recorder = monitor.current_recorder()
    own = None if recorder is None else attempt(recorder.run).value
    if own is not None:
        runs.append(own)
    return learn(runs)


def why_not_fitting(expected: Prediction, device: torch.device) -> str | None:
    """The reason with numbers, if a device cannot hold that much beside what it holds. Never raises."""
    memory = attempt(memory_snapshot).value
    if memory is None:
        return None
    memory = replace(memory, ram_available_bytes=free_ram().free_bytes)
    fitting, words = fits(expected, memory, str(device))
    return None if fitting else words
