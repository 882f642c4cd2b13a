"""Every loader that people use on every format and family: it takes what docs/lora-files.md says, and nothing wrongly.

The table there is printed by `python -m tests.lora.writer.loaders`.
"""

import warnings
from pathlib import Path

import pytest
from tests.lora.writer.loaders import FORMATS, LOADERS, MODELS, Taken, row, taken, why_not

DOCS = Path(__file__).parents[3] / "docs" / "lora-files.md"
PACKAGES = ("diffusers", "PEFT", "LyCORIS")
CHECKOUTS = tuple(loader for loader in LOADERS if loader not in PACKAGES)


def loaded(loader: str, format: str, family: str) -> Taken:
    if (reason := why_not(loader)) is not None:
        pytest.skip(reason)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the loaders' own
        found = taken(loader, format, family)
    assert found is not None
    return found


def written_row(loader: str, format: str) -> str | None:
    start = f"| {loader} | {format} |"
    lines = DOCS.read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if line.startswith(start)), None)


def check_row(loader: str, format: str) -> None:
    if (reason := why_not(loader)) is not None:
        pytest.skip(reason)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = row(loader, format)
        assert all(one is None or one.wrong == 0 for one in (taken(loader, format, name) for name in MODELS))
    line = written_row(loader, format)
    if found is None or line is None:
        assert found is line
        return
    *cells, difference = (cell.strip() for cell in found.strip("|").split("|"))
    *written, limit = (cell.strip() for cell in line.strip("|").split("|"))
    assert cells == written
    assert float(difference) <= 10 * max(float(limit), 1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("loader", PACKAGES)
def test_a_loader_takes_what_the_table_says(loader: str, format: str) -> None:
    check_row(loader, format)


@pytest.mark.comfyui
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("loader", CHECKOUTS)
def test_a_loader_of_a_checkout_takes_what_the_table_says(loader: str, format: str) -> None:
    check_row(loader, format)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loader", "format", "family"),
    [
        ("LyCORIS", "kohya", "sd15"),  # attention of ranks 1 to 3
        ("diffusers", "kohya", "sd15"),
        ("diffusers", "peft", "sdxl"),  # a text_projection with a rank of its own
    ],
)
def test_a_loader_takes_the_whole_of_a_lora_of_mixed_rank(loader: str, format: str, family: str) -> None:
    found = loaded(loader, format, family)
    assert (found.right, found.wrong) == (found.layers, 0)
