"""OpenTelemetry: what its receivers get, by gRPC and HTTP, and what a receiver that misbehaves costs."""

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, hw_attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics, hw_metrics
from opentelemetry.semconv.attributes import error_attributes, http_attributes
from tests.reports.metrics.receivers import Received, attributes, grpc_receiver, http_receiver, until
from tests.reports.metrics.runs import GIB, generation, hostile, stage

from sigmascope.errors import ConfigError
from sigmascope.records.performance import UTILIZATION, DeviceUtilization, Gauge
from sigmascope.records.run import Run, Stage, Steps
from sigmascope.records.serialization import to_plain
from sigmascope.reports import otlp
from sigmascope.reports.otlp import MOST_EVENTS, MOST_SPANS, OpenTelemetry

START_NS = 1_772_359_200_000_000_000
"""2026-03-01T10:00:00 UTC, by `date -u -d 2026-03-01T10:00:00Z +%s`."""


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Short times, and no exporter that goes on trying, and says so, in tests that come later."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "60000")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=pictures")
    caplog.set_level(logging.CRITICAL, "opentelemetry")
    earlier = {*threading.enumerate()}
    yield
    until(lambda: not any(map(_exports, {*threading.enumerate()} - earlier)))


def _exports(thread: threading.Thread) -> bool:
    return thread.name.startswith(("Otel", "sigmascope-"))


def sent(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, protocol: str, *runs: Run, seconds: float = 5.0
) -> OpenTelemetry:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    telemetry = OpenTelemetry()
    for run in runs:
        telemetry.add(run)
    telemetry.end(seconds)
    return telemetry


@pytest.fixture(params=["http/protobuf", "grpc"])
def received(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Received]]:
    receiver = http_receiver if request.param == "http/protobuf" else grpc_receiver
    with receiver() as (endpoint, got):

        def send(*runs: Run) -> Received:
            sent(monkeypatch, endpoint, request.param, *runs)
            return got

        yield send


FACTS = {
    "call": {"num_inference_steps": 3, "width": 1024, "height": 768, "seed": 7, "batch_size": 2},
    "route": "/draw/{style}",
    "seconds_before": {"queue": 4.0},
    "lora_application": {"effective": False},
    "prompts": {"prompt": {"sha256": "0" * 64, "text": "a red fox"}},
}


def test_a_generation_is_a_span_with_its_stages_in_it(received: Callable[..., Received]) -> None:
    got = received(generation(facts=FACTS))
    spans = {span.name: span for span in got.spans}
    assert set(spans) == {"generate_content FluxPipeline", "text_encoding", "denoising"}
    whole, denoising = spans["generate_content FluxPipeline"], spans["denoising"]
    assert denoising.parent_span_id == whole.span_id
    assert (whole.start_time_unix_nano, whole.end_time_unix_nano) == (START_NS, START_NS + 3 * 10**9)
    assert denoising.start_time_unix_nano == START_NS + 250_000_000
    told = attributes(whole)
    assert told["gen_ai.request.seed"] == 7
    assert told["http.route"] == "/draw/{style}"
    assert told["sigmascope.lora.verdicts"] == ["no_effect"]
    assert attributes(denoising)["sigmascope.device.duration"] == 1.75
    ends = [
        (event.name, event.time_unix_nano, attributes(event)["sigmascope.step.duration"])
        for event in denoising.events
    ]
    assert ends == [
        ("step", denoising.start_time_unix_nano + end, 0.1)
        for end in (100_000_000, 600_000_000, 1_100_000_000)
    ]
    assert b"fox" not in got.raw


def test_metrics_have_seconds_bytes_and_the_names_of_the_conventions(
    received: Callable[..., Received],
) -> None:
    got = received(generation(facts=FACTS), generation(success=False, error="MemoryError: out of memory"))
    stages = {told["sigmascope.stage"]: point for told, point in got.points("sigmascope.stage.duration")}
    assert stages["denoising"].sum == 3.5
    [(_, steps)] = got.points("sigmascope.step.duration")
    assert (steps.count, steps.sum) == (6, 3.5)
    durations = {
        told.get("error.type"): point for told, point in got.points("gen_ai.server.request.duration")
    }
    assert (durations[None].sum, durations["oom"].sum) == (3.0, 3.0)
    peaks = {told.get("hw.id"): point.as_int for told, point in got.points("sigmascope.memory.peak")}
    assert peaks == {"cuda:0": 5 * GIB, None: 2 * GIB}
    [(told, limit)] = got.points("hw.gpu.memory.limit")
    assert (told, limit.as_int) == ({"hw.id": "cuda:0", "hw.type": "gpu"}, 24 * GIB)
    [(told, wait)] = got.points("sigmascope.queue.wait.duration")
    assert (told["http.route"], wait.sum) == ("/draw/{style}", 4.0)
    outcomes = {
        told["sigmascope.outcome"]: point.as_int for told, point in got.points("sigmascope.generations")
    }
    assert outcomes == {"ok": 1, "oom": 1}
    assert {metric.unit for metric in got.metrics.values()} <= {"s", "By", "{generation}", "{lora}", "{item}"}


def test_what_was_sampled_of_a_card_has_the_names_of_hardware(received: Callable[..., Received]) -> None:
    seen = DeviceUtilization(
        "cuda:0",
        9,
        Gauge(80.0, 100.0, 1.0),
        temperature_celsius=Gauge(61.5, 70.0, 1.0),
        power_watts=Gauge(310.0, 400.0, 1.0),
    )
    got = received(generation(facts={UTILIZATION: {"cuda:0": to_plain(seen)}}))
    card = {"hw.id": "cuda:0", "hw.type": "gpu"}
    for name, unit, told, figure in (
        ("hw.gpu.utilization", "1", {**card, "hw.gpu.task": "general"}, 0.8),
        ("hw.temperature", "Cel", card, 61.5),
        ("hw.power", "W", card, 310.0),
    ):
        [(attributes_of_point, point)] = got.points(name)
        assert (attributes_of_point, point.as_double) == (told, figure)
        assert got.metrics[name].unit == unit


def test_the_service_is_named_by_the_environment_and_each_process_by_an_id(
    received: Callable[..., Received],
) -> None:
    for resource in received(generation()).resources:
        assert resource["service.name"] == "pictures"
        assert len(resource["service.instance.id"]) == 36


def test_names_are_those_of_the_conventions() -> None:
    known = {
        value
        for module in (
            gen_ai_attributes,
            hw_attributes,
            error_attributes,
            http_attributes,
            gen_ai_metrics,
            hw_metrics,
        )
        for value in vars(module).values()
        if isinstance(value, str)
    }
    source = Path(otlp.__file__).read_text(encoding="utf-8")
    named = set(re.findall(r'"((?:gen_ai|hw|http|error)\.[a-z_.]+)"', source))
    assert len(named) > 10
    assert named <= known


def test_of_many_steps_and_stages_a_bounded_number_is_sent_and_the_rest_counted(
    received: Callable[..., Received],
) -> None:
    many = 1_000
    steps = Steps(tuple(map(float, range(many))), (0.5,) * many)
    stages = [stage("denoising", 0.0, 500.0, steps=steps), *(stage("tile", 500.0, 0.1) for _ in range(many))]
    got = received(generation(*stages))
    assert len(got.spans) == MOST_SPANS
    denoising = next(span for span in got.spans if span.name == "denoising")
    assert len(denoising.events) == MOST_EVENTS
    dropped = {
        told["sigmascope.dropped.what"]: point.as_int for told, point in got.points("sigmascope.dropped")
    }
    assert dropped["steps"] == many - MOST_EVENTS
    assert dropped["spans"] == 1 + many + 1 - MOST_SPANS


def test_what_was_raised_is_told_by_its_type(received: Callable[..., Received]) -> None:
    [whole] = generation(success=False, error="ValueError: cannot draw a red fox").stages
    run = replace(generation(), stages=(replace(whole, facts={}),))
    got = received(run)
    span = next(span for span in got.spans if span.name.startswith("generate_content"))
    assert span.status.code == 2
    assert b"fox" not in got.raw


def test_invented_names_make_a_bounded_number_of_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    with http_receiver() as (endpoint, got):
        sent(monkeypatch, endpoint, "http/protobuf", *(hostile(number) for number in range(200)))
    stages = {told["sigmascope.stage"] for told, _ in got.points("sigmascope.stage.duration")}
    assert len(stages) == 100 + len({"denoising", "generation", "other"})
    assert not got.spans
    for word in (b"fox", b"/home", b"id-1"):
        assert word not in got.raw


def test_a_span_of_the_host_is_around_the_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    outer = trace.SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1))
    with http_receiver() as (endpoint, got):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        telemetry = OpenTelemetry()
        telemetry.add(generation(), outer)
        telemetry.end(5.0)
    whole = next(span for span in got.spans if span.name.startswith("generate_content"))
    assert int.from_bytes(whole.parent_span_id) == 0xDEF
    assert {int.from_bytes(span.trace_id) for span in got.spans} == {0xABC}


class Global:
    """The host's own set-up, in place of the global one that can be set but once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spans, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.spans))
        self.meters = MeterProvider([self.reader])
        monkeypatch.setattr(trace, "get_tracer_provider", lambda: self.tracers)
        monkeypatch.setattr(metrics, "get_meter_provider", lambda: self.meters)


def test_what_the_host_has_set_up_is_used_and_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Global(monkeypatch)
    telemetry = OpenTelemetry()
    telemetry.add(generation())
    telemetry.end()
    assert len(host.spans.get_finished_spans()) == 3
    data: Any = host.reader.get_metrics_data()
    names = {metric.name for scope in data.resource_metrics[0].scope_metrics for metric in scope.metrics}
    assert "sigmascope.stage.duration" in names
    with host.tracers.get_tracer("own").start_as_current_span("still works"):
        pass
    assert len(host.spans.get_finished_spans()) == 4


def test_no_provider_becomes_global(monkeypatch: pytest.MonkeyPatch) -> None:
    with http_receiver() as (endpoint, _):
        sent(monkeypatch, endpoint, "http/protobuf", generation())
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    assert type(metrics.get_meter_provider()).__name__ == "_ProxyMeterProvider"


def test_a_sdk_that_is_disabled_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with http_receiver() as (endpoint, got):
        sent(monkeypatch, endpoint, "http/protobuf", generation())
    assert not got.raw


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_EXPORTER_OTLP_PROTOCOL", "smoke"), ("OTEL_TRACES_EXPORTER", "nonsense")]
)
def test_what_no_package_sends_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=value):
        OpenTelemetry()


def test_without_the_sdk_it_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "is_installed", lambda _module: False)
    with pytest.raises(ConfigError) as refused:
        OpenTelemetry()
    assert "[otel]" in str(refused.value.hint)


def test_a_receiver_that_is_down_costs_spans_that_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    telemetry = OpenTelemetry()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    telemetry.add(generation())
    began = time.monotonic()
    telemetry.end(5.0)
    assert time.monotonic() - began < 6
    dropped = telemetry.dropped()  # also after the end
    assert (dropped["spans"], dropped["metric_exports"]) == (3, 1)


@pytest.mark.parametrize("receiver", [lambda: http_receiver(500), lambda: http_receiver(closes=True)])
def test_a_receiver_that_answers_with_an_error_or_closes_costs_spans_that_are_counted(
    monkeypatch: pytest.MonkeyPatch, receiver: Callable[[], Any]
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    with receiver() as (endpoint, _):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        telemetry = OpenTelemetry()
        telemetry.add(generation())
        telemetry.end(5.0)
    assert telemetry.dropped()["spans"] == 3


BOTH_PROTOCOLS = pytest.mark.parametrize(
    ("receiver", "protocol"), [(http_receiver, "http/protobuf"), (grpc_receiver, "grpc")]
)


@BOTH_PROTOCOLS
def test_what_a_collector_rejects_of_a_request_that_it_takes_is_counted_and_said_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    receiver: Callable[..., Any],
    protocol: str,
) -> None:
    caplog.set_level(logging.WARNING, "sigmascope")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "3")
    with receiver(rejects=2, says="an attribute\nis too long.") as (endpoint, _):
        telemetry = sent(monkeypatch, endpoint, protocol, generation(), generation())
    dropped = telemetry.dropped()
    assert (dropped["spans"], dropped["data_points"], dropped["metric_exports"]) == (4, 2, 0)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("sigmascope")]
    hint = "; what it rejects from now on is counted in sigmascope.dropped."
    assert said[0] == f"The collector rejected 2 of 3 spans: an attribute is too long{hint}"
    assert [line[:29] for line in said] == ["The collector rejected 2 of 3", "The collector rejected 2 of 1"]


@BOTH_PROTOCOLS
def test_a_warning_of_a_collector_that_took_all_is_said_and_counts_nothing(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    receiver: Callable[..., Any],
    protocol: str,
) -> None:
    caplog.set_level(logging.WARNING, "sigmascope")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    with receiver(says="use a newer version") as (endpoint, _):
        telemetry = sent(monkeypatch, endpoint, protocol, generation())
    assert telemetry.dropped()["spans"] == 0
    assert "The collector took all 3 spans: use a newer version." in caplog.messages


@pytest.mark.parametrize(
    "body", [b"<html>welcome</html>", b"\x0a\xff", b"\x00" * 1000, b'{"partialSuccess":{}}']
)
def test_an_answer_that_is_none_of_a_collector_rejects_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, body: bytes
) -> None:
    caplog.set_level(logging.WARNING, "sigmascope")
    with http_receiver(answer=body) as (endpoint, got):
        telemetry = sent(monkeypatch, endpoint, "http/protobuf", generation())
    assert (telemetry.dropped()["spans"], telemetry.dropped()["data_points"]) == (0, 0)
    assert len(got.spans) == 3
    assert not [record for record in caplog.records if record.name.startswith("sigmascope")]


@pytest.mark.parametrize(("rejects", "counted"), [(1000, 3), (-5, 0)])
def test_a_collector_cannot_reject_more_than_it_was_sent(
    monkeypatch: pytest.MonkeyPatch, rejects: int, counted: int
) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    with http_receiver(rejects=rejects) as (endpoint, _):
        telemetry = sent(monkeypatch, endpoint, "http/protobuf", generation())
    assert telemetry.dropped()["spans"] == counted


def test_figures_arrive_though_the_receiver_of_spans_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    with http_receiver(delay=30.0) as (hanging, _), http_receiver() as (endpoint, got):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{hanging}/v1/traces")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "30")
        sent(monkeypatch, endpoint, "http/protobuf", generation(), seconds=1.0)
        until(lambda: got.metrics)
    assert [point.as_int for _, point in got.points("sigmascope.generations")] == [1]


def test_a_child_that_was_forked_ends_without_sending_what_is_its_parent_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    with http_receiver() as (endpoint, got):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        telemetry = OpenTelemetry()
        telemetry.add(generation(name="x" * 65))
        of_parent = telemetry._open
        assert of_parent is not None
        monkeypatch.setattr(os, "getpid", lambda: -1)
        telemetry.end(1.0)
        assert not got.metrics
        telemetry.add(generation())
        assert telemetry.dropped()["stage"] == 0  # of its own
        telemetry.end(5.0)
        assert [point.as_int for _, point in got.points("sigmascope.generations")] == [1]
        for shutdown in of_parent.shutdowns:
            shutdown()


@BOTH_PROTOCOLS
def test_a_receiver_that_takes_thirty_seconds_holds_nobody_up_and_its_queue_is_bounded(
    monkeypatch: pytest.MonkeyPatch, receiver: Callable[..., Any], protocol: str
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "32")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "16")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    with receiver(delay=30.0) as (endpoint, _):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        telemetry = OpenTelemetry()
        began = time.monotonic()
        for _ in range(100):
            telemetry.add(generation())
        handed = time.monotonic() - began
        dropped = telemetry.dropped()["spans"]
        telemetry.end(0.3)
        assert time.monotonic() - began < 5
    assert handed < 4
    assert 300 - 32 - 16 <= dropped <= 300 - 32
    assert telemetry.dropped()["spans"] == 300  # what was not sent in the end is counted, too


def test_a_stage_of_another_shape_than_expected_is_sent_all_the_same(
    received: Callable[..., Received],
) -> None:
    odd = Stage("generation", 0.0, 1.0, facts={"call": "mended by hand", "device_seconds": "x"})
    assert [span.name for span in received(replace(generation(), stages=(odd,))).spans] == [
        "generate_content unknown"
    ]
