"""Requests and generations as Prometheus metrics, by the prometheus-client package."""

from typing import Final

from sigmascope.errors import ConfigError
from sigmascope.records.requests import RequestRecord

METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"})
"""Clients may invent methods, and every label's value is kept for good."""
_SECONDS: Final = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)


class RequestMetrics:
    """Counters of one middleware, in a registry of its own. Paths are no labels: there may be any number of them.

    Raises:
        ConfigError: prometheus-client is not installed.
    """

    def __init__(self) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
        except ImportError:
            raise ConfigError(
                "Metrics need the package prometheus-client.", hint="pip install 'sigmascope[prometheus]'"
            ) from None
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "sigmascope_requests", "Requests answered.", ["method", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "sigmascope_request_seconds", "Seconds a request took.", buckets=_SECONDS, registry=self._registry
        )
        self._bytes = Counter(
            "sigmascope_response_bytes", "Bytes of response bodies.", registry=self._registry
        )
        self._disconnected = Counter(
            "sigmascope_disconnects", "Clients that went away before their response was complete.", registry=self._registry
        )  # fmt: skip
        self._in_flight = Gauge(
            "sigmascope_requests_in_flight", "Requests being served.", registry=self._registry
        )
        self._generations = Histogram(
            "sigmascope_generation_seconds", "Seconds a generation took.", ["model"], buckets=_SECONDS,
            registry=self._registry,
        )  # fmt: skip
        self._missed = Counter(
            "sigmascope_generation_targets_missed", "Generations that missed their target.", ["model"],
            registry=self._registry,
        )  # fmt: skip

    def add(self, record: RequestRecord) -> None:
        """Count a request and its generations."""
        status = "none" if record.status is None else str(record.status)
        method = record.method if record.method in _METHODS else "other"
        self._requests.labels(method, status).inc()
        self._seconds.observe(record.seconds)
        self._bytes.inc(record.response_bytes)
        if record.disconnected:
            self._disconnected.inc()
        for generation in record.generations:
            seconds = generation.get("total_generation_time")
            model = str(generation.get("model_name") or "unnamed")
            if isinstance(seconds, float):
                self._generations.labels(model).observe(seconds)
            if generation.get("target_met") is False:
                self._missed.labels(model).inc()

    def text(self, in_flight: int) -> bytes:
        """The exposition, as Prometheus reads it."""
        from prometheus_client import generate_latest

        self._in_flight.set(in_flight)
        return bytes(generate_latest(self._registry))
