"""Encode pictures and decode latents with any VAE, in whichever way memory allows.

`encode_latents` and `decode_latents` prepare the work and give it to `_Engine`, which tries one strategy after another
until one gives a result, and keeps a record of all. An attempt is planned, with the memory that it is expected to take,
only when the one before it has failed. When memory runs out, the next is tried with nothing of the failed one alive. A
result with NaN or Inf is a failed attempt too: where half precision is to blame, the CPU tries it in float32. Any other
error is the VAE's or the caller's, and passes unchanged.

The last resort, on request, are dummy latents: zeros of the shape that the real latents would have had. They encode
nothing.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from sigmascope import monitor
from sigmascope.errors import ConfigError, EveryStrategyFailedError, NonFiniteError
from sigmascope.monitor import Recorder
from sigmascope.monitor.guard import Guard
from sigmascope.monitor.recorder import LiveStage
from sigmascope.pipeline.image_preprocessing import Values, pictures, sample_facts, unfolded
from sigmascope.pipeline.model_state import (
    HALVES,
    free_memory,
    free_ram,
    in_turn,
    let_go,
    nbytes_to_copy,
    nbytes_widened,
    wait_for,
    why_not_enough,
    why_not_in_float32,
    why_not_in_ram,
)
from sigmascope.pipeline.peak_prediction import (
    Experience,
    NoTwinError,
    Planned,
    Prediction,
    dry_run,
    fits,
    learn,
    predict_peak,
)
from sigmascope.pipeline.strategies import (
    Choices,
    Decoding,
    Encoding,
    Outcome,
    Tiles,
    Work,
    check_tiles,
    checked,
    direct,
    not_finite,
    on_cpu,
    tiled,
    tiles_asked_for,
)
from sigmascope.pipeline.tile_plan import TilePlan, plan
from sigmascope.pipeline.tiles_together import why_apart
from sigmascope.pipeline.vae_adapters import ComfyuiVae, Vae, adapted
from sigmascope.probes import memory_snapshot
from sigmascope.probes.reading import attempt, describe, is_out_of_memory, keeping_words, node_outputs
from sigmascope.records.latents import (
    RECORD_FACT,
    EncodingEvent,
    EncodingRecord,
    Layout,
    SampleFacts,
    Strategy,
    StrategyAttempt,
    TileFacts,
    attempt_stage,
    strategy_label,
)
from sigmascope.records.run import Finding, Run
from sigmascope.stages.latent_facts import find_latent

__all__ = ["decode_latents", "encode_latents"]

OnEvent = Callable[[EncodingEvent], object]
_CHANNELS_FIRST: dict[int, Layout] = {4: "BCHW", 5: "BCFHW"}
_CHANNELS_LAST: dict[int, Layout] = {4: "BHWC", 5: "BFHWC"}
_CPU = torch.device("cpu")
_DUMMY = Finding(
    id="dummy_latents",
    severity="critical",
    message="The latents are zeros that stand in for an encoding: no picture was encoded.",
    advice="Make room for the encoding: smaller tiles, fewer frames, a lower resolution, or another device.",
    stage="latent_encoding",
)
_ROUND_UP = ("AutoencoderTiny", "AutoencoderKLHunyuanVideo", "AutoencoderKLLTXVideo")
"""VAEs that round a side up to whole latent elements; others drop the rest."""
_NOTHING_PREDICTED = Prediction(unavailable={"bytes": "nothing was predicted"})


def encode_latents(
    vae: object,
    frames: object,
    *,
    strategies: str | Iterable[str] = ("direct", "tiled", "cpu"),
    tile: int | None = None,
    overlap: int | None = None,
    layout: Layout | None = None,
    values: Values | None = None,
    sample: bool = False,
    generator: torch.Generator | None = None,
    output_device: torch.device | str | None = None,
    dummy: bool = False,
    predict: bool = True,
    past: Iterable[Run | EncodingRecord] = (),
    on_event: OnEvent | None = None,
) -> tuple[Tensor, EncodingRecord]:
    """Encode with the first strategy that fits into memory and gives a finite latent.

    The latent is the VAE's own, neither scaled nor shifted: what `vae.encode(x).latent_dist.mode()` gives, with the
    VAE's own tiling and slicing as they are set. The VAE is as before when this returns or raises: placement, dtype, modes, tiling and slicing, buffers.

    Args:
        vae: A VAE of diffusers or ComfyUI, a pipeline that has one, or any object with `encode`.
        frames: A tensor, an array or a PIL image, or a list of them, all of one size; or what a node of ComfyUI gave.
        strategies: In the order in which they are tried: "direct", "tiled", "cpu" (with the weights copied to
            RAM, in tiles if that cannot hold more), "dummy". "auto" takes the first three and passes over what is not
            expected to fit.
        tile: Side of a tile in pixels. None begins with 512, or half of a smaller picture, and halves it
            whenever memory runs out.
        overlap: What tiles share with their neighbours, in pixels; None is a quarter of a tile.
        layout: What each axis of `frames` is, such as "BFCHW"; None decides by where the VAE's channels are.
        values: What the numbers mean: "bytes" 0 to 255, "unit" [0, 1], "signed" [-1, 1]. None: bytes for uint8;
            for floats "unit" with channels last or with ComfyUI's VAE, else "signed".
        sample: Draw the latent from the VAE's distribution; otherwise take its mode.
        generator: Of that draw. A failed attempt leaves its state as it was.
        output_device: Where to put the latent; None: where the VAE computes, whatever the strategy.
        dummy: If everything else fails, give zeros of the right shape. They are not an encoding, and the record says so.
        predict: Predict the peak of each attempt, which takes a fraction of a second the first time for each VAE
            and size. Without it "auto" assumes that all fits, and refuses the CPU for the weights alone.
        past: Runs or records from which the predictions learn, beside the run that is being recorded.
        on_event: Called with an `EncodingEvent` at each beginning and end. What it raises is logged.

    Returns:
        The latent (batch, channels, height, width), or (batch, channels, frames, height, width) of a video, and
        the record of all attempts.

    Raises:
        EveryStrategyFailedError: Memory ran out in all of them; `record` says how each ended.
        NonFiniteError: The result holds NaN or Inf. The message counts them and says what they come from: what went
            in, the weights, or the VAE's type. Where input and weights are finite and in half precision, it does so only if
            "cpu" is not among the strategies or could not compute it in float32. `record` as above.
        ConfigError: Pictures, sizes or options that make no sense.
        ModelMismatchError: The VAE's results do not fit each other or are not tensors.
        Exception: Whatever the VAE raises that is not about memory, unchanged.
    """
    with in_turn(vae):
        choices = checked(strategies, tile, overlap, dummy=dummy, decodes=False)
        adapter = adapted(vae)
        given = pictures(
            _images_of(frames),
            adapter.facts,
            layout=layout,
            values=values,
            default_values=adapter.default_values,
            one_each=adapter.one_each,
            host_has_masks=isinstance(adapter, ComfyuiVae),
        )
        device = None if output_device is None else torch.device(output_device)
        work = Encoding(adapter, given, sample, generator, device)
        return _Engine(work, choices, given.facts, _experience(predict, past), on_event, given.findings).run()


def decode_latents(
    vae: object,
    latents: object,
    *,
    strategies: str | Iterable[str] = ("direct", "tiled", "cpu"),
    tile: int | None = None,
    overlap: int | None = None,
    output_device: torch.device | str | None = None,
    predict: bool = True,
    past: Iterable[Run | EncodingRecord] = (),
    on_event: OnEvent | None = None,
) -> tuple[Tensor, EncodingRecord]:
    """Decode with the first strategy that fits into memory and gives finite pictures.

    Args:
        vae: A VAE of diffusers or ComfyUI, a pipeline that has one, or any object with `decode`.
        latents: The VAE's own, neither scaled nor shifted: (batch, channels, height, width), or
            (batch, channels, frames, height, width) with frames and channels in either order; a tensor, ComfyUI's
            `{"samples": …}`, or what a node gave.
        strategies: As in `encode_latents`, without "dummy".
        tile: Side of a tile in pixels of the pictures to come; None as in `encode_latents`.
        overlap: What tiles share, in such pixels; None is a quarter of a tile.
        output_device: Where to put the pictures; None: where the VAE computes.
        predict: Predict the peak of each attempt, as in `encode_latents`.
        past: Runs or records from which the predictions learn, beside the run that is being recorded.
        on_event: Called with an `EncodingEvent` at each beginning and end. What it raises is logged.

    Returns:
        The pictures as this VAE gives them, and the record of all attempts: [-1, 1] with channels first
        from diffusers, [0, 1] with channels last from ComfyUI.

    Raises:
        EveryStrategyFailedError: Memory ran out in all of them; `record` says how each ended.
        NonFiniteError: The result holds NaN or Inf. The message counts them and says what they come from: what went
            in, the weights, or the VAE's type. Where input and weights are finite and in half precision, it does so only if
            "cpu" is not among the strategies or could not compute it in float32. `record` as above.
        ConfigError: Latents, sizes or options that make no sense.
        ModelMismatchError: The VAE's results do not fit each other or are not tensors.
        Exception: Whatever the VAE raises that is not about memory, unchanged.
    """
    with in_turn(vae):
        choices = checked(strategies, tile, overlap, dummy=False, decodes=True)
        adapter = adapted(vae)
        device = None if output_device is None else torch.device(output_device)
        tensor = _latents_of(latents)
        work = Decoding(adapter, _with_frames(tensor, adapter), device)
        given = sample_facts(tensor, _CHANNELS_FIRST.get(tensor.ndim))
        return _Engine(work, choices, given, _experience(predict, past), on_event).run()


def _images_of(frames: object) -> object:
    """The pictures in what a ComfyUI node gave; anything else as it is."""
    outputs = node_outputs(frames)
    if outputs is frames or not isinstance(outputs, tuple):
        return outputs
    return next((output for output in outputs if isinstance(output, Tensor)), outputs)


def _latents_of(given: object) -> Tensor:
    search = find_latent(given)
    if search.tensor is None:
        raise ConfigError(
            f"latents: {search.reason}.", hint='Give a tensor, or ComfyUI\'s LATENT {"samples": tensor}.'
        )
    return search.tensor


def _with_frames(latents: Tensor, vae: Vae) -> Tensor:
    """The latents as the VAE takes them: for a video VAE, a picture is a video of one frame."""
    facts = vae.facts
    if latents.ndim not in (4, 5) or latents.numel() == 0:
        raise ConfigError(
            f"latents: a tensor of shape {tuple(latents.shape)} is neither (batch, channels, height, width) nor "
            "(batch, channels, frames, height, width).",
            hint="Unpack packed latents first, as the pipeline does before it decodes.",
        )
    if latents.ndim == 5 and latents.shape[1] != facts.latent_channels == latents.shape[2]:
        latents = latents.movedim(2, 1)
    return latents.unsqueeze(2) if facts.is_video and latents.ndim == 4 else latents


def _experience(predict: bool, past: Iterable[Run | EncodingRecord]) -> Experience | None:
    """What some past runs took, and what the run that is being recorded has seen so far; None: nothing is predicted."""
    if not predict:
        return None
    recorder = monitor.current_recorder()
    own = None if recorder is None else attempt(recorder.run).value
    return learn([*past, *([] if own is None else [own])])


@dataclass(frozen=True, slots=True)
class _Planned:
    """An attempt with all that it takes."""

    name: Strategy
    run: Callable[[], Outcome]
    device: torch.device
    tile: TileFacts | None = None
    expected: Prediction = _NOTHING_PREDICTED
    in_float32: bool = False

    def record(self, reason: str | None = None) -> StrategyAttempt:
        """The attempt's record before it begins, with the reason if it is skipped."""
        unknown = self.expected.unavailable.get("bytes")
        return StrategyAttempt(
            self.name,
            "skipped",
            reason=reason,
            device=str(self.device),
            predicted_peak_bytes=self.expected.bytes,
            prediction_basis=self.expected.basis,
            tile=self.tile,
            unavailable={} if unknown is None else {"predicted_peak_bytes": unknown},
        )


@dataclass(slots=True)
class _Engine:
    """One encoding or decoding from first to last."""

    work: Work
    choices: Choices
    given: SampleFacts
    experience: Experience | None
    on_event: OnEvent | None
    findings: tuple[Finding, ...] = ()
    attempts: list[StrategyAttempt] = field(default_factory=list)
    diagnosis: "_Diagnosis | None" = None
    guard: Guard = field(default_factory=Guard)

    def run(self) -> tuple[Tensor, EncodingRecord]:
        """The result and the record.

        Raises:
            ConfigError: Tiles of a size that cannot work.
            EveryStrategyFailedError: Memory ran out in all of them.
            NonFiniteError: The result is not finite.
        """
        check_tiles(self.choices, self.work)
        recorder = monitor.current_recorder()
        name = f"latent_{self.work.direction}"
        if recorder is not None:
            with keeping_words(recorder.keeps_words):
                return self._watched(recorder.stage(name))
        with Recorder(name) as recorder:
            return self._watched(recorder.stage(name))

    def _watched(self, stage: LiveStage) -> tuple[Tensor, EncodingRecord]:
        direction = self.work.direction
        self._tell(EncodingEvent("began", direction, input=self.given))
        began = time.perf_counter()
        outcome: Outcome | None = None
        try:
            with stage:
                outcome = self._first_of(self._planned())
                if outcome is None and self.diagnosis is not None:
                    outcome = self._first_of(self._planned_after(self.diagnosis))
                if outcome is None:
                    raise _failure(self._record(None, time.perf_counter() - began), self.diagnosis)
        finally:
            record = self._record(outcome, time.perf_counter() - began)
            # A monitor that fails is no reason to lose a result.
            self.guard.read("stage", lambda: stage.fact(RECORD_FACT, record.as_dict()))
            if outcome is not None:
                name, tensor = "latent" if direction == "encoding" else "frames", outcome.tensor
                self.guard.read("stage", lambda: stage.tensor(name, tensor))
            self._tell(EncodingEvent("ended", direction, record=record))
        return outcome.tensor, record

    def _first_of(self, attempts: "Iterable[_Planned | StrategyAttempt]") -> Outcome | None:
        """The first result; None if none succeeded, or if one was not finite, which needs other strategies."""
        diagnosis = self.diagnosis
        for planned in attempts:
            if isinstance(planned, StrategyAttempt):
                self._ended(planned)
                continue
            outcome = self._try(planned)
            if outcome is not None:
                return outcome
            if diagnosis is None and self.diagnosis is not None:
                return None
        return None

    def _planned(self) -> Iterator[_Planned | StrategyAttempt]:
        """All attempts in the order asked for: one to make, or the record of one that is passed over."""
        for strategy in self.choices.strategies:
            if strategy == "direct":
                yield self._unless_too_large(
                    self._plan("direct", partial(direct, self.work), self.work.vae.device)
                )
            elif strategy == "tiled":
                yield from self._tiled()
            elif strategy == "cpu":
                yield self._cpu()
            else:
                yield self._dummy()

    def _planned_after(self, diagnosis: "_Diagnosis") -> Iterator[_Planned | StrategyAttempt]:
        """What is left to try after NaN or Inf, which smaller pieces would not mend."""
        if diagnosis.float32_may_help and "cpu" in self.choices.strategies:
            planned = self._cpu_in_float32()
            reason = why_not_in_float32(self.work.vae.modules) or self._why_not_enough_ram(planned)
            yield planned if reason is None else planned.record(reason)
        if "dummy" in self.choices.strategies:
            yield self._dummy()

    def _tiled(self) -> Iterator[_Planned | StrategyAttempt]:
        """The largest tiles that fit, or from the largest on where nothing is predicted."""
        *larger, smallest = self.choices.ladder(self.work)
        for tiles in larger:
            planned = self._unless_too_large(self._in_tiles(tiles))
            if isinstance(planned, _Planned):
                yield planned
        yield self._unless_too_large(self._in_tiles(smallest))

    def _in_tiles(self, tiles: Tiles) -> _Planned:
        """Tiles side by side; one after the other if RAM cannot hold those that wait for their turn."""
        work, device = self.work, self.work.vae.device
        together = not isinstance(work.vae, ComfyuiVae) and why_apart(work.vae.modules) is None
        planned = self._plan("tiled", partial(tiled, work, tiles), device, tiles, together=together)
        in_ram = together and device.type == "cpu"
        reason = _why_not_fitting(planned.expected, _CPU) if in_ram else None
        if reason is None:
            return planned
        return self._plan("tiled", partial(tiled, work, tiles, apart=reason), device, tiles)

    def _cpu(self) -> _Planned | StrategyAttempt:
        """At once if RAM can hold that, else in the largest tiles that fit."""
        work = self.work
        whole = self._plan("cpu", partial(on_cpu, work), _CPU)
        unreadable = why_not_in_ram(work.vae.modules)
        if unreadable is not None:
            return whole.record(unreadable)
        reason = self._why_not_enough_ram(whole)
        if reason is None:
            return whole
        for tiles in self.choices.ladder(work):
            in_tiles = self._plan("cpu", partial(on_cpu, work, tiles), _CPU, tiles)
            if self._why_not_enough_ram(in_tiles) is None:
                return in_tiles
        return whole.record(reason)

    def _cpu_in_float32(self) -> _Planned:
        """Everything takes twice what it takes in half precision, and so do weights that are in RAM already."""
        modules = self.work.vae.modules
        planned = self._plan("cpu", partial(on_cpu, self.work, in_float32=True), _CPU)
        expected = planned.expected
        if expected.bytes is not None:
            nbytes = 2 * expected.bytes + nbytes_widened(modules) - 2 * nbytes_to_copy(modules)
            expected = replace(expected, bytes=max(nbytes, 0))
        return replace(planned, expected=expected, in_float32=True)

    def _dummy(self) -> _Planned:
        device = self.work.output_device or self.work.vae.home
        return _Planned("dummy", lambda: Outcome(_dummy_latents(self.work, device)), device)

    def _why_not_enough_ram(self, planned: _Planned) -> str | None:
        if planned.expected.bytes is None:
            copies = nbytes_widened if planned.in_float32 else nbytes_to_copy
            return why_not_enough(copies(self.work.vae.modules), free_ram())
        return _why_not_fitting(planned.expected, _CPU)

    def _unless_too_large(self, planned: _Planned) -> _Planned | StrategyAttempt:
        only_what_fits = self.choices.only_what_fits
        reason = _why_not_fitting(planned.expected, planned.device) if only_what_fits else None
        return planned if reason is None else planned.record(reason)

    def _plan(
        self,
        name: Strategy,
        run: Callable[[], Outcome],
        device: torch.device,
        tiles: Tiles | None = None,
        *,
        together: bool = False,
    ) -> _Planned:
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
            return _Planned(name, run, device, facts)
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
        return _Planned(name, run, device, facts, prediction.value or failure)

    def _try(self, planned: _Planned) -> Outcome | None:
        direction = self.work.direction
        self._tell(EncodingEvent("attempt_began", direction, strategy=planned.name, tile=planned.tile))
        try:
            outcome, record = self._run_attempt(planned)
        except BaseException as error:
            self._ended(_failed(planned.record(), error))
            raise
        if record.error_type == NonFiniteError.__name__:
            diagnosis = self.diagnosis = _why_not_finite(planned, self.work, self.choices.strategies)
            record = replace(record, reason=f"{record.reason}: {diagnosis.cause}. {diagnosis.advice}")
        self._ended(record)
        return outcome

    def _run_attempt(self, planned: _Planned) -> tuple[Outcome | None, StrategyAttempt]:
        """Make an attempt. Running out of memory is an outcome, and so is a result that is not finite.

        Anything else that is raised passes unchanged. After a failure nothing of the attempt is alive, caches of the
        device are emptied, and the generator is as it was.
        """
        handled = sys.exception()
        generator = self.work.generator
        state = None if generator is None else generator.get_state()
        stage = monitor.stage(attempt_stage(planned.name, self.work.direction))
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
            record = _failed(record, error)
            let_go(error, handled)
        record = replace(record, seconds=time.perf_counter() - began)
        if outcome is None:
            free_memory(planned.device)
            if generator is not None and state is not None:
                generator.set_state(state)
        return outcome, _with_memory(record, stage, planned.device)

    def _ended(self, record: StrategyAttempt) -> None:
        self.attempts.append(record)
        self._tell(EncodingEvent("attempt_ended", self.work.direction, attempt=record))

    def _record(self, outcome: Outcome | None, seconds: float) -> EncodingRecord:
        work = self.work
        last = self.attempts[-1].name if self.attempts and outcome is not None else None
        record = EncodingRecord(
            direction=work.direction,
            success=outcome is not None,
            strategy=last,
            attempts=tuple(self.attempts),
            seconds=seconds,
            vae=work.vae.facts,
            input=self.given,
            dummy=last == "dummy",
            findings=(*self.findings, _DUMMY) if last == "dummy" else self.findings,
        )
        if outcome is None:
            return replace(record, unavailable={"output": "no strategy gave a result"})
        pictures_last = work.direction == "decoding" and work.vae.values == "unit"
        layouts = _CHANNELS_LAST if pictures_last else _CHANNELS_FIRST
        tensor = outcome.tensor
        output = attempt(lambda: _known_finite(sample_facts(tensor, layouts.get(tensor.ndim))))
        reasons = {} if output.reason is None else {"output": output.reason}
        return replace(record, output=output.value, unavailable=reasons)

    def _tell(self, event: EncodingEvent) -> None:
        on_event = self.on_event
        if on_event is not None:
            self.guard.read("on_event", lambda: on_event(event))


def _why_not_fitting(expected: Prediction, device: torch.device) -> str | None:
    """The reason with numbers, if a device cannot hold that much beside what it holds. Never raises."""
    memory = attempt(memory_snapshot).value
    if memory is None:
        return None
    memory = replace(memory, ram_available_bytes=free_ram().free_bytes)
    fitting, words = fits(expected, memory, str(device))
    return None if fitting else words


def _with_memory(record: StrategyAttempt, stage: object, device: torch.device) -> StrategyAttempt:
    """The record with its peak, in all and beyond what was in use on the device when it began."""
    watched = attempt(stage.record).value if isinstance(stage, LiveStage) else None
    if watched is None or watched.peak is None:
        reasons = dict.fromkeys(("peak", "measured_peak_bytes"), "nothing watched the attempt")
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


def _failed(record: StrategyAttempt, error: BaseException) -> StrategyAttempt:
    """The record of an attempt that ended in an error, of which only words are kept."""
    return replace(record, outcome="failed", reason=describe(error), error_type=type(error).__name__)


def _known_finite(facts: SampleFacts) -> SampleFacts:
    """Of what succeeded this is known, also where nothing else was read from its device."""
    tensor = facts.tensor
    if tensor.nan_count is not None:
        return facts
    reasons = {
        name: why for name, why in tensor.unavailable.items() if name not in ("nan_count", "inf_count")
    }
    return replace(facts, tensor=replace(tensor, nan_count=0, inf_count=0, unavailable=reasons))


@dataclass(frozen=True, slots=True)
class _Diagnosis:
    """What NaN or Inf in a result come from.

    Attributes:
        cause: In words.
        advice: What to do about it.
        float32_may_help: Whether what went in and the weights are finite, and of half precision.
    """

    cause: str
    advice: str
    float32_may_help: bool = False


def _why_not_finite(tried: _Planned, work: Work, strategies: Iterable[str]) -> _Diagnosis:
    """Why the result of an attempt is not finite: what went in, else the weights, else the VAE's type."""
    what = "pictures" if work.direction == "encoding" else "latents"
    broken = attempt(lambda: not_finite(work.source)).value
    if broken:
        return _Diagnosis(
            f"the {what} given to it hold {broken}", f"Repair the {what}: no strategy can work around that."
        )
    weights = attempt(lambda: _broken_weights(work)).value
    if weights:
        return _Diagnosis(
            f"the VAE's weights are not finite: {weights}", "Load the VAE again, or another file."
        )
    dtype = work.vae.dtype
    if tried.in_float32 or dtype not in HALVES:
        return _Diagnosis(
            f"the {what} and the VAE's weights are finite, so the VAE makes them"
            + (", even in float32" if tried.in_float32 else ""),
            f"Check that the {what} are in the range that this VAE was trained on.",
        )
    name = str(dtype).removeprefix("torch.")
    wider = "bfloat16 or float32" if dtype == torch.float16 else "float32"
    also = "" if "cpu" in strategies else ', or name "cpu" in strategies=, which then computes in float32'
    return _Diagnosis(f"the VAE overflows in {name}", f"Use {wider}{also}.", float32_may_help=True)


def _broken_weights(work: Work) -> str | None:
    """The first of them by name with its counts, and how many more there are."""
    named = [
        f"{name} ({broken})"
        for module in work.vae.modules
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if (broken := attempt(partial(not_finite, tensor)).value)
    ]
    if not named:
        return None
    return named[0] + (f", and {len(named) - 1} more" if len(named) > 1 else "")


def _failure(
    record: EncodingRecord, diagnosis: _Diagnosis | None
) -> EveryStrategyFailedError | NonFiniteError:
    ends = "; ".join(
        f"{strategy_label(tried.name, record.direction)} {tried.outcome}: {tried.reason}"
        for tried in record.attempts
    )
    if diagnosis is not None:
        what = "latents" if record.direction == "encoding" else "pictures"
        message = f"The VAE's {what} are not finite. {ends}".removesuffix(f" {diagnosis.advice}")
        return NonFiniteError(message, record=record, hint=diagnosis.advice)
    return EveryStrategyFailedError(
        f"The VAE's memory ran out. {ends}",
        record=record,
        hint="Give fewer or smaller pictures, a smaller tile=, or free memory first.",
    )


def _dummy_latents(work: Work, device: torch.device) -> Tensor:
    """Zeros shaped as the latents of these pictures would be.

    The shape comes from a run of the VAE without weights where that works, else from its factors.
    """
    assert isinstance(work, Encoding)  # decoding has no such strategy
    shape = _shape_seen(work.vae, work.source) or _shape_told(work.vae, work.source)
    zeros = torch.zeros(shape, dtype=work.vae.latent_dtype, device=device)
    return unfolded(zeros, work.pictures.frames)


def _shape_seen(vae: Vae, pixels: Tensor) -> tuple[int, ...] | None:
    """Of one picture or video, so that slicing and the size of the batch do not matter."""
    if isinstance(vae, ComfyuiVae) or not hasattr(vae.vae, "config"):
        return None
    try:
        run = dry_run(vae.vae, (1, *pixels.shape[1:]), "encoding")
    except NoTwinError:
        return None
    return (pixels.shape[0], *run.result_shape[1:])


def _shape_told(vae: Vae, pixels: Tensor) -> tuple[int, ...]:
    facts = vae.facts
    channels, factor = facts.latent_channels, facts.spatial_factor
    needed = {"latent_channels": channels, "spatial_factor": factor}
    if facts.is_video:
        needed["temporal_factor"] = facts.temporal_factor
    missing = ", ".join(name for name, value in needed.items() if value is None)
    if missing or channels is None or factor is None:
        raise ConfigError(f"dummy: the VAE does not say its {missing}.", hint="Leave dummy latents out.")
    batch, _, *frames, height, width = pixels.shape
    rest = factor - 1 if facts.class_name in _ROUND_UP else 0
    sides = [(length + rest) // factor for length in (height, width)]
    return (batch, channels, *(facts.latent_frames(count) or 1 for count in frames), *sides)
