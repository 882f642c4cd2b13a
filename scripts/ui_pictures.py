"""Take the pictures of the app for docs/ui.md and docs/lbm-serve.md: runs in the light, a LoRA in the dark, the pocket model.

    PYTHONPATH=. python scripts/ui_pictures.py docs/images

The runs and the LoRA are made up, the pages are those of `sigmascope ui` and `sigmascope lbm serve` in Debian's Chromium. It needs Playwright (`pip install playwright`).
"""

import argparse
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from playwright.sync_api import sync_playwright
from safetensors.torch import save_file
from tests.history.kept_runs import kept_run
from tests.ui.pages.test_browser import CHROMIUM

from sigmascope.history.location import SQLITE
from sigmascope.history.store import open_store

WIDTH, HEIGHT = 1200, 860
RUNS, NEW_DRIVER = 140, 132
LAST = datetime(2026, 3, 14, 15, 22, tzinfo=UTC)
RANK = 16


def make_store(file: Path) -> None:
    """Runs of two pipelines over a month; one of them is a quarter slower since a new driver."""
    file.parent.mkdir(parents=True)
    randomly = random.Random(1)
    started = LAST - timedelta(hours=5 * RUNS)
    with open_store(f"{SQLITE}{file}") as store:
        for number in range(RUNS):
            started += timedelta(hours=5, minutes=randomly.uniform(-120, 120))
            is_flux = number % 5 in (0, 2, 3)
            seconds = randomly.gauss((14.0 if number >= NEW_DRIVER else 11.2) if is_flux else 6.1, 0.1)
            run = kept_run(
                id=hashlib.sha256(str(number).encode()).hexdigest()[:32],
                started_at=started.isoformat(),
                seconds=seconds,
                pipeline="FluxPipeline" if is_flux else "StableDiffusionXLPipeline",
                size=(1024, 1024),
                steps=28 if is_flux else 30,
                loras={"unet.fox": {"file": "fox-style-v3.safetensors"}} if number % 3 == 0 else {},
                error="OutOfMemoryError: CUDA out of memory." if number == RUNS - 5 else None,
            )
            tags = ["before"] if number in (NEW_DRIVER - 1, NEW_DRIVER - 2) else []
            store.add(run, "watch", tags=tags, notes=["driver 575 → 580"] if number == NEW_DRIVER else [])


def make_lora(file: Path) -> None:
    """A LoRA of SDXL in kohya's names, whose directions fade."""
    made = torch.Generator().manual_seed(0)
    fading = torch.linspace(1.0, 0.02, RANK).square()
    tensors = {}
    for block, width, blocks in ((1, 640, 2), (2, 1280, 2)):
        for inner in range(blocks):
            for name, reads in (
                ("attn1_to_q", width),
                ("attn1_to_v", width),
                ("attn2_to_k", 2048),
                ("attn2_to_v", 2048),
            ):
                key = f"lora_unet_down_blocks_{block}_attentions_{inner}_transformer_blocks_0_{name}"
                up = torch.randn(width, RANK, generator=made) / width**0.5 * fading
                down = torch.randn(RANK, reads, generator=made) / reads**0.5
                tensors |= {f"{key}.lora_up.weight": up.contiguous(), f"{key}.lora_down.weight": down}
                tensors[f"{key}.alpha"] = torch.tensor(8.0)
    save_file(tensors, file)


@contextmanager
def served(home: Path, *command: str) -> Iterator[str]:
    """The address of the app of somebody whose home this is."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SIGMASCOPE_", "XDG_"))}
    words = [sys.executable, "-m", "sigmascope", *command, "--port", "0", "--json"]
    environment = {**kept, "HOME": str(home), "TZ": "UTC"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        yield str(json.loads(process.stdout.readline())["url"])
        process.terminate()


def take(page: Any, path: Path, dither: Image.Dither = Image.Dither.NONE) -> None:
    """A picture of the page's beginning in 256 colours; of all of it where it is to be dithered, as photographs are."""
    shot = page.screenshot(full_page=dither != Image.Dither.NONE)
    picture = Image.open(BytesIO(shot)).convert("RGB")
    picture.quantize(256, dither=dither).save(path, optimize=True)


def take_model(page: Any, path: Path) -> None:
    """A picture of the page on which a model is tried, after two steps on a rendered scene."""
    page.fill("#steps", "2")
    page.get_by_role("button", name="Use a rendered scene").click()
    page.get_by_text("Done.", exact=True).wait_for(timeout=300_000)
    take(page, path, Image.Dither.FLOYDSTEINBERG)


def main() -> None:
    """Take all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where they go")
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as place, sync_playwright() as driver:
        home, lora = Path(place, "home"), Path(place, "sdxl_lora.safetensors")
        make_store(home / ".local/share/sigmascope/runs.db")
        make_lora(lora)
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        with served(home, "ui") as url:
            window = {"width": WIDTH, "height": HEIGHT}
            page = browser.new_page(viewport=window, color_scheme="light")
            page.goto(f"{url}runs")
            take(page, folder / "ui_runs.png")
            page = browser.new_page(viewport=window, color_scheme="dark")
            page.goto(f"{url}lora")
            page.set_input_files("input[type=file]", lora)
            page.locator("button[type=submit]").click()
            page.wait_for_url(re.compile(r"/lora/.+"))
            take(page, folder / "ui_lora.png")
        with served(home, "lbm", "serve", "--pocket", "--resolution", "128") as url:
            page = browser.new_page(viewport=window, color_scheme="light")
            page.goto(url)
            take_model(page, folder / "lbm_serve.png")
        browser.close()


if __name__ == "__main__":
    main()
