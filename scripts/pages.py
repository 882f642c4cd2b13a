"""Fill the pages of all commands, all names that the package offers and all its modules, when MkDocs builds the site."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1] / "src" / "sigmascope"
FACE = PACKAGE / "__init__.pyi"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Add what belongs to a page (a hook of MkDocs)."""
    if page.file.src_uri == "commands.md":
        return f"{markdown}\n{commands()}"
    if page.file.src_uri == "reference.md":
        return markdown.replace("<!-- the face -->", "\n".join(face()))
    if page.file.src_uri == "architecture.md":
        return markdown.replace("<!-- the modules -->", "\n".join(modules()))
    return markdown


def commands() -> str:
    """Every command with its arguments and options in Markdown, as Typer writes it from their help."""
    typer = [sys.executable, "-m", "typer", "sigmascope.cli.root", "utils", "docs", "--name", "sigmascope"]
    told = subprocess.run(typer, capture_output=True, text=True, check=True).stdout
    return told.partition("\n")[2]  # the page has a heading of its own


def face() -> Iterator[str]:
    """A heading for each group of the package's names, and below it what mkdocstrings makes of each name."""
    for line in FACE.read_text(encoding="utf-8").partition("__all__")[2].splitlines():
        if line.startswith("# "):
            yield f"\n## {line[2:]}\n"
        for name in re.findall(r"\b(\w+) as \1\b", line):
            if not name.startswith("_"):
                yield f"::: sigmascope.{name}"


def modules() -> Iterator[str]:
    """A row for each module: its name, and the first line of its docstring."""
    yield "## Modules\n\n| module | what it holds |\n|---|---|"
    for path in sorted(PACKAGE.rglob("*.py")):
        if not path.name.startswith("__"):
            name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            says = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
            yield f"| `{name}` | {says.replace('|', '&#124;')} |"
