"""Which file a LoRA loader of diffusers takes, and that tensors are looked at as a file is."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.loaders.lora_base import _best_guess_weight_name
from safetensors.torch import save_file
from torch import nn

from sigmascope.integrations.diffusers.components import lora_source
from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline

FACTORS = {"unet.to_q.lora_A.weight": torch.ones(2, 8), "unet.to_q.lora_B.weight": torch.ones(6, 2)}


@pytest.mark.parametrize(
    "names",
    [
        ("pytorch_lora_weights.safetensors",),
        ("a.safetensors", "pytorch_lora_weights.safetensors"),
        ("my_style.safetensors", "optimizer.safetensors", "notes.txt"),
        ("pytorch_lora_weights.bin",),
    ],
    ids=" ".join,
)
def test_of_a_folder_it_is_the_file_that_diffusers_takes(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).touch()
    ending = "safetensors" if any(name.endswith(".safetensors") for name in names) else "bin"
    taken = _best_guess_weight_name(str(tmp_path), file_extension=f".{ending}")
    assert lora_source((tmp_path,), {}) == str(tmp_path / taken)


def test_of_a_name_on_the_hub_it_is_the_file_in_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def in_cache(name: str, file: str, **_: Any) -> str | None:
        asked.append((name, file))
        return str(tmp_path / file) if "style" in file else None

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(try_to_load_from_cache=in_cache))
    given = {"weight_name": "style.safetensors", "subfolder": "v1"}
    assert lora_source(("who/what",), given) == str(tmp_path / "v1/style.safetensors")
    assert lora_source(("who/what",), {}) is None
    assert asked[1] == ("who/what", "pytorch_lora_weights.safetensors")


@pytest.mark.parametrize(
    ("source", "given"),
    [
        (FACTORS, {"network_alphas": {"a": 1.0}}),
        ({"a": "no tensor"}, {}),
        (7, {}),
        (None, {}),
        ("not/here", {}),
    ],
)
def test_what_cannot_be_read_is_not_known(source: object, given: dict[str, Any]) -> None:
    assert lora_source((source,), given) is None


@pytest.mark.parametrize("name", ["style.safetensors", "folder/style.safetensors", "./style", "~/style"])
def test_a_path_to_nothing_is_told_by_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """diffusers takes it for a name on the hub, and its error speaks of that."""
    monkeypatch.chdir(tmp_path)
    assert lora_source((name,), {}) == str(Path(name))
    assert lora_source((tmp_path,), {"weight_name": "a.safetensors"}) == str(tmp_path / "a.safetensors")
    model = nn.ModuleDict({"to_q": nn.Linear(8, 6)})
    baseline = capture_lora_baseline({"unet": model}, None, lora_source((name,), {}))
    found = analyze_lora_application_results(baseline, {"unet": model}, None, (model, None))
    assert found["findings"][0]["id"] == "lora_unreadable"
    assert "does not exist" in found["findings"][0]["message"]


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({key.replace("to_q", "to_v"): value for key, value in FACTORS.items()}, "lora_matches_nothing"),
        ({key: torch.cat([value] * 2, 1) for key, value in FACTORS.items()}, "lora_unreadable"),
        (FACTORS, "lora_not_loaded"),
    ],
    ids=["another layer", "ranks", "not loaded"],
)
def test_tensors_in_memory_are_looked_at_as_a_file_is(
    state: dict[str, torch.Tensor], reason: str, in_memory: bool, tmp_path: Path
) -> None:
    save_file(state, tmp_path / "style.safetensors")
    source: Any = state if in_memory else tmp_path / "style.safetensors"
    model = nn.ModuleDict({"to_q": nn.Linear(8, 6)})
    baseline = capture_lora_baseline({"unet": model}, None, source)
    found = analyze_lora_application_results(baseline, {"unet": model}, None, (model, None))
    assert found["findings"][0]["id"] == reason
    assert found["lora_file"]["filename"] == (None if in_memory else "style.safetensors")
    if reason != "lora_unreadable":
        assert (found["lora_file"]["rank"], found["lora_file"]["modules"]) == (2, 1)
