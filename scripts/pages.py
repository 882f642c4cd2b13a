"""Fill the pages of all commands and of all names that the package offers, when MkDocs builds the site."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FACE = Path(__file__).parents[1] / "src" / "sigmascope" / "__init__.pyi"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Add what belongs to a page (a hook of MkDocs)."""
    if page.file.src_uri == "commands.md":
        return f"{markdown}\n{commands()}"
    if page.file.src_uri == "reference.md":
        return markdown.replace("<!-- the face -->", "\n".join(face()))
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
