"""One try of one strategy: watched, timed, and if memory runs out, over without a trace."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from sigmascope import monitor
from sigmascope.monitor.live import LiveStage
from sigmascope.pipeline.forecast import Expected
from sigmascope.pipeline.out_of_memory import free_memory, is_out_of_memory, let_go
from sigmascope.pipeline.strategies import Outcome
from sigmascope.probes.reading import attempt as read
from sigmascope.probes.reading import describe
from sigmascope.records.latents import StrategyAttempt, TileFacts
from sigmascope.records.run import Stage
from sigmascope.records.strategies import Direction, Strategy, attempt_stage

NOT_MEASURED = "nothing watched the attempt"


@dataclass(frozen=True, slots=True)
class Try:
    """A strategy with all that it takes.

    Attributes:
        name: Which strategy.
        run: Does it.
        device: Where the VAE runs.
        tile: How it will be cut, where that is known before.
        expected: What it will take.
    """

    name: Strategy
    run: Callable[[], Outcome]
    device: torch.device
    tile: TileFacts | None = None
    expected: Expected = field(default_factory=Expected)

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


def made(
    one: Try, direction: Direction, generator: torch.Generator | None
) -> tuple[Outcome | None, StrategyAttempt]:
    """Make the attempt. Running out of memory is an outcome; anything else that is raised passes unchanged.

    After running out of memory nothing of the attempt is alive, caches of the device are emptied, and the
    generator is as it was.

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
        if not is_out_of_memory(error):
            raise
        outcome = None
        record = failed(record, error)
        let_go(error, handled)
    record = replace(record, seconds=time.perf_counter() - began)
    if outcome is None:
        _clean_up(one.device, generator, state)
    return outcome, _with_memory(record, stage, one.device)


def failed(record: StrategyAttempt, error: BaseException) -> StrategyAttempt:
    """The record of an attempt that ended in an error, of which only words are kept."""
    return replace(record, outcome="failed", reason=describe(error), error_type=type(error).__name__)


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
    seen = read(stage.record).value if isinstance(stage, LiveStage) else None
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
