"""What a server of pictures does, in little: generations that end well, run out of memory, or have an idle LoRA."""

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tests.reports.metrics.runs import generation

import sigmascope
from sigmascope.integrations.asgi import PerformanceMonitoringMiddleware
from sigmascope.monitor.publishing import publish

monitor = sigmascope.PerformanceMonitor(target_generation_time=5.0, sample_hz=None)


async def draw(request: Request) -> Response:
    """Two stages, three steps."""
    with monitor.monitor_generation("pocket", num_steps=3):
        with sigmascope.stage("text_encoding"):
            pass
        with sigmascope.stage("denoising"):
            for _ in range(3):
                with sigmascope.step():
                    pass
    return Response("x")


async def fail(request: Request) -> Response:
    """As a card that is full does."""
    with monitor.monitor_generation("pocket"):
        raise MemoryError("CUDA out of memory")


async def style(request: Request) -> Response:
    """A generation on a card, which is not here, with a LoRA that does nothing."""
    publish(generation(pipeline="pocket", facts={"lora_application": {"effective": False}}))
    return Response("x")


app = PerformanceMonitoringMiddleware(
    Starlette(routes=[Route("/draw/{prompt}", draw), Route("/fail", fail), Route("/style", style)]),
    metrics_path="/metrics",
)
