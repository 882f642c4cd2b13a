"""The report in a real browser, Debian's Chromium without a window: no error on its console, and no payload runs."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.reports.html.payloads import PAYLOADS, run_that_holds

from sigmascope.reports.html import write_html

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here (Debian: apt install chromium)"),
]
MARK = "attacked-here"
WITNESS = f"<script>function attacked() {{ document.documentElement.className = '{MARK}'; }}</script>"
"""What a payload calls if it runs."""


def opened(path: Path, profile: Path, *options: str) -> tuple[str, str]:
    """The page as it stands after its scripts ran, and what the browser wrote to its log."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=2000", *options, path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, done.stderr


def test_no_payload_runs_and_the_console_is_silent(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    write_html([run_that_holds(payload) for payload in PAYLOADS], page, prompts="full")
    html = page.read_text(encoding="utf-8")
    page.write_text(html.replace("<head>", f"<head>{WITNESS}", 1), encoding="utf-8")
    dom, log = opened(page, tmp_path / "profile", "--dump-dom")
    assert MARK not in dom.replace(WITNESS, "")
    assert "CONSOLE" not in log
    assert "Made by Sigmascope" in dom


@pytest.mark.parametrize("payload", ["<img src=x onerror=attacked()>", "<script>attacked()</script>"])
def test_a_payload_that_were_not_escaped_would_be_seen(tmp_path: Path, payload: str) -> None:
    page = tmp_path / "report.html"
    write_html(run_that_holds("harmless"), page)
    html = page.read_text(encoding="utf-8").replace("<head>", f"<head>{WITNESS}", 1)
    page.write_text(html.replace("</main>", f"{payload}</main>"), encoding="utf-8")
    dom, _ = opened(page, tmp_path / "profile", "--dump-dom")
    assert MARK in dom.replace(WITNESS, "")


def test_an_error_of_a_script_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    write_html(run_that_holds("harmless"), page)
    html = page.read_text(encoding="utf-8").replace("</main>", "<script>absent()</script></main>")
    page.write_text(html, encoding="utf-8")
    _, log = opened(page, tmp_path / "profile", "--dump-dom")
    assert "CONSOLE" in log


def test_zooming_widens_the_timeline_and_keys_do_it_too(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    write_html(run_that_holds("harmless"), page)
    act = """<script>
    document.querySelector("button[data-zoom='2']").click();
    document.querySelector(".zoom[tabindex]").dispatchEvent(new KeyboardEvent("keydown", {key: "+"}));
    document.body.dataset.width = document.querySelector(".wide").style.width;
    </script></body>"""
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", act), encoding="utf-8")
    dom, _ = opened(page, tmp_path / "profile", "--dump-dom")
    assert 'data-width="400%"' in dom


def test_it_fits_a_phone(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    write_html([run_that_holds("harmless")] * 2, page)
    act = "<script>document.body.dataset.wide = document.documentElement.scrollWidth</script></body>"
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", act), encoding="utf-8")
    dom, _ = opened(page, tmp_path / "profile", "--window-size=500,800", "--dump-dom")  # its least width
    assert int(re.search(r'data-wide="(\d+)"', dom)[1]) <= 500  # type: ignore[index]
