"""What the documentation's build makes itself."""

import runpy
import shutil
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "scripts" / "pages.py"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.mark.slow
@pytest.mark.skipif(
    not any(map(shutil.which, BROWSERS)), reason="there is no Chromium here (Debian: apt install chromium)"
)
def test_the_picture_of_a_report_is_taken_in_a_browser(tmp_path: Path) -> None:
    assert runpy.run_path(str(PAGES))["report_picture"](tmp_path / "report.png")
    with Image.open(tmp_path / "report.png") as picture:
        assert picture.width == 1000
        assert len(picture.convert("RGB").getcolors(1 << 20) or ()) > 20  # no blank page


def test_without_a_browser_there_is_no_picture_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    pages = runpy.run_path(str(PAGES))
    assert not pages["report_picture"](tmp_path / "report.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["commands.md", "performance.md"])
def test_what_a_page_shows_of_the_code_is_up_to_date(name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    renewed = runpy.run_path(str(PAGES))["renewed"](name, text)
    assert text == renewed, f"docs/{name} is out of date; renew it: python scripts/pages.py --write"


def test_only_what_stands_between_the_markers_is_made_anew() -> None:
    page = "Mine.\n<!-- python scripts/pages.py --write -->\nout of date\n<!-- end -->\nMine too."
    renewed = runpy.run_path(str(PAGES))["renewed"]("performance.md", page)
    assert renewed.startswith("Mine.\n")
    assert "out of date" not in renewed
    assert "| memory | `memory_leak` | warning |" in renewed
    assert renewed.endswith("\nMine too.")


def test_a_page_without_its_markers_is_named() -> None:
    with pytest.raises(ValueError, match=r"docs/performance\.md lacks its markers"):
        runpy.run_path(str(PAGES))["renewed"]("performance.md", "no markers")
