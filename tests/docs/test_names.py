"""Files, names and modules that the pages for developers give are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "sigmascope"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")


def test_files_that_contributing_names_are_there() -> None:
    adding = CONTRIBUTING.partition("## How to add")[2].partition("## ")[0]
    paths = re.findall(r"`([\w/]+(?:/|\.pyi?))`", adding)
    assert "lora/formats.py" in paths
    assert [path for path in paths if not ((PACKAGE / path).exists() or (ROOT / path).exists())] == []


def test_a_name_follows_the_file_that_has_it() -> None:
    """Names in capitals and of classes that are to be extended stand in some file that their paragraph names."""
    wrong = []
    for paragraph in CONTRIBUTING.partition("## How to add")[2].partition("## ")[0].split("\n\n"):
        files = [
            folder / path
            for path in re.findall(r"`([\w/]+\.pyi?)`", paragraph)
            for folder in (PACKAGE, ROOT)
            if (folder / path).is_file()
        ]
        text = "\n".join(file.read_text(encoding="utf-8") for file in files)
        wrong += [name for name in re.findall(r"`(_?[A-Z][A-Z_]+)`", paragraph) if name not in text]
    assert wrong == []


def test_the_reference_shows_modules_that_are_there() -> None:
    modules = re.findall(r"^::: sigmascope\.([\w.]+)$", REFERENCE, re.MULTILINE)
    paths = [PACKAGE / module.replace(".", "/") for module in modules]
    assert len(paths) > 20
    assert [path for path in paths if not (path.is_dir() or path.with_suffix(".py").is_file())] == []
