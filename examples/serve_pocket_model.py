"""A server that relights pictures with the pocket model, watched request by request.

pip install -e '.[lbm,prometheus]' starlette uvicorn
uvicorn --app-dir examples serve_pocket_model:app

curl --data-binary @photo.jpg http://127.0.0.1:8000/relight > relit.png
curl http://127.0.0.1:8000/performance       # requests, and the generations made for them
curl http://127.0.0.1:8000/metrics           # the same for Prometheus
"""

import asyncio
import io
from functools import cache

import torch
from PIL import Image, UnidentifiedImageError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import sigmascope
from sigmascope import load_lbm, translate_image
from sigmascope.integrations.asgi import PerformanceMonitoringMiddleware
from sigmascope.lbm.model import LbmModel
from sigmascope.lbm.pocket import TUNED_PATH

STEPS = 2
SIZE = (64, 64)
monitor = sigmascope.PerformanceMonitor(target_generation_time=2.0)


@cache
def model() -> LbmModel:
    """The model. It is loaded at the first request, and each later generation knows how long that took."""
    loaded, _ = monitor.measure_model_load_time(load_lbm, TUNED_PATH)
    return loaded


def relight(picture: Image.Image) -> bytes:
    """Relight one picture in a worker thread. The generation carries the id of its request."""
    with (
        torch.no_grad(),
        monitor.monitor_generation("pocket LBM", "UNet", num_steps=STEPS, resolution=SIZE, model=model()),
    ):
        relit = translate_image(model(), picture, num_inference_steps=STEPS, seed=0, size=SIZE)
    written = io.BytesIO()
    relit.save(written, format="PNG")
    return written.getvalue()


async def relight_request(request: Request) -> Response:
    """POST a picture, get it back in another light."""
    try:
        picture = Image.open(io.BytesIO(await request.body()))
        picture.load()
    except (UnidentifiedImageError, OSError):
        raise HTTPException(415, "Send a picture, such as PNG or JPEG.") from None
    return Response(await asyncio.to_thread(relight, picture), media_type="image/png")


async def performance(request: Request) -> Response:
    """Times of requests and generations so far."""
    return JSONResponse(
        {
            "requests": app.get_summary(),
            "last_requests": [record.as_dict() for record in app.requests()[-20:]],
            "generations": monitor.get_performance_summary(),
        }
    )


app = PerformanceMonitoringMiddleware(
    Starlette(
        routes=[
            Route("/relight", relight_request, methods=["POST"]),
            Route("/performance", performance),
        ]
    ),
    metrics_path="/metrics",
)
