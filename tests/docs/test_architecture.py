"""The page that shows the house names every room, and in the site every module of it."""

import ast
import re
import runpy
from functools import cache
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


def test_each_answer_is_in_a_file_of_its_row() -> None:
    """Of "Where things are": the files are there, and define every name that stands beside them."""
    section = PAGE.partition("## Where things are")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| .+ \| (`.+) \| (.+) \|$", section, re.MULTILINE)
    assert len(rows) > 30
    for files, names in rows:
        defined = {
            name for path in re.findall(r"`([\w/]+\.py)`", files) for name in _defined_in(PACKAGE / path)
        }
        assert set(re.findall(r"`(\w+)`", names)) <= defined, files


@cache
def _defined_in(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return names
