"""What the documentation's build makes itself."""

import runpy
import shutil
from pathlib import Path

import pytest
from PIL import Image

PAGES = Path(__file__).parents[2] / "scripts" / "pages.py"
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
