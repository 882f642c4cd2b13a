"""Every Python example in the documentation runs, top to bottom, in an empty folder."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def examples(page: Path) -> str:
    """The page's code with its own line numbers, so that a failure points into the page."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for match in FENCE.finditer(text):
        first = text.count("\n", 0, match.start(1))
        for offset, line in enumerate(match.group(1).splitlines()):
            lines[first + offset] = line
    return "\n".join(lines)


def pages() -> list[Path]:
    return [
        page
        for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
        if FENCE.search(page.read_text(encoding="utf-8"))
    ]


LONG = ("bench", "lora-apply")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.slow] if page.stem in LONG else [])
        for page in pages()
    ],
)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(examples(page), str(page), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.stem
)
def test_every_link_and_picture_is_there(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    missing = []
    for target, anchor in LINK.findall(text):
        path = page.parent / target if target else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            missing.append(f"{target}#{anchor}")
    assert missing == []


def anchors(page: Path) -> set[str]:
    """What links may name of a page: its headings in lower case, with hyphens for spaces, as MkDocs makes them."""
    headings = HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}
