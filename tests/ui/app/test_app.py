import dataclasses
import gc
import io
import json
import re
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient
from tests.ui.conftest import HOST, Upload, encoded, make_app, outcome

from sigmascope.lbm.infer import translate_image
from sigmascope.records.serialization import run_from_json
from sigmascope.reports import html
from sigmascope.ui import lbm_model
from sigmascope.ui.app import ASSETS
from sigmascope.ui.lbm_model import Picture, Pictures, ServedModel
from sigmascope.ui.security import Limits

LOOK = html.ASSETS / "look.css"


def pixels(data: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(data)))


def test_upload_ask_and_fetch_give_what_the_library_gives(
    client: TestClient, upload: Upload, served: ServedModel, photograph: Image.Image
) -> None:
    picture = upload(encoded(photograph))
    found = outcome(client, picture, scale=0.5, steps=2, seed=4, size="96x64")
    fetched = {
        name: client.get(f"/api/results/{found[name]['id']}/picture.png") for name in ("base", "result")
    }
    assert all(answer.headers["content-type"] == "image/png" for answer in fetched.values())
    assert served.lora is not None
    for name, scale in (("base", 0.0), ("result", 0.5)):
        served.lora.scale = scale
        direct = translate_image(served.model, photograph, num_inference_steps=2, seed=4, size=(96, 64))
        assert np.array_equal(pixels(fetched[name].content), np.asarray(direct))
    source = client.get(f"/api/pictures/{picture}.png")
    assert np.array_equal(pixels(source.content), np.asarray(photograph))
    run = run_from_json(client.get(f"/api/results/{found['result']['id']}/run.json").content)
    assert run.stage("lora_application").facts["scale"] == 0.5


def held_translation(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Let translations wait: the first event says that one has begun, the second lets it go on."""
    entered, proceed = threading.Event(), threading.Event()
    real = translate_image

    def held(*args: Any, **options: Any) -> Image.Image:
        entered.set()
        assert proceed.wait(20)
        return real(*args, **options)

    monkeypatch.setattr(lbm_model, "translate_image", held)
    return entered, proceed


def test_the_server_answers_while_the_model_works_and_says_who_is_next(
    client: TestClient, upload: Upload, photograph: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, proceed = held_translation(monkeypatch)
    picture = upload(encoded(photograph))

    def ask(name: str, scale: float) -> dict[str, Any]:
        answer = client.post("/api/jobs", json={"picture": picture, "client": name, "scale": scale})
        assert answer.status_code == 202
        told: dict[str, Any] = answer.json()
        return told

    first = ask("a", 1.0)
    assert entered.wait(20)
    assert client.get("/api/about").json()["lora_modules"] == 1
    second, third = ask("b", 0.2), ask("a", 0.3)
    assert (second["position"], third["position"]) == (1, 2)
    fourth = ask("b", 0.4)
    assert fourth["position"] == 1
    assert client.get(f"/api/jobs/{second['id']}").json()["state"] == "replaced"
    assert client.get(f"/api/jobs/{first['id']}").json()["state"] == "running"
    proceed.set()
    for job in (first, fourth, third):
        while job["state"] in ("waiting", "running"):
            job = client.get(f"/api/jobs/{job['id']}", params={"after": job["version"]}).json()
        assert job["state"] == "done"


def test_the_page_escapes_what_files_are_called(served: ServedModel) -> None:
    evil = dataclasses.replace(served, base_name="<img src=x>.ckpt", lora_name="</script><b>.safetensors")
    with TestClient(make_app(evil), base_url=HOST) as client:
        page = client.get("/").text
    assert "<img src=x>" not in page
    assert "</script><b>" not in page
    assert "&lt;img src=x&gt;.ckpt" in page
    about = re.search(r'<script type="application/json" id="about">(.*?)</script>', page)
    assert about is not None
    assert json.loads(about[1])["lora"] == "</script><b>.safetensors"


def test_without_a_lora_the_page_says_how_to_load_one(served: ServedModel) -> None:
    bare = ServedModel(served.model, base_name="tiny", resolution=64)
    with TestClient(make_app(bare), base_url=HOST) as client:
        page = client.get("/").text
    assert "--lora_path" in page
    assert 'id="scale"' not in page


@pytest.mark.parametrize("path", ["/", "/static/main.js", "/api/about", "/nothing"])
def test_every_answer_keeps_the_page_to_itself(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["cache-control"] == "no-store"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "access-control-allow-origin" not in headers


def test_nothing_comes_from_elsewhere_and_nothing_is_inline() -> None:
    files = [path for path in (*ASSETS.rglob("*"), LOOK) if path.is_file()]
    assert {"lbm.html.jinja", "main.js"} <= {path.name for path in files}
    for path in files:
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//[a-z]+\.|@import|innerHTML|insertAdjacentHTML", text), path
        assert not re.search(r"\son[a-z]+=|\sstyle=", text), path  # the page's own policy would block it


def test_every_file_that_the_page_names_is_served(client: TestClient) -> None:
    page = client.get("/").text
    named = set(re.findall(r'(?:src|href)="\./(static/[^"]+)"', page))
    for script in (ASSETS / "static").glob("*.js"):
        imported = re.findall(r'from "\./([^"]+)"', script.read_text(encoding="utf-8"))
        named |= {f"static/{name}" for name in imported}
    assert len(named) > 5
    assert {name: client.get(name).status_code for name in named} == dict.fromkeys(named, 200)


@pytest.mark.parametrize(
    ("method", "path", "options", "status", "message"),
    [
        ("GET", "/nothing", {}, 404, "GET /nothing: Not Found."),
        ("GET", "/static/../app.py", {}, 404, ""),
        ("GET", "/static/%2e%2e/%2e%2e/app.py", {}, 404, ""),
        ("DELETE", "/api/jobs", {}, 405, "Method Not Allowed"),
        ("POST", "/api/pictures", {"content": b"words"}, 415, "not a readable picture"),
        ("POST", "/api/pictures", {"content": b"x" * 5001}, 413, "larger than"),
        ("POST", "/api/pictures", {"content": iter([b"x" * 3000] * 2)}, 413, "larger than"),
        ("POST", "/api/jobs", {"content": b"words"}, 400, "not JSON"),
        ("POST", "/api/jobs", {"json": {"picture": "gone", "client": "c"}}, 404, "no longer kept"),
        ("POST", "/api/jobs", {"content": b"x" * 9000}, 413, "longer than"),
        ("POST", "/api/scenes/4", {}, 404, "no scene 4"),
        ("POST", f"/api/scenes/{'9' * 5000}", {}, 404, "no scene 9999"),
        ("POST", "/api/jobs", {"headers": {"content-length": "9" * 5000}}, 413, "longer than"),
        ("GET", "/api/jobs/none", {}, 404, "no longer exists"),
        ("GET", "/api/results/none/picture.png", {}, 404, "no longer kept"),
        ("GET", "/api/results/none/run.json", {}, 404, "no longer kept"),
        ("GET", "/", {"headers": {"host": "evil.example"}}, 403, "not a name of this server"),
        ("POST", "/api/jobs", {"headers": {"origin": "http://evil.example"}}, 403, "another page"),
    ],
)
def test_bad_requests_get_a_message_as_json(
    served: ServedModel, method: str, path: str, options: dict[str, Any], status: int, message: str
) -> None:
    with TestClient(make_app(served, Limits(upload_bytes=5000)), base_url=HOST) as client:
        answer = client.request(method, path, **options)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


def test_a_size_too_large_for_any_memory_is_refused_before_it_waits(
    client: TestClient, upload: Upload, photograph: Image.Image
) -> None:
    picture = upload(encoded(photograph))
    wish = {"picture": picture, "client": "c", "size": "99999x99999"}
    answer = client.post("/api/jobs", json=wish)
    assert answer.status_code == 422
    assert "megapixels" in answer.json()["error"]["message"]


def test_the_pocket_model_has_scenes_to_try(served: ServedModel) -> None:
    pocket = dataclasses.replace(served, pocket=True)
    with TestClient(make_app(pocket), base_url=HOST) as client:
        told = client.post("/api/scenes/4")
        assert told.status_code == 201
        assert (told.json()["width"], told.json()["height"]) == (128, 128)
        assert client.get(f"/api/pictures/{told.json()['id']}.png").status_code == 200
        assert client.post("/api/scenes/1000").status_code == 404  # training's own


def test_the_assets_lie_in_the_package() -> None:
    assert Path(lbm_model.__file__).parent == ASSETS.parent


def test_a_job_that_is_over_holds_no_picture(served: ServedModel, photograph: Image.Image) -> None:
    with TestClient(make_app(served, Limits(kept_pictures_bytes=1)), base_url=HOST) as client:
        kept: list[weakref.ref[Image.Image]] = []
        real = Pictures.get

        def noting(pictures: Pictures, picture_id: str) -> Picture:
            picture = real(pictures, picture_id)
            kept.append(weakref.ref(picture.image))
            return picture

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Pictures, "get", noting)
            for picture in (photograph, photograph.rotate(180)):
                sent = client.post("/api/pictures", content=encoded(picture)).json()["id"]
                outcome(client, sent, size="64x64")
        gc.collect()
        assert {reference() is None for reference in kept[:2]} == {True}
        assert {reference() is None for reference in kept[2:]} == {False}


def test_a_job_whose_picture_is_forgotten_in_line_says_so(
    served: ServedModel, photograph: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TestClient(make_app(served, Limits(kept_pictures_bytes=1)), base_url=HOST) as client:
        entered, proceed = held_translation(monkeypatch)

        def ask(picture: Image.Image, name: str) -> dict[str, Any]:
            sent = client.post("/api/pictures", content=encoded(picture)).json()["id"]
            job: dict[str, Any] = client.post("/api/jobs", json={"picture": sent, "client": name}).json()
            return job

        ask(photograph, "a")
        assert entered.wait(20)
        job = ask(photograph.rotate(90), "b")
        client.post("/api/pictures", content=encoded(photograph.rotate(180)))
        proceed.set()
        while job["state"] in ("waiting", "running"):
            job = client.get(f"/api/jobs/{job['id']}", params={"after": job["version"]}).json()
        assert job["error"]["message"] == "This picture is no longer kept."
