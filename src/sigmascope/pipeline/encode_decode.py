"""Encode pictures and decode latents with any VAE, in whichever way memory allows.

`encode_latents` and `decode_latents` prepare the work and give it to `Engine`, which tries one strategy after
another until one gives a result, and keeps a record of all. When memory runs out, the next strategy is tried with
nothing of the failed attempt alive. A result with NaN or Inf is a failed attempt too: where half precision is to blame,
the CPU tries it in float32. Any other error is the VAE's or the caller's, and passes unchanged.

`dummy_latents` is the last resort, on request: zeros of the shape that the real latents would have had. They encode
nothing.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sigmascope import monitor
from sigmascope.errors import ConfigError, EveryStrategyFailedError, NonFiniteError
from sigmascope.monitor import Recorder
from sigmascope.monitor.guard import Guard
from sigmascope.pipeline.attempts import (
    Diagnosis,
    Tries,
    Try,
    experience_from,
    failed,
    run_attempt,
    why_not_finite,
)
from sigmascope.pipeline.image_preprocessing import Pictures, Values, pictures, sample_facts, unfolded
from sigmascope.pipeline.model_state import in_turn
from sigmascope.pipeline.peak_prediction import NoTwinError, dry_run
from sigmascope.pipeline.strategies import Decoding, Encoding, Outcome, check_tiles, checked
from sigmascope.pipeline.vae_adapters import ComfyuiVae, Vae, adapted
from sigmascope.probes.reading import attempt, keeping_words, node_outputs
from sigmascope.records.latents import (
    RECORD_FACT,
    EncodingEvent,
    EncodingRecord,
    Layout,
    SampleFacts,
    StrategyAttempt,
    VaeFacts,
    strategy_label,
)
from sigmascope.records.run import Finding, Run
from sigmascope.stages.latent_facts import find_latent

OnEvent = Callable[[EncodingEvent], object]
_CHANNELS_FIRST: dict[int, Layout] = {4: "BCHW", 5: "BCFHW"}
_CHANNELS_LAST: dict[int, Layout] = {4: "BHWC", 5: "BFHWC"}
FINDING = Finding(
    id="dummy_latents",
    severity="critical",
    message="The latents are zeros that stand in for an encoding: no picture was encoded.",
    advice="Make room for the encoding: smaller tiles, fewer frames, a lower resolution, or another device.",
    stage="latent_encoding",
)
_ROUND_UP = ("AutoencoderTiny", "AutoencoderKLHunyuanVideo", "AutoencoderKLLTXVideo")
"""VAEs that make one latent element more of a side that is no multiple of their factor; others drop the rest."""


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
    """Encode with the first strategy that does not run out of memory, to a latent that is finite.

    The latent is the VAE's own, neither scaled nor shifted: what `vae.encode(x).latent_dist.mode()` gives. The
    VAE is as before when this returns or raises: placement, dtype, modes, tiling and slicing, buffers.

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
        output_device: Where the latent shall be; None: where the VAE computes, whatever the strategy.
        dummy: Where all else fails, give zeros of the right shape. They are no encoding, and the record says so.
        predict: Foretell the peak of each attempt, which takes a part of a second the first time for each VAE
            and size. Without it "auto" takes everything to fit, and the CPU is refused for the weights alone.
        past: Runs or records from which the predictions learn, beside the run that is being recorded.
        on_event: Called with an `EncodingEvent` at each beginning and end. What it raises is logged.

    Returns:
        The latent (batch, channels, height, width), or (batch, channels, frames, height, width) of a video, and
        the record of all attempts.

    Raises:
        EveryStrategyFailedError: Memory ran out in all of them; `record` says how each ended.
        NonFiniteError: The result holds NaN or Inf. The message counts them and says what they come from: what went
            in, the weights, or the VAE's type. Of finite input and weights in half precision, it does so only where
            "cpu" is not among the strategies or could not compute it in float32. `record` as above.
        ConfigError: Pictures, sizes or options that make no sense.
        ModelMismatchError: The VAE's results do not fit each other or are no tensors.
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
        check_tiles(choices, work)

        def stand_in() -> Outcome:
            return Outcome(dummy_latents(adapter, given, device or adapter.home))

        tries = Tries(work, choices, experience_from(past) if predict else None, stand_in)
        return Engine(tries, given.facts, _CHANNELS_FIRST, on_event, FINDING, given.findings).run()


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
    """Decode with the first strategy that does not run out of memory, to pictures that are finite.

    Args:
        vae: A VAE of diffusers or ComfyUI, a pipeline that has one, or any object with `decode`.
        latents: The VAE's own, neither scaled nor shifted: (batch, channels, height, width), or
            (batch, channels, frames, height, width) with frames and channels in either order; a tensor, ComfyUI's
            `{"samples": …}`, or what a node gave.
        strategies: As in `encode_latents`, without "dummy".
        tile: Side of a tile in pixels of the pictures to come; None as in `encode_latents`.
        overlap: What tiles share, in such pixels; None is a quarter of a tile.
        output_device: Where the pictures shall be; None: where the VAE computes.
        predict: Foretell the peak of each attempt, as in `encode_latents`.
        past: Runs or records from which the predictions learn, beside the run that is being recorded.
        on_event: Called with an `EncodingEvent` at each beginning and end. What it raises is logged.

    Returns:
        The pictures as this VAE gives them, and the record of all attempts: [-1, 1] with channels first
        from diffusers, [0, 1] with channels last from ComfyUI.

    Raises:
        EveryStrategyFailedError: Memory ran out in all of them; `record` says how each ended.
        NonFiniteError: The result holds NaN or Inf. The message counts them and says what they come from: what went
            in, the weights, or the VAE's type. Of finite input and weights in half precision, it does so only where
            "cpu" is not among the strategies or could not compute it in float32. `record` as above.
        ConfigError: Latents, sizes or options that make no sense.
        ModelMismatchError: The VAE's results do not fit each other or are no tensors.
        Exception: Whatever the VAE raises that is not about memory, unchanged.
    """
    with in_turn(vae):
        choices = checked(strategies, tile, overlap, dummy=False, decodes=True)
        adapter = adapted(vae)
        device = None if output_device is None else torch.device(output_device)
        tensor = _latents_of(latents)
        work = Decoding(adapter, _with_frames(tensor, adapter), device)
        check_tiles(choices, work)
        given = sample_facts(tensor, _CHANNELS_FIRST.get(tensor.ndim))
        layouts = _CHANNELS_LAST if adapter.values == "unit" else _CHANNELS_FIRST

        tries = Tries(work, choices, experience_from(past) if predict else None)
        return Engine(tries, given, layouts, on_event).run()


def _images_of(frames: object) -> object:
    """The pictures of a node of ComfyUI, which may give more beside them; else what was given."""
    outputs = node_outputs(frames)
    if outputs is frames or not isinstance(outputs, tuple):
        return outputs
    return next((output for output in outputs if isinstance(output, Tensor)), outputs)


def _latents_of(given: object) -> Tensor:
    """The tensor in what was given.

    Raises:
        ConfigError: There is none.
    """
    search = find_latent(given)
    if search.tensor is None:
        raise ConfigError(
            f"latents: {search.reason}.", hint='Give a tensor, or ComfyUI\'s LATENT {"samples": tensor}.'
        )
    return search.tensor


def _with_frames(latents: Tensor, vae: Vae) -> Tensor:
    """The latents as the VAE takes them: a picture of a VAE of videos is a video of one frame.

    Raises:
        ConfigError: They are packed or empty.
    """
    facts = vae.facts
    if latents.ndim not in (4, 5) or latents.numel() == 0:
        raise ConfigError(
            f"latents: a tensor of shape {tuple(latents.shape)} is neither (batch, channels, height, width) nor a "
            "video of such.",
            hint="Unpack packed latents first, as the pipeline does before it decodes.",
        )
    if latents.ndim == 5 and latents.shape[1] != facts.latent_channels == latents.shape[2]:
        latents = latents.movedim(2, 1)
    return latents.unsqueeze(2) if facts.is_video and latents.ndim == 4 else latents


@dataclass(slots=True)
class Engine:
    """One encoding or decoding from first to last."""

    tries: Tries
    given: SampleFacts
    layouts: Mapping[int, Layout]
    on_event: OnEvent | None = None
    dummy_finding: Finding | None = None
    findings: tuple[Finding, ...] = ()
    attempts: list[StrategyAttempt] = field(default_factory=list)
    _diagnosis: Diagnosis | None = None
    _guard: Guard = field(default_factory=Guard)

    def run(self) -> tuple[Tensor, EncodingRecord]:
        """The result and the record.

        Raises:
            EveryStrategyFailedError: Memory ran out in all of them.
            NonFiniteError: The result is not finite.
        """
        recorder = monitor.current_recorder()
        name = f"latent_{self.tries.work.direction}"
        if recorder is not None:
            with keeping_words(recorder.keeps_words):
                return self._watched(monitor.stage(name))
        with Recorder(name):
            return self._watched(monitor.stage(name))

    def _watched(self, stage: Any) -> tuple[Tensor, EncodingRecord]:
        direction = self.tries.work.direction
        self._tell(EncodingEvent("began", direction, input=self.given))
        began = time.perf_counter()
        outcome: Outcome | None = None
        try:
            with stage:
                outcome = self._first_of(self.tries)
                if outcome is None and self._diagnosis is not None:
                    outcome = self._first_of(self.tries.after_not_finite(self._diagnosis))
                if outcome is None:
                    raise _failure(self._record(None, time.perf_counter() - began), self._diagnosis)
        finally:
            record = self._record(outcome, time.perf_counter() - began)
            # What a monitor makes of it is no reason to lose a result.
            self._guard.read("stage", lambda: stage.fact(RECORD_FACT, record.as_dict()))
            if outcome is not None:
                name, tensor = "latent" if direction == "encoding" else "frames", outcome.tensor
                self._guard.read("stage", lambda: stage.tensor(name, tensor))
            self._tell(EncodingEvent("ended", direction, record=record))
        return outcome.tensor, record

    def _first_of(self, tries: Iterable[Try | StrategyAttempt]) -> Outcome | None:
        """The first result; None after all of them, or where one was not finite, which calls for other ways."""
        diagnosis = self._diagnosis
        for planned in tries:
            if isinstance(planned, StrategyAttempt):
                self._ended(planned)
                continue
            outcome = self._try(planned)
            if outcome is not None:
                return outcome
            if diagnosis is None and self._diagnosis is not None:
                return None
        return None

    def _try(self, planned: Try) -> Outcome | None:
        work = self.tries.work
        self._tell(EncodingEvent("attempt_began", work.direction, strategy=planned.name))
        try:
            outcome, record = run_attempt(planned, work.direction, work.generator)
        except BaseException as error:
            self._ended(failed(planned.record(), error))
            raise
        if record.error_type == NonFiniteError.__name__:
            diagnosis = self._diagnosis = why_not_finite(planned, work, self.tries.choices.strategies)
            record = replace(record, reason=f"{record.reason}: {diagnosis.cause}. {diagnosis.advice}")
        self._ended(record)
        return outcome

    def _ended(self, record: StrategyAttempt) -> None:
        self.attempts.append(record)
        self._tell(EncodingEvent("attempt_ended", self.tries.work.direction, attempt=record))

    def _record(self, outcome: Outcome | None, seconds: float) -> EncodingRecord:
        last = self.attempts[-1].name if self.attempts and outcome is not None else None
        work = self.tries.work
        record = EncodingRecord(
            direction=work.direction,
            success=outcome is not None,
            strategy=last,
            attempts=tuple(self.attempts),
            seconds=seconds,
            vae=work.vae.facts,
            input=self.given,
            dummy=last == "dummy",
            findings=self.findings,
        )
        if outcome is None:
            return replace(record, unavailable={"output": "no strategy gave a result"})
        of_dummy = () if self.dummy_finding is None or last != "dummy" else (self.dummy_finding,)
        tensor = outcome.tensor
        output = attempt(lambda: _known_finite(sample_facts(tensor, self.layouts.get(tensor.ndim))))
        reasons = {} if output.reason is None else {"output": output.reason}
        findings = (*self.findings, *of_dummy)
        return replace(record, output=output.value, findings=findings, unavailable=reasons)

    def _tell(self, event: EncodingEvent) -> None:
        on_event = self.on_event
        if on_event is not None:
            self._guard.read("on_event", lambda: on_event(event))


def _known_finite(facts: SampleFacts) -> SampleFacts:
    """Of what succeeded this is known, also where nothing else was read from its device."""
    tensor = facts.tensor
    if tensor.nan_count is not None:
        return facts
    reasons = {
        name: why for name, why in tensor.unavailable.items() if name not in ("nan_count", "inf_count")
    }
    return replace(facts, tensor=replace(tensor, nan_count=0, inf_count=0, unavailable=reasons))


def _failure(
    record: EncodingRecord, diagnosis: Diagnosis | None
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


def dummy_latents(vae: Vae, pictures: Pictures, device: torch.device) -> Tensor:
    """Zeros shaped as the latents of these pictures would be.

    A run of the VAE without weights tells the shape, where that can be had; else its factors do.

    Raises:
        ConfigError: Neither tells enough for the shape.
    """
    shape = _shape_seen(vae, pictures.tensor) or _shape_told(vae.facts, pictures.tensor)
    return unfolded(torch.zeros(shape, dtype=vae.latent_dtype, device=device), pictures.frames)


def _shape_seen(vae: Vae, pixels: Tensor) -> tuple[int, ...] | None:
    """Of one picture or video, so that slicing and the size of the batch do not matter."""
    if isinstance(vae, ComfyuiVae) or not hasattr(vae.vae, "config"):
        return None
    try:
        run = dry_run(vae.vae, (1, *pixels.shape[1:]), "encoding")
    except NoTwinError:
        return None
    return (pixels.shape[0], *run.result_shape[1:])


def _shape_told(facts: VaeFacts, pixels: Tensor) -> tuple[int, ...]:
    reason = why_no_dummy(facts)
    if reason is not None or facts.latent_channels is None or facts.spatial_factor is None:
        raise ConfigError(f"dummy: {reason}.", hint="Leave dummy latents out.")
    batch, _, *frames, height, width = pixels.shape
    sides = [_latent_length(length, facts.spatial_factor, facts.class_name) for length in (height, width)]
    times = [facts.latent_frames(count) or 1 for count in frames]
    return (batch, facts.latent_channels, *times, *sides)


def why_no_dummy(facts: VaeFacts) -> str | None:
    """What would have to be known for a dummy of the right shape, or None."""
    known = {
        "latent_channels": facts.latent_channels,
        "spatial_factor": facts.spatial_factor,
        "temporal_factor": facts.temporal_factor if facts.is_video else 1,
    }
    missing = [name for name, value in known.items() if value is None]
    return f"the VAE does not tell its {', '.join(missing)}" if missing else None


def _latent_length(length: int, factor: int, class_name: str) -> int:
    return -(-length // factor) if class_name in _ROUND_UP else length // factor
