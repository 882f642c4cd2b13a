"""Receivers of OTLP on the loopback, made of `opentelemetry-proto`: ones that take all, and ones that misbehave."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from gzip import decompress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_service
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc


def plain(value: Any) -> Any:
    """An attribute's value."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(item) for item in value.array_value.values]
    return None if kind is None else getattr(value, kind)


def attributes(of: Any) -> dict[str, Any]:
    return {pair.key: plain(pair.value) for pair in of.attributes}


@dataclass
class Received:
    """What came in, as the protocol's own messages."""

    spans: list[Any] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    resources: list[dict[str, Any]] = field(default_factory=list)
    raw: bytes = b""

    def take_traces(self, request: Any) -> None:
        self.raw += request.SerializeToString()
        for resource in request.resource_spans:
            self.resources.append(attributes(resource.resource))
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]

    def take_metrics(self, request: Any) -> None:
        self.raw += request.SerializeToString()
        for resource in request.resource_metrics:
            self.resources.append(attributes(resource.resource))
            self.metrics |= {
                metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics
            }

    def points(self, name: str) -> list[tuple[dict[str, Any], Any]]:
        """The points of a metric, with their attributes."""
        metric = self.metrics[name]
        data = getattr(metric, metric.WhichOneof("data"))
        return [(attributes(point), point) for point in data.data_points]


def traces_answer(rejects: int, says: str) -> Any:
    """Of a collector that took all but so many spans; empty, as it should be, of one that took all."""
    answer = trace_service.ExportTraceServiceResponse()
    if rejects or says:
        answer.partial_success.rejected_spans, answer.partial_success.error_message = rejects, says
    return answer


def metrics_answer(rejects: int, says: str) -> Any:
    """Of a collector that took all but so many data points."""
    answer = metrics_service.ExportMetricsServiceResponse()
    if rejects or says:
        answer.partial_success.rejected_data_points, answer.partial_success.error_message = rejects, says
    return answer


@contextmanager
def http_receiver(
    status: int = 200,
    delay: float = 0.0,
    *,
    closes: bool = False,
    rejects: int = 0,
    says: str = "",
    answer: bytes | None = None,
) -> Iterator[tuple[str, Received]]:
    """A receiver that answers so, after a while, or closes the connection without an answer.

    It takes requests, but for so many spans or data points of each; or answers with another body.
    """
    received, gone = Received(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = decompress(body)
            if closes:
                self.connection.close()
                return
            gone.wait(delay)
            if status == 200 and self.path == "/v1/traces":
                received.take_traces(trace_service.ExportTraceServiceRequest.FromString(body))
            elif status == 200:
                received.take_metrics(metrics_service.ExportMetricsServiceRequest.FromString(body))
            message = (traces_answer if self.path == "/v1/traces" else metrics_answer)(rejects, says)
            sent = message.SerializeToString() if answer is None else answer
            try:
                self.send_response(status)
                self.send_header("content-length", str(len(sent)))
                self.end_headers()
                self.wfile.write(sent)
            except OSError:
                pass

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        gone.set()
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def grpc_receiver(
    delay: float = 0.0, code: grpc.StatusCode | None = None, *, rejects: int = 0, says: str = ""
) -> Iterator[tuple[str, Received]]:
    received, gone = Received(), threading.Event()

    def answer(request: Any, context: Any, take: Callable[[Any], None], response: Any) -> Any:
        gone.wait(delay)
        if code is not None:
            context.abort(code, "refused")
        take(request)
        return response

    class Traces(trace_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            return answer(request, context, received.take_traces, traces_answer(rejects, says))

    class Metrics(metrics_grpc.MetricsServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            return answer(request, context, received.take_metrics, metrics_answer(rejects, says))

    server = grpc.server(ThreadPoolExecutor(4))
    trace_grpc.add_TraceServiceServicer_to_server(Traces(), server)  # type: ignore[no-untyped-call]
    metrics_grpc.add_MetricsServiceServicer_to_server(Metrics(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", received
    finally:
        gone.set()
        server.stop(0).wait()


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.005)
