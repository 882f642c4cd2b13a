"""The page that shows the house names every room and every module of it."""

import re
from pathlib import Path

import sigmascope

PACKAGE = Path(sigmascope.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
ROW = re.compile(r"^\| (?:`(\w+)`|\(top\)) \| .+ \| (.+) \|$", re.MULTILINE)


def test_the_table_holds_each_module_in_its_room() -> None:
    shown = {
        f"{room}.{module}".strip(".")
        for room, modules in ROW.findall(PAGE.read_text(encoding="utf-8"))
        for module in modules.split(", ")
    }
    there = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for path in PACKAGE.rglob("*.py")
        if not path.name.startswith("__")
    }
    assert shown == there
