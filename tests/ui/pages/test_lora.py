"""The LoRA inspector: what a dropped file becomes, what is refused, and that nothing is left behind."""

import json
import pickle
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from starlette.testclient import TestClient
from tests.reports.html.payloads import PAYLOADS
from tests.ui.conftest import HOST
from tests.ui.pages.conftest import HTML
from tests.ui.pages.parsed import Parsed, faults_of

from sigmascope.lora.compare import compare_loras
from sigmascope.lora.inspect import inspect_lora
from sigmascope.lora.together import inspect_together
from sigmascope.ui.app import make_app
from sigmascope.ui.lora_pages import lora_part
from sigmascope.ui.security import Limits
from sigmascope.units import statistic

LAYER = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q"
SINGULAR = (3.0, 2.0, 1.0, 0.0)
"""Of the one change: 9, 4 and 1 of 14 parts of its energy."""


def lora_bytes(scale: float = 1.0, metadata: Mapping[str, str] | None = None, name: str = LAYER) -> bytes:
    """A kohya LoRA of one module of rank 4 whose change has planted singular values."""
    up = torch.zeros(640, 4)
    up[range(4), range(4)] = torch.tensor(SINGULAR) * scale
    down = torch.eye(640)[:4].contiguous()
    tensors = {
        f"{name}.lora_up.weight": up,
        f"{name}.lora_down.weight": down,
        f"{name}.alpha": torch.tensor(4.0),
    }
    return bytes(save(tensors, metadata=None if metadata is None else dict(metadata)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def browser(folder: Path) -> Iterator[TestClient]:
    with TestClient(make_app([lora_part()]), base_url=HOST, headers=HTML) as client:
        yield client


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("sigmascope-ui-*/*"))


def drop(client: TestClient, *files: tuple[str, bytes], path: str = "/lora") -> Any:
    return client.post(path, files=[("lora", file) for file in files])


def test_a_dropped_file_is_inspected(browser: TestClient, tmp_path: Path) -> None:
    data = lora_bytes(metadata={"modelspec.trigger_phrase": "fox style"})
    answer = drop(browser, ("fox.safetensors", data))
    assert answer.status_code == 200
    assert not faults_of(answer.text)
    page = Parsed(answer.text)
    (tmp_path / "fox.safetensors").write_bytes(data)
    report = inspect_lora(tmp_path / "fox.safetensors")
    assert page.cells_after("Format", 1) == ["kohya"]
    assert page.cells_after("Strength ‖ΔW‖", 1) == ["3.74"] == [statistic(report.norm)]  # √14
    assert page.cells_after("Kept as a bar", 6) == [
        "1",
        "64.3 %",
        "2",
        "92.9 %",
        "4",
        "100.0 %",
    ]  # 9 and 13 of 14
    assert page.cells_after("down_blocks.1", 2) == ["1", "4"]
    assert page.cells_after("diffusers 0.42 with PEFT", 2) == ["1 of 1", "1"]
    assert page.cells_after("trigger", 1) == ["fox style"]


def test_a_second_file_shows_difference_and_interference(browser: TestClient, tmp_path: Path) -> None:
    first = drop(browser, ("a.safetensors", lora_bytes()))
    answer = drop(browser, ("b.safetensors", lora_bytes(0.5)), path=first.url.path)
    assert answer.status_code == 200
    assert not faults_of(answer.text)
    page = Parsed(answer.text)
    assert "The second is the first at 0.5 of its strength." in page.texts
    assert page.cells_after("Difference", 1) == ["50.0 %"]
    assert page.cells_after("Cosine", 1) == ["1"]
    # 2·<A, A/2> / (|A|² + |A/2|²) = 1 / 1.25
    assert page.cells_after("Interference", 1) == ["+80.0 %"]
    both = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path, scale in zip(both, (1.0, 0.5), strict=True):
        path.write_bytes(lora_bytes(scale))
    assert compare_loras(*both).verdict == "scaled"
    assert inspect_together(both).total.interference == pytest.approx(0.8)


def test_two_files_may_be_dropped_at_once(browser: TestClient) -> None:
    answer = drop(browser, ("a.safetensors", lora_bytes()), ("b.safetensors", lora_bytes()))
    assert "Both make the same change." in answer.text
    three = drop(browser, *[(f"{name}.safetensors", lora_bytes()) for name in "abc"])
    assert three.status_code == 422


class Exploit:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("code of a file was run",))


@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (pickle.dumps(Exploit()), 415, "no safetensors file"),
        (b"PK\3\4" + bytes(5000), 415, "no safetensors file"),
        (b"", 415, "is empty"),
        (b"\2", 415, "no safetensors file"),
        (struct.pack("<Q", 10**12) + b"{}", 415, "no safetensors file"),
        (struct.pack("<Q", 5) + b"[1,2]", 415, "no safetensors file"),
        (struct.pack("<Q", 900) + b'{"a": 1}', 422, "evil.safetensors"),
        (lora_bytes()[:-100], 422, "evil.safetensors"),
        (bytes(save({"weight": torch.zeros(2)})), 422, "evil.safetensors"),
    ],
)
def test_other_files_are_refused_by_name_and_leave_nothing(
    browser: TestClient, folder: Path, data: bytes, status: int, words: str
) -> None:
    answer = drop(browser, ("evil.safetensors", data))
    assert answer.status_code == status
    assert words in answer.text
    assert str(folder) not in answer.text
    assert kept(folder) == []


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"content": lora_bytes(), "headers": {"content-type": "application/octet-stream"}}, 415),
        ({"content": b"words", "headers": {"content-type": "multipart/form-data; boundary=x"}}, 400),
        ({"content": b'--x\r\ncontent-disposition: form-data; name="lora"; filename="a"\r\n\r\n' + lora_bytes()[:900], "headers": {"content-type": "multipart/form-data; boundary=x"}}, 400),
        ({"content": b"--x\r\n" + b"a" * 9000, "headers": {"content-type": "multipart/form-data; boundary=x"}}, 400),
        ({"content": b"--x--\r\n", "headers": {"content-type": "multipart/form-data; boundary=x"}}, 422),
        ({"data": {"lora": "words"}}, 415),
        ({"files": [("lora", ("", b""))]}, 422),
    ],
)  # fmt: skip
def test_a_form_that_is_none_leaves_nothing(
    browser: TestClient, folder: Path, options: dict[str, Any], status: int
) -> None:
    answer = browser.post("/lora", **options)
    assert answer.status_code == status
    assert "What to do" in answer.text
    assert kept(folder) == []


def test_a_file_that_is_too_large_is_refused_while_it_comes(folder: Path) -> None:
    limits = Limits(lora_bytes=4000)
    with TestClient(make_app([lora_part(limits)]), base_url=HOST, headers=HTML) as client:
        data = struct.pack("<Q", 4000) + b"{" + bytes(3 << 20)
        assert drop(client, ("big.safetensors", data)).status_code == 413
        body = b'--x\r\ncontent-disposition: form-data; name="lora"; filename="a"\r\n\r\n' + data
        pieces = (body[start : start + 65536] for start in range(0, len(body), 65536))
        headers = {"content-type": "multipart/form-data; boundary=x"}  # and no length
        assert client.post("/lora", content=pieces, headers=headers).status_code == 413
        assert kept(folder) == []


def test_a_full_disk_is_told(browser: TestClient, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        name = str(folder / "full")

        def write(self, data: bytes) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            """As files do."""

    monkeypatch.setattr(Path, "open", lambda *_: Full())
    answer = drop(browser, ("a.safetensors", lora_bytes()))
    assert answer.status_code == 507
    assert "No space left" in answer.text


def test_only_the_last_files_stay_and_none_after_the_end(folder: Path) -> None:
    with TestClient(make_app([lora_part(Limits(kept_loras=3))]), base_url=HOST, headers=HTML) as client:
        addresses = [drop(client, (f"{n}.safetensors", lora_bytes())).url.path for n in range(5)]
        assert len(kept(folder)) == 3
        assert [client.get(path).status_code for path in addresses] == [404, 404, 200, 200, 200]
        assert "Drop the file again" in client.get(addresses[0]).text
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["../../up.safetensors", "C:\\loras\\up.safetensors", "/etc/up.safetensors"])
def test_a_name_with_folders_is_a_name(browser: TestClient, folder: Path, name: str) -> None:
    page = drop(browser, (name, lora_bytes()))
    assert Parsed(page.text).texts.count("up.safetensors") >= 1
    assert all(path.parent.parent == folder for path in kept(folder))


@pytest.mark.slow
def test_sixty_texts_of_strangers_stay_text(browser: TestClient) -> None:
    def page_of(text: str) -> Parsed:
        metadata = {
            "ss_output_name": text,
            "modelspec.title": text,
            "ss_tag_frequency": json.dumps({"x": {text: 3}}),
        }
        return Parsed(drop(browser, (text.replace("/", "|"), lora_bytes(metadata=metadata))).text)

    expected = page_of("harmless").elements
    for text in PAYLOADS:
        page = page_of(text)
        assert page.elements == expected, text
        assert any(text in shown for shown in page.texts), text


def test_another_site_cannot_send_a_file(browser: TestClient, folder: Path) -> None:
    for header in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
        answer = browser.post("/lora", files={"lora": ("a.safetensors", lora_bytes())}, headers=header)
        assert answer.status_code == 403
    assert kept(folder) == []


def test_not_a_number_is_told(browser: TestClient, tmp_path: Path) -> None:
    path = tmp_path / "nan.safetensors"
    save_file({f"{LAYER}.lora_up.weight": torch.full((640, 4), float("nan")), f"{LAYER}.lora_down.weight": torch.ones(4, 640)}, path)  # fmt: skip
    answer = drop(browser, ("nan.safetensors", path.read_bytes()))
    assert answer.status_code == 200
    assert "NaN" in answer.text
    both = drop(browser, ("nan.safetensors", path.read_bytes()), ("a.safetensors", lora_bytes()))
    assert both.status_code == 200
    assert "They cannot be compared" in both.text
