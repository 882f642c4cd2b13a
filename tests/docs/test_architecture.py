"""The page that shows the house names every room, and in the site every module of it."""

import re
import runpy
from pathlib import Path

import sigmascope

PACKAGE = Path(sigmascope.__file__).parent
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_table_names_each_room() -> None:
    there = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == there


def test_the_site_adds_a_row_for_each_module() -> None:
    assert "<!-- the modules -->" in PAGE
    rows = "\n".join(runpy.run_path(str(ROOT / "scripts" / "pages.py"))["modules"]())
    there = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for path in PACKAGE.rglob("*.py")
        if not path.name.startswith("__")
    }
    assert set(re.findall(r"^\| `([\w.]+)` \| \S.* \|$", rows, re.MULTILINE)) == there
