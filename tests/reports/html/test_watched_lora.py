"""The page of a real watch in which a LoRA was loaded."""

import re
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


@pytest.fixture(scope="module")
def by_strength(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of SD 1.5 for each of some strengths, which `set_adapters` sets after the loading."""
    pipeline = make_pipeline("sd15")
    path = write(lora_state(pipeline, ["unet"]), tmp_path_factory.mktemp("lora") / "style.safetensors")
    runs = {}
    for strength in (1.0, 0.0):
        with sigmascope.watch(pipeline) as run:
            pipeline.load_lora_weights(path, adapter_name="style")
            pipeline.set_adapters("style", strength)
            generate(pipeline, "sd15")
        pipeline.unload_lora_weights()
        runs[strength] = run
    return runs


def test_setting_the_strength_that_a_lora_has_is_no_fault(by_strength: Any) -> None:
    """The card says that the LoRA acts: no part of the page may say in red that it changes nothing."""
    page = sigmascope.to_html(by_strength[1.0])
    assert '<span class="good">load_lora_weights changed the model.</span>' in page
    assert "<h2>LoRA: set_adapters</h2>" in page
    assert '<span class="">set_adapters changed nothing.</span>' in page


def test_what_each_method_did_is_told_as_past_and_in_sentences_of_their_own(by_strength: Any) -> None:
    """The last of them took the LoRA out, so that none may say that it changes the model now."""
    page = sigmascope.to_html(by_strength[0.0])
    assert '<span class="">set_adapters changed the model.</span>' in page
    words = " ".join(re.sub(r"<[^>]+>", "", page).split())
    assert re.search(
        r"load_lora_weights changed the model\. \d+ of \d+ modules matched the model\. Rank", words
    )


@pytest.mark.parametrize(
    ("before", "now", "tone"), [(1.0, 0.0, " tone-bad"), (0.0, 1.0, ""), (1.0, 1.0, ""), (0.0, 0.0, "")]
)
def test_a_comparison_warns_where_a_lora_no_longer_acts(
    by_strength: Any, before: float, now: float, tone: str
) -> None:
    page = sigmascope.to_html([by_strength[before], by_strength[now]])
    first = re.search(r'<p class="verdict([^"]*)">', page)
    assert first is not None
    assert first[1] == tone
