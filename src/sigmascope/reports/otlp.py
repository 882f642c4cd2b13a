"""Runs as OpenTelemetry's traces and metrics, by its SDK: a generation is a span, its stages are spans in it.

Names are those of the conventions where they have one (`gen_ai.*`, `hw.*`, `http.route`, `error.type`), else they begin with
`sigmascope.`. Prompts, paths and the words of exceptions are in none of it. `docs/metrics.md` lists the names.

Where the host has set OpenTelemetry up, its providers are used and its exporters send. Otherwise there are providers of our
own, as the variables `OTEL_…` say, which are not made global.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from sigmascope.__about__ import __version__
from sigmascope.errors import ConfigError
from sigmascope.installation import install_extra
from sigmascope.plain_text import in_one_line
from sigmascope.records.run import CallFacts, Run, Stage
from sigmascope.records.serialization import from_plain
from sigmascope.reports.measurements import (
    GENERATION,
    PROCESS,
    STAGE_BUCKETS,
    STEP_BUCKETS,
    Labels,
    Measured,
    gauges_of_devices,
    measured,
    nodes_of,
)
from sigmascope.threads import own_thread

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation
    from opentelemetry.trace import Span, SpanContext, Tracer

_log = logging.getLogger(__name__)
MOST_EVENTS: Final = 100
"""Steps of a stage that become events; the SDK's own limit is 128."""
MOST_SPANS: Final = 200
"""Of one generation."""
LONGEST_WAIT_SECONDS: Final = 5.0
"""For what was not sent yet, at the end."""
_SCOPE: Final = "sigmascope"
_OPERATION: Final = "generate_content"
_HTTP, _GRPC = "http/protobuf", "grpc"
_EXPORTERS: Final = {_HTTP: "otlp_proto_http", _GRPC: "otlp_proto_grpc"}
"""Names under which the packages of exporters are known, by what `OTEL_EXPORTER_OTLP_PROTOCOL` may say."""
_LONGEST_MESSAGE: Final = 200
"""Letters of what a collector says."""
_HARDWARE: Final = {"hw.gpu.utilization": "1", "hw.temperature": "Cel", "hw.power": "W"}


class OpenTelemetry:
    """Sends what runs hold. It is set up by the first run, when the host has had time to set up its own.

    Raises:
        ConfigError: The packages of OpenTelemetry are not installed, or there is no such protocol.
    """

    def __init__(self) -> None:
        if not is_installed("opentelemetry.sdk"):
            raise ConfigError(
                "OpenTelemetry's SDK is not installed.", hint=f"Install it with: {install_extra('otel')}"
            )
        for signal in ("TRACES", "METRICS"):
            _exporters(signal)
        self._open: _Open | None = None
        self._begin()

    def _begin(self) -> None:
        self.labels = Labels()
        self._dropped = {"spans": 0, "steps": 0, "metric_exports": 0, "data_points": 0}
        self._process_id = os.getpid()

    def add(self, run: Run, parent: "SpanContext | None" = None) -> None:
        """Hand spans and figures of a run to the SDK, which sends them on threads of its own.

        Args:
            run: What is over.
            parent: The span that was open where it ended.
        """
        if self._process_id != os.getpid():  # a child that was forked counts for itself
            self._open = None
            self._begin()
        if self._open is None:
            self._open = _Open(self._observe_dropped, self._dropped)
        opened = self._open
        if opened.meter is not None:
            for part in measured(run):
                opened.instruments.record(part, self.labels)
        if opened.tracer is not None:
            self._trace(run, parent, opened.tracer)

    def end(self, seconds: float = LONGEST_WAIT_SECONDS) -> None:
        """Send what is left, in so many seconds at most. The host's own providers are the host's to end.

        Spans go first, since figures hold how many were dropped; yet each may have a receiver of its own, so that the next
        one begins after half of the time. What a parent has not sent is the parent's to send.
        """
        opened, self._open = self._open, None
        if opened is None or self._process_id != os.getpid():
            return
        until = time.monotonic() + seconds
        with suppress(RuntimeError):  # no more threads
            threads = [own_thread("otlp-end", _quietly, shutdown) for shutdown in opened.shutdowns]
            for thread in threads:
                thread.start()
                thread.join(max(0.0, until - time.monotonic()) / 2)
            for thread in threads:
                thread.join(max(0.0, until - time.monotonic()))
        self._dropped["spans"] += sum(unsent() for unsent in opened.unsent)

    def dropped(self) -> dict[str, int]:
        """How much was dropped or refused since the beginning, by kind: spans, exports, steps, values of labels."""
        return {**self.labels.folded(), **self._dropped}

    def _observe_dropped(self, _options: "CallbackOptions") -> "Iterator[Observation]":
        from opentelemetry.metrics import Observation

        for what, count in self.dropped().items():
            yield Observation(count, {"sigmascope.dropped.what": what})

    def _trace(self, run: Run, parent: "SpanContext | None", tracer: "Tracer") -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import NonRecordingSpan, set_span_in_context

        context = Context() if parent is None else set_span_in_context(NonRecordingSpan(parent), Context())
        began_ns = _nanoseconds(run)
        budget = _Budget(MOST_SPANS)
        for part in measured(run):
            if part.stage is None:
                self._prompt(run, part, began_ns, context, tracer, budget)
            else:
                self._span(part.stage, part, began_ns, context, tracer, budget)
        self._dropped["spans"] += budget.refused

    def _prompt(
        self, run: Run, part: Measured, began_ns: int, context: Any, tracer: "Tracer", budget: "_Budget"
    ) -> None:
        """A prompt of ComfyUI: all of the run is one span."""
        from opentelemetry.trace import set_span_in_context

        span = tracer.start_span(
            f"{_OPERATION} {part.pipeline}",
            context,
            attributes=self._of_generation(part, run.id, None),
            start_time=began_ns,
        )
        _tell_error(span, part.outcome, run.stages)
        inside = set_span_in_context(span, context)
        for stage in nodes_of(run):
            self._span(stage, None, began_ns, inside, tracer, budget)
        span.end(began_ns + _ns(run.seconds))

    def _span(
        self,
        stage: Stage,
        part: Measured | None,
        began_ns: int,
        context: Any,
        tracer: "Tracer",
        budget: "_Budget",
    ) -> None:
        """A stage with those in it; what a generation was asked for is on its own span."""
        from opentelemetry.trace import set_span_in_context

        if not budget.take():
            return
        is_generation = part is not None and part.outcome is not None
        name = self.labels.stage.of(stage.name)
        if is_generation:
            assert part is not None
            name = f"{_OPERATION} {self.labels.pipeline.of(part.pipeline)}"
            attributes = self._of_generation(part, None, stage)
        else:
            attributes = {"sigmascope.stage": name}
        started_ns = began_ns + _ns(stage.started_seconds)
        span = tracer.start_span(name, context, attributes=attributes, start_time=started_ns)
        for key, value in _of_stage(stage):
            span.set_attribute(key, value)
        self._events(span, stage, started_ns)
        _tell_error(span, None if part is None else part.outcome, [stage])
        inside = set_span_in_context(span, context)
        for child in stage.children:
            self._span(child, None, began_ns, inside, tracer, budget)
        span.end(started_ns + _ns(stage.seconds))

    def _events(self, span: "Span", stage: Stage, started_ns: int) -> None:
        """The first steps of a stage, each at its end."""
        times = list(zip(stage.steps.started, stage.steps.seconds, strict=True))
        for number, (started, seconds) in enumerate(times[:MOST_EVENTS], 1):
            told = {"sigmascope.step": number, "sigmascope.step.duration": seconds}
            span.add_event("step", told, timestamp=started_ns + _ns(started + seconds))
        self._dropped["steps"] += max(0, len(times) - MOST_EVENTS)

    def _of_generation(self, part: Measured, run_id: str | None, stage: Stage | None) -> dict[str, Any]:
        call = _call(stage)
        told = {
            "gen_ai.operation.name": _OPERATION,
            "gen_ai.provider.name": _provider(part.pipeline),
            "gen_ai.request.model": self.labels.pipeline.of(part.pipeline),
            "gen_ai.output.type": "video" if (call.num_frames or 1) > 1 else "image",
            "gen_ai.request.seed": call.seed,
            "gen_ai.request.choice.count": call.batch_size,
            "http.route": None if part.route is None else self.labels.route.of(part.route),
            "sigmascope.outcome": part.outcome,
            "sigmascope.queue.wait": part.queue_seconds,
            "sigmascope.steps": len(part.steps) or call.num_inference_steps,
            "sigmascope.width": call.width,
            "sigmascope.height": call.height,
            "sigmascope.frames": call.num_frames,
            "sigmascope.lora.verdicts": list(part.verdicts) or None,
            "sigmascope.run.id": run_id,
        }
        return {key: value for key, value in told.items() if value is not None}


def _quietly(shutdown: Callable[[], object]) -> None:
    with suppress(Exception):
        shutdown()


def is_installed(module: str) -> bool:
    """Whether a module can be imported."""
    with suppress(ImportError, ValueError):
        return find_spec(module) is not None
    return False


class _Budget:
    """How many spans a run may still have."""

    def __init__(self, most: int) -> None:
        self._left = most
        self.refused = 0

    def take(self) -> bool:
        """Whether there may be one more."""
        self._left -= 1
        self.refused += self._left < 0
        return self._left >= 0


def _call(stage: Stage | None) -> CallFacts:
    plain = None if stage is None else stage.facts.get("call")
    with suppress(ValueError):
        return CallFacts() if plain is None else from_plain(plain, CallFacts, "call")
    return CallFacts()


def _provider(pipeline: str | None) -> str:
    if pipeline == "ComfyUI":
        return "comfyui"
    return "diffusers" if pipeline is not None and pipeline.endswith("Pipeline") else "other"


def _of_stage(stage: Stage) -> Iterator[tuple[str, Any]]:
    on_device = stage.facts.get("device_seconds")
    if isinstance(on_device, float):
        yield "sigmascope.device.duration", on_device
    if stage.peak is not None:
        for device in stage.peak.accelerators[:16]:
            if device.allocated_bytes is not None:
                yield f"sigmascope.memory.peak.{device.device}", device.allocated_bytes
        if stage.peak.rss_bytes is not None:
            yield f"sigmascope.memory.peak.{PROCESS}", stage.peak.rss_bytes
    if len(stage.steps):
        yield "sigmascope.steps", len(stage.steps)


def _tell_error(span: "Span", outcome: str | None, stages: Iterable[Stage]) -> None:
    """The type of what was raised; its words may quote a prompt."""
    from opentelemetry.trace import Status, StatusCode

    failed = [stage for stage in stages if not stage.success]
    if not failed:
        return
    kind = next(
        (stage.exception_details.type for stage in failed if stage.exception_details is not None), None
    )
    span.set_attribute("error.type", kind or "_OTHER")
    span.set_status(Status(StatusCode.ERROR, outcome))


def _nanoseconds(run: Run) -> int:
    """When the run began, on the world's clock."""
    began = datetime.fromisoformat(run.started_at)
    return round((began if began.tzinfo else began.replace(tzinfo=UTC)).timestamp() * 1e6) * 1000


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


class _Instruments:
    """Of a meter."""

    def __init__(self, meter: "Meter", observe_dropped: Any) -> None:
        def seconds(name: str, description: str, buckets: Sequence[float]) -> Any:
            return meter.create_histogram(
                name, "s", description, explicit_bucket_boundaries_advisory=list(buckets)
            )

        self._requests = seconds(
            "gen_ai.server.request.duration", "Seconds a generation took.", STAGE_BUCKETS
        )
        self._stages = seconds("sigmascope.stage.duration", "Seconds a stage took.", STAGE_BUCKETS)
        self._steps = seconds("sigmascope.step.duration", "Seconds a denoising step took.", STEP_BUCKETS)
        self._queue = seconds(
            "sigmascope.queue.wait.duration", "Seconds a generation waited before it began.", STAGE_BUCKETS
        )
        self._generations = meter.create_counter(
            "sigmascope.generations", "{generation}", "Generations that ended."
        )
        self._verdicts = meter.create_counter("sigmascope.lora.verdicts", "{lora}", "LoRAs by what they did.")
        self._peaks = meter.create_gauge(
            "sigmascope.memory.peak",
            "By",
            "Highest bytes that PyTorch allocated during the last generation or stage.",
        )
        self._limit = meter.create_up_down_counter("hw.gpu.memory.limit", "By", "Size of the GPU memory.")
        self._hardware = {name: meter.create_gauge(name, unit) for name, unit in _HARDWARE.items()}
        self._totals: dict[str, int] = {}
        meter.create_observable_counter(
            "sigmascope.dropped", [observe_dropped], "{item}", "What was dropped, by what it was."
        )

    def record(self, part: Measured, labels: Labels) -> None:
        """Count one part of a run."""
        pipeline = labels.pipeline.of(part.pipeline)
        own = {"sigmascope.pipeline": pipeline}
        route = {} if part.route is None else {"http.route": labels.route.of(part.route)}
        if part.outcome is not None:
            self._generations.add(1, {**own, **route, "sigmascope.outcome": part.outcome})
        if part.generation_seconds is not None:
            request = {
                "gen_ai.operation.name": _OPERATION,
                "gen_ai.provider.name": _provider(part.pipeline),
                "gen_ai.request.model": pipeline,
                **({} if part.outcome == "ok" else {"error.type": part.outcome or "_OTHER"}),
            }
            self._requests.record(part.generation_seconds, request)
            self._stages.record(part.generation_seconds, {**own, "sigmascope.stage": GENERATION})
        for name, seconds in part.stages:
            self._stages.record(seconds, {**own, "sigmascope.stage": labels.stage.of(name)})
        for seconds in part.steps:
            self._steps.record(seconds, own)
        if part.queue_seconds is not None:
            self._queue.record(part.queue_seconds, {**own, **route})
        for verdict in part.verdicts:
            self._verdicts.add(1, {**own, "sigmascope.lora.verdict": verdict})
        self._record_memory(part, own, labels)

    def _record_memory(self, part: Measured, own: Mapping[str, str], labels: Labels) -> None:
        for device, nbytes in part.peaks.items():
            place = (
                {"sigmascope.device": PROCESS} if device == PROCESS else _hardware(labels.device.of(device))
            )
            self._peaks.set(nbytes, {**own, **place})
        for device, nbytes in part.totals.items():
            name = labels.device.of(device)
            self._limit.add(nbytes - self._totals.get(name, 0), _hardware(name))
            self._totals[name] = nbytes
        for device, metric, value in gauges_of_devices([] if part.stage is None else part.stage.walk()):
            task = {"hw.gpu.task": "general"} if metric == "hw.gpu.utilization" else {}
            self._hardware[metric].set(value, {**_hardware(labels.device.of(device)), **task})


def _hardware(device: str) -> dict[str, str]:
    return {"hw.id": device, "hw.type": "gpu"}


class _Open:
    """Tracer and meter, of the host's providers or of our own.

    Attributes:
        shutdowns: What ends our own.
        unsent: How many spans each of our own has not sent, asked once at the end.
        dropped: Where spans that found the SDK's queue full or that the receiver did not take are counted, exports of
            metrics that failed, and data points that the receiver rejected.
    """

    def __init__(self, observe_dropped: Any, dropped: dict[str, int]) -> None:
        from opentelemetry import metrics, trace

        self.shutdowns: list[Any] = []
        self.unsent: list[Callable[[], int]] = []
        self.dropped = dropped
        self.tracer: Tracer | None = None
        self.meter: Meter | None = None
        if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
            return
        tracers, meters = trace.get_tracer_provider(), metrics.get_meter_provider()
        if not isinstance(tracers, trace.ProxyTracerProvider):
            self.tracer = tracers.get_tracer(_SCOPE, __version__)
        elif exporters := _exporters("TRACES"):
            self.tracer = self._own_tracer(exporters)
        if type(meters).__name__ != "_ProxyMeterProvider":
            self.meter = meters.get_meter(_SCOPE, __version__)
        elif exporters := _exporters("METRICS"):
            self.meter = self._own_meter(exporters)
        if self.meter is not None:
            self.instruments = _Instruments(self.meter, observe_dropped)

    def _own_tracer(self, exporters: Sequence[Any]) -> "Tracer":
        from opentelemetry.sdk.trace import TracerProvider

        provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        for kind in exporters:
            answers = _Answers("TRACES")
            processor, unsent = _bounded_processor(answers.read_of(kind), answers, self.dropped)
            provider.add_span_processor(processor)
            self.unsent.append(unsent)
        self.shutdowns.append(provider.shutdown)
        return provider.get_tracer(_SCOPE, __version__)

    def _own_meter(self, exporters: Sequence[Any]) -> "Meter":
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        readers = []
        for kind in exporters:
            answers = _Answers("METRICS")
            counting = _counting_exporter(answers.read_of(kind), answers, self.dropped)
            readers.append(PeriodicExportingMetricReader(counting))
        provider = MeterProvider(readers, _resource(), shutdown_on_exit=False)
        self.shutdowns.append(provider.shutdown)
        return provider.get_meter(_SCOPE, __version__)


def _resource() -> Any:
    """What the environment says of the service, and an id of this process: each worker counts for itself."""
    import uuid

    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    try:
        said = Resource.create()
    except RuntimeError:  # it asks on threads, of which there are no more as Python ends
        said = OTELResourceDetector(raise_on_error=False).detect()
    if said.attributes.get("service.instance.id"):
        return said
    return said.merge(Resource({"service.instance.id": str(uuid.uuid4())}))


def _exporters(signal: str) -> list[tuple[str, Any]]:
    """The exporters that the environment names, for "TRACES" or "METRICS", and what makes each; none for "none".

    Raises:
        ConfigError: There is none of that name, or its package is not installed.
    """
    named = os.environ.get(f"OTEL_{signal}_EXPORTER") or "otlp"
    kinds = []
    for name in filter(None, map(str.strip, named.split(","))):
        if name == "none":
            continue
        if name == "otlp":
            protocol = (
                os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL")
                or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
                or _HTTP
            ).strip()
            if protocol not in _EXPORTERS:
                raise ConfigError(
                    f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}.", hint=f"Choose {_HTTP} or {_GRPC}."
                )
            name = _EXPORTERS[protocol]
        found = list(entry_points(group=f"opentelemetry_{signal.lower()}_exporter", name=name))
        if not found:
            raise ConfigError(
                f"OpenTelemetry has no exporter {name!r} of {signal.lower()} here.",
                hint=f"Install it with: {install_extra('otel')}",
            )
        kinds.append((name, found[0].load()))
    return kinds


class _Answers:
    """What a collector rejected of requests that it took: its answers say so, and the SDK's exporters do not pass it on.

    Args:
        signal: "TRACES" or "METRICS".
    """

    def __init__(self, signal: str) -> None:
        self._signal = signal
        self._noun = "spans" if signal == "TRACES" else "data points"
        self._rejected = 0
        self._message = ""
        self._has_said = False

    def read_of(self, kind: tuple[str, Any]) -> Any:
        """An exporter whose answers are read, by the session that HTTP's takes, or around the call of gRPC's stub."""
        name, make = kind
        if name == _EXPORTERS[_HTTP] and not self._has_session():
            with suppress(ImportError, TypeError):  # of a version that takes none
                import requests

                session = requests.Session()
                session.hooks["response"].append(self._hear_http)
                return make(session=session)
        exporter = make()
        stub = getattr(exporter, "_stub", None)
        if name == _EXPORTERS[_GRPC] and stub is not None:
            exporter._stub = partial(self._heard, stub)  # with which it connects anew
            exporter._client = exporter._stub(exporter._channel)
        return exporter

    def rejected(self, most: int) -> int:
        """How many of those that were just sent were rejected; says so the first time."""
        count, message = max(0, min(self._rejected, most)), self._message
        self._rejected, self._message = 0, ""
        if (count or message) and not self._has_said:
            self._has_said = True
            words = f": {message}" if message else ""
            told = f"rejected {count} of {most}" if count else f"took all {most}"
            hint = "; what it rejects from now on is counted in sigmascope.dropped" if count else ""
            with suppress(Exception):  # a handler of the host's
                _log.warning("The collector %s %s%s%s.", told, self._noun, words.rstrip("."), hint)
        return count

    def _has_session(self) -> bool:
        """Whether the environment names what gives the exporter its session."""
        own = f"OTEL_PYTHON_EXPORTER_OTLP_HTTP_{self._signal}_CREDENTIAL_PROVIDER"
        return bool(
            os.environ.get(own) or os.environ.get("OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER")
        )

    def _hear_http(self, response: Any, *_: Any, **__: Any) -> None:
        if self._signal == "TRACES":
            from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
                ExportTraceServiceResponse as Answer,
            )
        else:
            from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
                ExportMetricsServiceResponse as Answer,
            )
        with suppress(Exception):  # another one's words: a page of a proxy, or nothing
            if response.status_code == 200:
                self._hear(Answer.FromString(response.content))

    def _heard(self, stub: Any, channel: Any) -> Any:
        client = stub(channel)
        export = client.Export

        def heard(*args: Any, **kwargs: Any) -> Any:
            answer = export(*args, **kwargs)
            with suppress(Exception):
                self._hear(answer)
            return answer

        client.Export = heard
        return client

    def _hear(self, answer: Any) -> None:
        told = answer.partial_success
        self._rejected += told.rejected_spans if self._signal == "TRACES" else told.rejected_data_points
        self._message = in_one_line(told.error_message)[:_LONGEST_MESSAGE]


def _bounded_processor(
    exporter: Any, answers: _Answers, dropped: dict[str, int]
) -> tuple[Any, Callable[[], int]]:
    """The SDK's batches, with spans that find its queue full, or that the receiver does not take, counted.

    Returns:
        The processor, and what tells in the end how many spans it has not sent. What is counted there is counted nowhere else.
    """
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    lock = threading.Lock()
    waiting = under_way = 0
    is_over = False

    class Counting(SpanExporter):
        """Knows how many spans left the queue, and how many were not taken."""

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            nonlocal waiting, under_way
            with lock:
                waiting -= len(spans)
                under_way += len(spans)
            result: SpanExportResult = SpanExportResult.FAILURE
            try:
                result = exporter.export(spans)
            finally:
                rejected = answers.rejected(len(spans))
                lost = rejected if result is SpanExportResult.SUCCESS else len(spans)
                with lock:
                    under_way -= len(spans)
                    dropped["spans"] += 0 if is_over else lost
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

    most = _queue_size()

    class Bounded(SpanProcessor):
        """Keeps the queue from pushing out what waits longest without a word."""

        def __init__(self) -> None:
            self._batches = BatchSpanProcessor(Counting())

        def on_end(self, span: ReadableSpan) -> None:
            nonlocal waiting
            if not (span.context and span.context.trace_flags.sampled):
                return
            with lock:
                if waiting >= most:
                    dropped["spans"] += 1
                    return
                waiting += 1
            self._batches.on_end(span)

        def shutdown(self) -> None:
            self._batches.shutdown()  # type: ignore[no-untyped-call]

        def force_flush(self, timeout_millis: int = 30_000) -> bool:
            return self._batches.force_flush(timeout_millis)

    def unsent() -> int:
        nonlocal is_over
        with lock:
            is_over = True
            return waiting + under_way

    return Bounded(), unsent


def _queue_size() -> int:
    try:
        return max(1, int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", 2048)))
    except ValueError:
        return 2048


def _counting_exporter(exporter: Any, answers: _Answers, dropped: dict[str, int]) -> Any:
    """An exporter of metrics whose failures are counted, and the data points that were rejected."""
    from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData

    class Counting(MetricExporter):
        def __init__(self) -> None:
            super().__init__(exporter._preferred_temporality, exporter._preferred_aggregation)

        def export(
            self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
        ) -> MetricExportResult:
            result: MetricExportResult = MetricExportResult.FAILURE
            try:
                result = exporter.export(metrics_data, timeout_millis=timeout_millis, **kwargs)
            finally:
                if result is not MetricExportResult.SUCCESS:
                    dropped["metric_exports"] += 1
                dropped["data_points"] += answers.rejected(_points_in(metrics_data))
            return result

        def force_flush(self, timeout_millis: float = 10_000) -> bool:
            return bool(exporter.force_flush(timeout_millis))

        def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
            exporter.shutdown(timeout_millis, **kwargs)

    return Counting()


def _points_in(data: Any) -> int:
    """How many data points are sent."""
    metrics = (
        metric
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    )
    return sum(len(metric.data.data_points) for metric in metrics)
