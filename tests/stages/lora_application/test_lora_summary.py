"""The summary in the terminal."""

import io
import json
import re
from functools import cache
from typing import Any

import pytest
from rich.console import Console
from tests.comfy_shapes.adapters import lora_adapter
from tests.comfy_shapes.modules import BaseModel, Q, SDClipModel
from tests.comfy_shapes.patchers import ModelPatcher
from tests.comfy_shapes.versions import CLIP
from tests.stages.lora_targets import Apply, applied, patches

from sigmascope.stages.lora_application import print_lora_analysis_summary


def printed(analysis: Any, **options: Any) -> str:
    text = io.StringIO()
    print_lora_analysis_summary(analysis, Console(file=text, **{"width": 80, **options}))
    return text.getvalue()


@cache
def _analysis() -> Any:
    return applied(ModelPatcher(BaseModel()), CLIP(ModelPatcher(SDClipModel())), patches())


@pytest.fixture
def analysis() -> Any:
    """Of a LoRA that is registered on both models, made once; its parts are not to be changed."""
    return dict(_analysis())


def test_every_section_is_there(apply: Apply) -> None:
    text = printed(apply(patches(), load=True))
    titles = re.findall(r"^\S+\s+([A-Z ]+):$", text, re.MULTILINE)
    assert titles == [
        "LORA APPLICATION",
        "UNET MODEL CHANGES",
        "UNET WEIGHTS",
        "UNET LORA PATCHES",
        "CLIP MODEL CHANGES",
        "CLIP WEIGHTS",
        "CLIP LORA PATCHES",
        "PLACEMENT",
        "MEMORY IMPACT",
        "PEAK MEMORY",
    ]
    assert text.splitlines()[0] == "🔍 LORA APPLICATION ANALYSIS SUMMARY"
    assert text.splitlines()[1] == "=" * 80


@pytest.mark.parametrize("emoji", ["🔍", "✅", "🔧", "💾", "📊"])
def test_the_seeds_emojis_are_used(analysis: Any, emoji: str) -> None:
    assert emoji in printed(analysis)


@pytest.mark.parametrize("emoji", ["❌", "⚠️"])
def test_trouble_has_its_own_emojis(apply: Apply, emoji: str) -> None:
    assert emoji in printed(apply({Q: lora_adapter()}, strength=0.0))


def test_figures_have_units(analysis: Any) -> None:
    text = printed({**analysis, "elapsed_time": 0.0142})
    assert "Time: 14.2 ms" in text
    assert re.search(r"RAM used: [\d,.]+ MB → [\d,.]+ MB", text)
    assert re.search(r"‖ΔW‖ / ‖W‖: [\d.]+ %", text)


def test_no_line_is_longer_than_80_columns(apply: Apply) -> None:
    analysis = apply({Q: lora_adapter(out=6)}, load=True)
    analysis["unet_lora_patches"]["failed"] = {"k" * 300: "r" * 500}
    assert max(map(len, printed(analysis, width=120).splitlines())) <= 80


def test_it_is_plain_where_there_is_no_terminal(analysis: Any) -> None:
    assert "\x1b" not in printed(analysis)
    assert "\x1b" in printed(analysis, force_terminal=True)


def test_text_of_a_file_cannot_act_on_the_terminal(analysis: Any) -> None:
    analysis["lora_file"] = {"filename": "\x1b[2J[red]x", "file_exists": True}
    text = printed(analysis)
    assert "\x1b" not in text
    assert "[red]x" in text


def test_an_analysis_read_from_a_file_prints_alike(analysis: Any) -> None:
    assert printed(json.loads(json.dumps(analysis))) == printed(analysis)


def test_an_error_is_shown_with_the_end_of_its_traceback(analysis: Any) -> None:
    details = {"type": "ValueError", "message": "m", "traceback": "first\nlast line"}
    text = printed({**analysis, "error": "ValueError: m", "exception_details": details})
    assert "Error: ValueError: m" in text
    assert "last line" in text


def test_families_are_called_as_their_users_call_them(analysis: Any) -> None:
    analysis = analysis | {
        "verdict": {"matched_modules": 1, "total_modules": 1, "file_family": "sd15", "model_family": None}
    }
    text = printed(analysis)
    assert "Made for: Stable Diffusion 1.5" in text
    assert "The model is: an unknown family" in text
