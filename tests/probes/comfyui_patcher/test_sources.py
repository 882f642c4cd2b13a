from typing import Any

import pytest
from tests.comfy_shapes.adapters import LoRAAdapter, lora_parts, lora_tuple, random
from tests.comfy_shapes.modules import CONV, NORM, OUT, BaseModel, Q
from tests.comfy_shapes.patchers import ModelPatcher
from tests.comfy_shapes.versions import PATCHERS

from sigmascope.probes.comfyui_patcher import read_patches


def file_of(*keys: Any) -> dict[Any, LoRAAdapter]:
    """What loading a file gives: its adapters share a set."""
    loaded: set[str] = set()
    return {key: LoRAAdapter(loaded, lora_parts()) for key in keys}


def sources(patcher: ModelPatcher) -> list[tuple[str, str | None]]:
    found = read_patches(patcher).value
    assert found is not None
    return [(patch.key, patch.source) for patch in found]


@pytest.fixture
def patcher() -> ModelPatcher:
    return ModelPatcher(BaseModel())


def test_what_was_loaded_together_has_one_source(patcher: ModelPatcher) -> None:
    patcher.add_patches(file_of(Q, OUT))
    assert sources(patcher) == [(Q, "LoRA 1"), (OUT, "LoRA 1")]


def test_two_files_on_one_weight_are_two(patcher: ModelPatcher) -> None:
    patcher.add_patches(file_of(Q))
    patcher.add_patches(file_of(Q))
    assert sources(patcher) == [(Q, "LoRA 1"), (Q, "LoRA 2")]


def test_two_files_on_different_weights_are_two(patcher: ModelPatcher) -> None:
    patcher.add_patches(file_of(Q))
    patcher.add_patches(file_of(OUT))
    assert sources(patcher) == [(Q, "LoRA 1"), (OUT, "LoRA 2")]


def test_parts_of_one_weight_are_one(patcher: ModelPatcher) -> None:
    patcher.add_patches(file_of((OUT, (0, 0, 2)), (OUT, (0, 2, 4))))
    assert sources(patcher) == [(OUT, "LoRA 1"), (OUT, "LoRA 1")]


def test_one_file_applied_twice_is_two(patcher: ModelPatcher) -> None:
    loaded = file_of(Q, OUT)
    patcher.add_patches(loaded)
    patcher.add_patches(loaded)
    assert sources(patcher) == [(Q, "LoRA 1"), (Q, "LoRA 2"), (OUT, "LoRA 1"), (OUT, "LoRA 2")]


def test_differences_belong_to_the_file_that_they_came_with(patcher: ModelPatcher) -> None:
    patcher.add_patches({**file_of(Q), NORM: ("diff", (random(6),))}, float("0.8"))
    patcher.add_patches({**file_of(OUT), NORM: ("diff", (random(6),))}, float("0.8"))
    assert sources(patcher) == [(Q, "LoRA 1"), (NORM, "LoRA 1"), (NORM, "LoRA 2"), (OUT, "LoRA 2")]


@pytest.mark.parametrize("version", PATCHERS)
def test_tuples_are_told_apart_by_their_calls(version: type[ModelPatcher]) -> None:
    patcher = version(BaseModel())
    patcher.add_patches({Q: lora_tuple(), OUT: lora_tuple(6)}, float("0.8"))
    patcher.add_patches({OUT: lora_tuple(6), CONV: lora_tuple(8, 2, 36)}, float("0.8"))
    assert sources(patcher) == [(Q, "LoRA 1"), (OUT, "LoRA 1"), (OUT, "LoRA 2"), (CONV, "LoRA 2")]


def test_a_merged_model_is_called_one(patcher: ModelPatcher) -> None:
    patcher.add_patches(file_of(Q))
    patcher.add_patches({Q: [random(8, 8)]}, 0.25, 0.75)
    assert sources(patcher) == [(Q, "LoRA 1"), (Q, "merged model 1")]


def test_sources_do_not_change_when_the_patcher_is_cloned(patcher: ModelPatcher) -> None:
    patcher.add_patches(file_of(Q))
    clone = patcher.clone()
    clone.add_patches(file_of(Q, OUT))
    assert sources(clone) == [(Q, "LoRA 1"), (Q, "LoRA 2"), (OUT, "LoRA 2")]
