"""What Prometheus is given: requests, and the stages, steps, queue and memory of generations. `docs/metrics.md` lists the names.

The package prometheus-client counts. Where `PROMETHEUS_MULTIPROC_DIR` names a folder, all processes that it names count into
files there, and each of them answers for all.
"""

import os
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Final

from sigmascope.errors import ConfigError
from sigmascope.files import atomic_path, has_ended
from sigmascope.installation import install_extra
from sigmascope.records.performance import RequestRecord
from sigmascope.records.prompts import PromptPrivacy
from sigmascope.records.run import Run
from sigmascope.reports.measurements import (
    OUTCOME_LABELS,
    STAGE_BUCKETS,
    STEP_BUCKETS,
    VERDICTS,
    Labels,
    Measured,
    measured,
    model_label,
)
from sigmascope.reports.surfaces import Surface

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
MULTIPROCESS: Final = "PROMETHEUS_MULTIPROC_DIR"
"""The environment variable of prometheus-client that names the folder of all processes' files."""
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"})
"""Clients may invent methods, and every label's value is kept for good."""
_REQUEST_BUCKETS: Final = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)


class Metrics:
    """Counters in a registry of their own; with `PROMETHEUS_MULTIPROC_DIR`, in that folder's files.

    Raises:
        ConfigError: prometheus-client is not installed, the folder does not exist, or no file can be used there.
    """

    def __init__(self) -> None:
        try:
            self._make()
        except (OSError, RuntimeError, ValueError, struct.error) as failure:
            folder = os.environ.get(MULTIPROCESS)
            if folder is None:
                raise
            raise ConfigError(
                f"Metrics cannot be counted in {folder}, which {MULTIPROCESS} names: {failure}.",
                hint="Empty it before the server starts, and let the server write there.",
            ) from failure

    def _make(self) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, values
        except ImportError:
            raise ConfigError(
                "Metrics need the package prometheus-client.",
                hint=f"Install it with: {install_extra('prometheus')}",
            ) from None
        folder = os.environ.get(MULTIPROCESS)
        if folder and not Path(folder).is_dir():
            raise ConfigError(
                f"{MULTIPROCESS} names {folder}, which is no folder.",
                hint="Make it, empty, before the server starts.",
            )
        self.is_multiprocess = bool(folder)
        if self.is_multiprocess and not getattr(values.ValueClass, "_multiprocess", False):
            raise ConfigError(
                f"{MULTIPROCESS} was set after prometheus_client was imported, which then counts for one process.",
                hint="Set it before the server starts.",
            )
        self.labels = Labels()
        self._lock = Lock()
        self._registry = CollectorRegistry()
        counter = partial(Counter, namespace="sigmascope", registry=self._registry)
        histogram = partial(Histogram, namespace="sigmascope", registry=self._registry)
        gauge = partial(Gauge, namespace="sigmascope", registry=self._registry)

        self._requests = counter("requests", "Requests answered.", ["method", "status", "route"])
        self._request_seconds = histogram(
            "request_seconds", "Seconds a request took.", ["route"], buckets=_REQUEST_BUCKETS
        )
        self._response_bytes = counter("response_bytes", "Bytes of response bodies.")
        gone = "Clients that went away before their response was complete."
        self._disconnected = counter("disconnects", gone)
        self._in_flight = gauge("requests_in_flight", "Requests being served.", multiprocess_mode="livesum")
        self._generation_seconds = histogram(
            "generation_seconds", "Seconds a generation took.", ["model"], buckets=_REQUEST_BUCKETS
        )
        missed = "Generations that missed their target."
        self._missed = counter("generation_targets_missed", missed, ["model"])

        self._generations = counter(
            "generations", "Generations that ended.", ["pipeline", "outcome", "route"]
        )
        self._stage_seconds = histogram(
            "stage_seconds", "Seconds a stage took.", ["pipeline", "stage"], buckets=STAGE_BUCKETS
        )
        self._step_seconds = histogram(
            "step_seconds", "Seconds a denoising step took.", ["pipeline"], buckets=STEP_BUCKETS
        )
        self._queue_seconds = histogram(
            "queue_wait_seconds",
            "Seconds a generation waited before it began.",
            ["pipeline", "route"],
            buckets=STAGE_BUCKETS,
        )
        self._peak_bytes = gauge(
            "peak_memory_bytes",
            "Highest bytes that PyTorch allocated on a device during a generation or stage; of the process, resident bytes.",
            ["pipeline", "device"],
            multiprocess_mode="max",
        )
        self._device_bytes = gauge(
            "device_memory_bytes", "Bytes of memory that a device has.", ["device"], multiprocess_mode="max"
        )
        self._verdicts = counter("lora_verdicts", "LoRAs by what they did.", ["pipeline", "verdict"])
        self._dropped = counter(
            "dropped",
            "Runs that were not exported, and values of labels that were counted as other.",
            ["what"],
        )
        self._told: dict[str, int] = {}
        self._peaks: dict[tuple[str, str], int] = {}
        for what in ("runs", "files", *self.labels.folded()):
            self._dropped.labels(what)
        self._unreadable: set[str] = set()

    def add_request(self, record: RequestRecord) -> None:
        """Count a request and its generations."""
        status = "none" if record.status is None else str(record.status)
        method = record.method if record.method in _METHODS else "other"
        route = self.labels.route.of(record.route)
        self._requests.labels(method, status, route).inc()
        self._request_seconds.labels(route).observe(record.seconds)
        self._response_bytes.inc(record.response_bytes)
        if record.disconnected:
            self._disconnected.inc()
        for generation in record.generations:
            seconds = generation.get("total_generation_time")
            model = self.labels.model.of(model_label(str(generation.get("model_name") or "")) or "unnamed")
            if isinstance(seconds, float):
                self._generation_seconds.labels(model).observe(seconds)
            if generation.get("target_met") is False:
                self._missed.labels(model).inc()

    def add_run(self, run: Run) -> None:
        """Count what a run holds."""
        for part in measured(run):
            self._add(part)

    def _add(self, part: Measured) -> None:
        labels = self.labels
        pipeline, route = labels.pipeline.of(part.pipeline), labels.route.of(part.route)
        if part.outcome is not None:
            for outcome in OUTCOME_LABELS.values():  # a series that begins at 1 shows Prometheus no increase
                self._generations.labels(pipeline, outcome, route)
            self._generations.labels(pipeline, part.outcome, route).inc()
        if part.generation_seconds is not None:
            self._stage_seconds.labels(pipeline, "generation").observe(part.generation_seconds)
        for name, seconds in part.stages:
            self._stage_seconds.labels(pipeline, labels.stage.of(name)).observe(seconds)
        if part.steps:
            step = self._step_seconds.labels(pipeline)
            for seconds in part.steps:
                step.observe(seconds)
        if part.queue_seconds is not None:
            self._queue_seconds.labels(pipeline, route).observe(part.queue_seconds)
        for device, nbytes in part.peaks.items():
            self._raise_peak(pipeline, labels.device.of(device), nbytes)
        for device, nbytes in part.totals.items():
            self._device_bytes.labels(labels.device.of(device)).set(nbytes)
        for verdict in VERDICTS if part.outcome is not None or part.verdicts else ():
            self._verdicts.labels(pipeline, verdict).inc(part.verdicts.count(verdict))

    def _raise_peak(self, pipeline: str, device: str, nbytes: int) -> None:
        with self._lock:
            highest = max(nbytes, self._peaks.get((pipeline, device), 0))
            self._peaks[pipeline, device] = highest
        self._peak_bytes.labels(pipeline, device).set(highest)

    def note_dropped(self, counts: Mapping[str, int]) -> None:
        """Count what was dropped since the last time.

        Args:
            counts: How many of each kind were dropped since the process began.
        """
        with self._lock:
            for what, count in counts.items():
                more, self._told[what] = count - self._told.get(what, 0), count
                if more > 0:
                    self._dropped.labels(what).inc(more)

    def text(self, in_flight: int | None = None, dropped: Mapping[str, int] | None = None) -> bytes:
        """The exposition, as Prometheus reads it.

        Args:
            in_flight: How many requests this process is serving; None: it is no server.
            dropped: As for `note_dropped`.

        Raises:
            ConfigError: The folder of all processes' files is gone.
        """
        from prometheus_client import generate_latest

        if in_flight is not None:
            self._in_flight.set(in_flight)
        unreadable = {"files": len(self._unreadable)}
        self.note_dropped({**self.labels.folded(), **unreadable, **(dropped or {})})
        registry = _AllProcesses(self._unreadable) if self.is_multiprocess else self._registry
        return bytes(generate_latest(registry))

    def write(self, path: str | os.PathLike[str], dropped: Mapping[str, int] | None = None) -> None:
        """Write the exposition for node_exporter's textfile collector, whole or not at all; everybody may read it.

        Raises:
            WriteError: The file cannot be written. What was there before stays.
        """
        text = self.text(dropped=dropped)
        with atomic_path(path) as temporary:
            temporary.write_bytes(text)
            with suppress(OSError):
                temporary.chmod(0o644)


class _AllProcesses:
    """What all processes counted into the folder, as a registry.

    prometheus-client reads all files or none: one that a worker is just making, or that a full disk cut off, would cost the
    figures of all. It also takes the requests of a worker that was killed for requests in flight, for good.
    """

    def __init__(self, unreadable: set[str]) -> None:
        self._unreadable = unreadable

    def collect(self) -> "Iterable[Metric]":
        """Ours alone, as in a process that counts for itself: the host may count into the same files."""
        from prometheus_client.multiprocess import MultiProcessCollector

        folder = Path(os.environ.get(MULTIPROCESS) or "")
        if not folder.is_dir():
            raise ConfigError(
                f"{MULTIPROCESS} names {folder}, which is no folder any more.", hint="Restart the server."
            )
        files = [str(path) for path in sorted(folder.glob("*.db")) if not _is_of_the_dead(path.name)]
        try:
            metrics = MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]
        except Exception:  # noqa: BLE001 - it raises what unpacking, decoding and JSON raise
            metrics = MultiProcessCollector.merge(list(filter(self._is_readable, files)))  # type: ignore[no-untyped-call]
        return [metric for metric in metrics if metric.name.startswith("sigmascope_")]

    def _is_readable(self, file: str) -> bool:
        from prometheus_client.multiprocess import MultiProcessCollector

        try:
            MultiProcessCollector.merge([file])  # type: ignore[no-untyped-call]
        except Exception:  # noqa: BLE001 - as above
            with suppress(OSError):
                if Path(file).stat().st_size:  # else it is just being made
                    self._unreadable.add(file)
            return False
        return True


_OF_LIVING: Final = re.compile(r"gauge_live[a-z]*_([0-9]{1,9})\.db")


def _is_of_the_dead(file: str) -> bool:
    """Whether a file holds what only living processes count for, of one that has ended."""
    named = _OF_LIVING.fullmatch(file)
    return named is not None and has_ended(int(named[1]))


_shared: Metrics | None = None
_making: Final = Lock()


def metrics_of_process() -> Metrics:
    """Metrics of one part of this process; where all processes count into files, those of the whole process.

    Two objects that write the same file would overwrite each other's counts.

    Raises:
        ConfigError: As for `Metrics`.
    """
    global _shared
    if not os.environ.get(MULTIPROCESS):
        return Metrics()
    with _making:
        if _shared is None:
            _shared = Metrics()
        return _shared


def to_prometheus(runs: Iterable[Run]) -> str:
    """Runs as text for Prometheus.

    Raises:
        ConfigError: prometheus-client is not installed, or counts into the files of a server.
    """
    if os.environ.get(MULTIPROCESS):
        raise ConfigError(
            f"{MULTIPROCESS} is set: these runs would be counted as a server's own.",
            hint="Unset it for this command.",
        )
    metrics = Metrics()
    for run in runs:
        metrics.add_run(run)
    return metrics.text().decode()


def _rendered(runs: Sequence[Run], _prompts: PromptPrivacy) -> str:
    return to_prometheus(runs)


SURFACE: Final = Surface(
    "prometheus",
    "Write metrics for node_exporter's textfile collector, in a file that ends in .prom.",
    _rendered,
    noun="metrics",
)
