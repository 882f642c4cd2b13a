"""The page of a real watch in which a LoRA was loaded."""

from pathlib import Path
from typing import Any

import pytest
from tests.families import generate, make_pipeline
from tests.families.loras import lora_state, write

import sigmascope


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """SD 1.5 with a LoRA of which one module is for a layer that the model lacks."""
    pipeline = make_pipeline("sd15")
    state = lora_state(pipeline, ["unet"], only="attn1.to_q")
    ends = ("lora_A.weight", "lora_B.weight")
    (known, *_) = {key.split(".lora_")[0] for key in state}
    state |= {f"unet.nowhere.to_q.{end}": state[f"{known}.{end}"].clone() for end in ends}
    path = write(state, tmp_path_factory.mktemp("lora") / "style.safetensors")
    with sigmascope.watch() as run:
        pipeline.load_lora_weights(path)
        generate(pipeline, "sd15")
    return run, len(state) // 2


def test_it_says_how_many_modules_matched_and_names_those_that_did_not(run: Any, tmp_path: Path) -> None:
    recorded, modules = run
    recorded.to_html(tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert f"{modules - 1} of {modules} modules matched the model." in page
    assert "nowhere.to_q" in page


def test_a_saved_record_gives_the_same_page(run: Any, tmp_path: Path) -> None:
    recorded, _ = run
    recorded.save(tmp_path / "run.json")
    recorded.to_html(tmp_path / "now.html")
    sigmascope.load_run(tmp_path / "run.json").to_html(tmp_path / "later.html")
    assert (tmp_path / "later.html").read_bytes() == (tmp_path / "now.html").read_bytes()
