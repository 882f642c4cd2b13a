"""Files of kinds that PEFT loads by itself: what is on the model is found there by its numbers."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families import make_pipeline

from sigmascope.lora.applied_verdict import judge_applied
from sigmascope.probes.peft import read_adapters
from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
LAYERS = {"target_modules": ["to_q", "to_out.0"]}
KINDS: dict[str, Callable[[], Any]] = {
    "loha": lambda: peft.LoHaConfig(r=2, **LAYERS),
    "lokr": lambda: peft.LoKrConfig(r=2, **LAYERS),
    "oft": lambda: peft.OFTConfig(oft_block_size=4, **LAYERS),
    "boft": lambda: peft.BOFTConfig(boft_block_size=4, **LAYERS),
    "hra": lambda: peft.HRAConfig(r=2, **LAYERS),
    "ia3": lambda: peft.IA3Config(feedforward_modules=[], **LAYERS),
}


@pytest.fixture
def unet() -> Any:
    return make_pipeline("sd15").unet


def trained(unet: Any, kind: str, folder: Path, seed: int = 1) -> Path:
    adapted = peft.get_peft_model(deepcopy(unet), KINDS[kind]())
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    adapted.save_pretrained(folder)
    return folder / "adapter_model.safetensors"


def analysis_of(unet: Any, path: Path, loaded: Path) -> dict[str, Any]:
    baseline = capture_lora_baseline(unet, None, path)
    peft.PeftModel.from_pretrained(unet, str(loaded.parent))
    return {**analyze_lora_application_results(baseline, unet, None, (unet, None))}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_peft_loaded_is_found_whole_on_the_model(unet: Any, kind: str, tmp_path: Path) -> None:
    path = trained(unet, kind, tmp_path)
    analysis = analysis_of(unet, path, path)
    assert analysis["effective"] is True
    assert analysis["applied_verdict"]["complete"]
    assert analysis["findings"] == []


@pytest.mark.parametrize("kind", ["oft", "boft", "hra", "ia3"])
def test_another_file_of_the_same_kind_is_not_taken_for_it(unet: Any, kind: str, tmp_path: Path) -> None:
    wanted, loaded = (
        trained(unet, kind, tmp_path / "wanted"),
        trained(unet, kind, tmp_path / "loaded", seed=2),
    )
    analysis = analysis_of(unet, wanted, loaded)
    assert analysis["applied_verdict"]["modules_there"] == 0
    assert "lora_not_loaded" in {finding["id"] for finding in analysis["findings"]}


def test_a_file_that_only_peft_reads_and_that_acts_is_no_error(unet: Any, tmp_path: Path) -> None:
    adapted = peft.get_peft_model(
        deepcopy(unet), peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, **LAYERS)
    )
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    adapted.save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    analysis = analysis_of(unet, path, path)
    assert analysis["effective"] is True
    assert [(one["id"], one["severity"]) for one in analysis["findings"]] == [("lora_unreadable", "info")]


def test_a_change_that_cannot_be_read_is_not_said_to_be_another(unet: Any, tmp_path: Path) -> None:
    path = trained(unet, "oft", tmp_path)
    peft.PeftModel.from_pretrained(unet, str(tmp_path))
    patches = read_adapters(unet).value or ()
    unread = [replace(patch, adapter_type="unknown", stored={}) for patch in patches]
    verdict = judge_applied(path, unread, unet)
    assert (verdict.there, verdict.missing, verdict.findings) == ((), (), ())
    assert all("unknown" in (module.detail or "") for module in verdict.modules)


class Unheard(torch.nn.Module):
    """A model of nobody's family."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))


class UnheardTransformer(Unheard):
    """One that stands for a pipeline's transformer by its name."""


@pytest.mark.parametrize("kind", [Unheard, UnheardTransformer])
def test_a_file_for_a_model_of_one_s_own_is_found_whole_on_it(kind: type, tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, target_modules=["first", "0", "1"], init_lora_weights=False)
    peft.get_peft_model(kind(), config).save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    analysis = analysis_of(kind(), path, path)
    assert analysis["effective"] is True
    assert analysis["applied_verdict"]["complete"]
    assert analysis["findings"] == []
