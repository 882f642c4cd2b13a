import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sigmascope.cli import ui
from sigmascope.cli.lbm import infer
from sigmascope.cli.root import app
from sigmascope.errors import ConfigError
from sigmascope.lbm.config import load_config
from sigmascope.lbm.model import build_lbm
from sigmascope.lbm.pocket import CONFIG_PATH
from sigmascope.ui import lbm_model
from sigmascope.ui import server as server_module
from sigmascope.ui.lbm_model import ServedModel
from sigmascope.ui.server import Address


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["lbm", "serve", *arguments], catch_exceptions=False)


def test_help_names_every_flag_and_gives_an_example() -> None:
    result = CliRunner().invoke(app, ["lbm", "serve", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    for flag in (
        "--base_model_path",
        "--lora_path",
        "--config_path",
        "--pocket",
        "--torch_dtype",
        "--device",
        "--tile_size",
        "--resolution",
        "--host",
        "--port",
        "--open",
        "--no_open",
        "--json",
        "sigmascope lbm serve --pocket",
    ):
        assert flag in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "0"], "no model to serve"),
        (["--pocket", "--lora-path", "a.safetensors"], "--lora_path would have no effect"),
        (["--pocket", "--port", "99999"], "--port: expected 0 to 65535"),
        (["--base_model_path", "/no/such/model.ckpt", "--port", "0"], "model.ckpt"),
    ],
)
def test_bad_options_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(Exception, match=message):
        run(*arguments)


def test_a_taken_port_is_found_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lbm_model, "load_served", lambda *_, **__: pytest.fail("loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(ConfigError, match=f"--port: {port} is taken"):
            run("--pocket", "--port", port)


@pytest.fixture(scope="module")
def served() -> ServedModel:
    """Named but not loaded."""
    model = build_lbm(load_config(CONFIG_PATH), device="meta")
    return ServedModel(model, base_name="tiny", resolution=128, lora_name="light[1].safetensors")


Announced = Callable[..., tuple[str, str]]


@pytest.fixture
def announced(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Announced:
    """What is printed when a server that is none says that it is ready."""

    def announce(host: str, **flags: Any) -> tuple[str, str]:
        monkeypatch.setattr(lbm_model, "load_served", lambda *_, **__: served)
        token = None if host == "127.0.0.1" else "t0ken"
        address = Address(host, 7860, token)
        monkeypatch.setattr(server_module, "serve", lambda _, listening, host, ready: ready(address))
        infer.serve(pocket=True, device="cpu", host=host, port=0, **flags)
        told = capsys.readouterr()
        return told.out, told.err

    return announce


def test_the_address_is_told(announced: Announced) -> None:
    out, err = announced("127.0.0.1")
    assert out == "Serving tiny + light[1].safetensors at http://127.0.0.1:7860/\n"
    assert "Warning" not in err


def test_json_is_one_line_and_all_there_is(announced: Announced) -> None:
    out, _ = announced("127.0.0.1", as_json=True)
    assert json.loads(out) == {
        "url": "http://127.0.0.1:7860/",
        "host": "127.0.0.1",
        "port": 7860,
        "token": None,
        "model": "tiny",
        "lora": "light[1].safetensors",
    }


def test_beyond_loopback_the_link_with_the_token_is_told_once(announced: Announced) -> None:
    out, err = announced("0.0.0.0", as_json=True)
    assert "anyone with the link" in err
    told = json.loads(out)
    assert (told["url"], told["token"]) == ("http://127.0.0.1:7860/?token=t0ken", "t0ken")
    out, err = announced("0.0.0.0")
    assert (out + err).count("t0ken") == 1
    assert out.endswith("at http://127.0.0.1:7860/?token=t0ken\n")


def test_the_browser_is_opened_only_when_asked(announced: Announced, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(ui, "_open", opened.append)
    announced("127.0.0.1")
    assert opened == []
    announced("127.0.0.1", open_browser=True)
    deadline = time.monotonic() + 10
    while not opened and time.monotonic() < deadline:
        time.sleep(0.01)
    assert opened == ["http://127.0.0.1:7860/"]


def ask(address: dict[str, Any], method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address["host"], address["port"], timeout=120)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.slow
def test_the_real_process_serves_and_ends_with_130_in_the_middle_of_a_job(tmp_path: Path) -> None:
    work, temporary = tmp_path / "work", tmp_path / "temporary"
    work.mkdir()
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "sigmascope", "lbm", "serve", "--pocket", "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=work,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    try:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())
        status, page = ask(address, "GET", "/")
        assert (status, b"pocket model" in page) == (200, True)
        scene = json.loads(ask(address, "POST", "/api/scenes/4")[1])["id"]
        wish = {"picture": scene, "client": "a", "size": "keep"}
        job = json.loads(ask(address, "POST", "/api/jobs", json.dumps(wish).encode())[1])
        while job["state"] in ("waiting", "running"):
            path = f"/api/jobs/{job['id']}?after={job['version']}"
            job = json.loads(ask(address, "GET", path)[1])
        assert job["state"] == "done"
        status, picture = ask(address, "GET", f"/api/results/{job['outcome']['result']['id']}/picture.png")
        assert (status, picture[:4]) == (200, b"\x89PNG")
        endless = json.dumps({**wish, "steps": 100, "size": "512x512"}).encode()
        job = json.loads(ask(address, "POST", "/api/jobs", endless)[1])
        while job["state"] == "waiting":
            job = json.loads(ask(address, "GET", f"/api/jobs/{job['id']}?after={job['version']}")[1])
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130, errors
        assert "Traceback" not in errors
        assert "Error" not in errors
    finally:
        process.kill()
        process.wait()
    assert list(work.iterdir()) == []
    assert [path.name for path in temporary.iterdir() if path.name.startswith("sigmascope")] == []
