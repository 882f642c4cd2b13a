"""What pages of the documentation show of the code.

`python scripts/pages.py --write` renews what the repository keeps: the commands and the table of findings. When MkDocs
builds the site, it adds names and modules, and a picture of a report.
"""

import ast
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1] / "src" / "sigmascope"
FACE = PACKAGE / "__init__.pyi"
DOCS = Path(__file__).parents[1] / "docs"
PICTURE = DOCS / "images" / "report.png"
"""Made by each build that finds a browser; not kept in the repository."""


def on_pre_build(config: Any) -> None:
    """Take the picture before MkDocs looks which files there are (a hook of MkDocs)."""
    if not report_picture(PICTURE):
        sys.stderr.write("No Chromium was found: the page on reports has no picture of one.\n")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Add what belongs to a page (a hook of MkDocs)."""
    if page.file.src_uri == "reference.md":
        return markdown.replace("<!-- the face -->", "\n".join(face()))
    if page.file.src_uri == "report.md" and PICTURE.exists():
        return markdown.replace("<!-- the report -->", "![A report in a browser](images/report.png)")
    if page.file.src_uri == "architecture.md":
        return markdown.replace("<!-- the modules -->", "\n".join(modules()))
    return markdown


def commands() -> Iterator[str]:
    """Every command with its arguments and options in Markdown, as Typer writes it from their help."""
    typer = [sys.executable, "-m", "typer", "sigmascope.cli.root", "utils", "docs", "--name", "sigmascope"]
    written = subprocess.run(typer, capture_output=True, text=True, check=True).stdout
    bold = re.sub(r'<span style="font-weight: bold">(.*?)</span>', r"**\1**", written)
    # The page has a heading of its own, and quotes need no entities in Markdown.
    yield from bold.replace("&#x27;", "'").replace("&quot;", '"').strip().splitlines()[1:]


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


def findings() -> Iterator[str]:
    """A row for each kind of finding that rules make: what it is about, its id, how grave it is, what it says."""
    from sigmascope.analysis.diagnostics import RULES

    yield "| about | finding | severity | what it says |\n|---|---|---|---|"
    for rule in sorted(RULES.values(), key=lambda rule: (rule.about, rule.id)):
        yield f"| {rule.about} | `{rule.id}` | {' or '.join(rule.severities)} | {rule.says} |"


def verdicts() -> Iterator[str]:
    """A row for each reason why a LoRA does nothing: the finding, how grave it is, what it says, what to do."""
    from sigmascope.lora.verdict import VERDICTS

    yield "| finding | severity | what it says | what to do |\n|---|---|---|---|"
    for name, row in VERDICTS.items():
        says = f"… {row.many}" if row.many else row.says
        shown = re.sub(r"(\{\w+\})+", "…", says).replace("… …", "…").replace("|", "&#124;")
        advice = re.sub(r"\{\w+\}", "…", row.advice or "Nothing.")
        yield f"| `{name}` | {row.severity} | {shown} | {OF_THE_ERROR.get(name) or advice} |"


def layouts() -> Iterator[str]:
    """A row for each family: the beginnings of names that the tests read, by whose names follow, and what they hold them to."""
    sys.path.insert(0, str(PACKAGE.parents[1]))
    from tests.lora.wild.layouts import proven

    yield "| family | diffusers' names after | original names after | folder | single file | live | to peft | to kohya, comfyui and back |"
    yield "|---|---|---|---|---|---|---|---|"
    for family, starts, counts in proven():
        yield f"| {' | '.join((family, *starts, *counts))} |"


OF_THE_ERROR = {
    "lora_unreadable": "What the error says.",
    "lora_matches_nothing": "What the most frequent reason says.",
}
KEPT = {
    "commands.md": commands,
    "lora-does-nothing.md": verdicts,
    "lora-files.md": layouts,
    "performance.md": findings,
}
"""What the repository keeps, by page; it stands between two markers."""


def renewed(name: str, page: str) -> str:
    """The text of a page with what stands between its markers made anew."""
    before, begin, rest = page.partition("<!-- python scripts/pages.py --write -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not end:
        raise ValueError(f"docs/{name} lacks its markers: {begin.strip() or 'the first'}, <!-- end -->")
    text = "\n".join(KEPT[name]()).strip()
    return f"{before}{begin}\n{text}\n\n{end}{after}"


def report_picture(path: Path) -> bool:
    """Run the pocket model, write its report and show that to a browser without a window.

    Returns:
        Whether there is a browser; without one nothing is written.
    """
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        return False
    from PIL import Image

    from sigmascope import Recorder, load_lbm, translate_image
    from sigmascope.lbm.pocket import BASE_PATH
    from sigmascope.lbm.pocket.scenes import COOL, relighting_pair

    model = load_lbm(BASE_PATH)
    with Recorder(name="relight") as recorder:
        translate_image(model, Image.fromarray(relighting_pair(7, COOL)[0]), num_inference_steps=8)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        recorder.run().to_html(page)
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={folder}/profile", "--window-size=1000,1250", f"--screenshot={path}"]
        subprocess.run([*command, page.as_uri()], check=True, capture_output=True, timeout=120)
    return True


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("Usage: python scripts/pages.py --write")
    for name in KEPT:
        path = DOCS / name
        path.write_text(renewed(name, path.read_text(encoding="utf-8")), encoding="utf-8")
