"""A tiny model with a LoRA, served without a server."""

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from PIL import Image
from starlette.applications import Starlette
from starlette.testclient import TestClient
from tests.lbm.conftest import tiny_config, tiny_model, tiny_yaml

from sigmascope.lbm.config import LbmConfig
from sigmascope.lbm.model import LbmModel, build_lbm
from sigmascope.lora.apply import attach_lora
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.ui import app
from sigmascope.ui.lbm_model import ServedModel
from sigmascope.ui.lbm_page import lbm_part
from sigmascope.ui.security import Limits

__all__ = ["tiny_config", "tiny_model", "tiny_yaml"]  # fixtures

LAYER = "denoiser.conv_in"
HOST = "http://127.0.0.1:7860"


def lora_for(model: LbmModel) -> LoraFile:
    weight = model.denoiser.conv_in.weight
    generator = torch.Generator().manual_seed(3)
    up = torch.randn(weight.shape[0], 2, generator=generator)
    down = torch.randn(2, weight[0].numel(), generator=generator)
    return LoraFile({LAYER: LoraFactors(up, down, alpha=2.0, weight_shape=tuple(weight.shape))})


@pytest.fixture(scope="session")
def served(tiny_config: LbmConfig) -> ServedModel:
    """Shared: only the LoRA's scale may change."""
    torch.manual_seed(0)
    model = build_lbm(tiny_config).eval().requires_grad_(False)
    return ServedModel(
        model,
        base_name="tiny.safetensors",
        resolution=64,
        lora=attach_lora(model, lora_for(model)),
        lora_name="light.safetensors",
        lora_ranks=(2,),
    )


def make_app(served: ServedModel, limits: Limits | None = None) -> Starlette:
    """The page of one model alone."""
    return app.make_app([lbm_part(served, limits)])


@pytest.fixture
def client(served: ServedModel) -> Iterator[TestClient]:
    with TestClient(make_app(served, Limits()), base_url=HOST) as client:
        yield client


@pytest.fixture
def photograph() -> Image.Image:
    return Image.effect_mandelbrot((75, 50), (-2, -1, 1, 1), 60).convert("RGB")


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    written = io.BytesIO()
    image.save(written, format=kind, **options)
    return written.getvalue()


def outcome(client: TestClient, picture: str, **wish: Any) -> dict[str, Any]:
    """Ask and wait as the page does, and give what came out."""
    job = client.post("/api/jobs", json={"picture": picture, "client": "test", **wish}).json()
    while job["state"] in ("waiting", "running"):
        job = client.get(f"/api/jobs/{job['id']}", params={"after": job["version"]}).json()
    assert job["state"] == "done", job
    found: dict[str, Any] = job["outcome"]
    return found


Upload = Callable[[bytes], str]


@pytest.fixture
def upload(client: TestClient) -> Upload:
    def send(data: bytes) -> str:
        answer = client.post("/api/pictures", content=data, headers={"content-type": "image/png"})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    return send
