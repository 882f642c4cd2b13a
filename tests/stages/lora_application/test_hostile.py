"""Whatever the host's objects raise stays with the monitor."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.comfy_shapes.adapters import lora_adapter
from tests.comfy_shapes.modules import CLIP_Q, BaseModel, Q, SDClipModel
from tests.comfy_shapes.patchers import ModelPatcher
from tests.comfy_shapes.versions import CLIP
from torch import nn

import sigmascope
from sigmascope.stages.lora_application import (
    analyze_lora_application_results,
    capture_lora_baseline,
    print_lora_analysis_summary,
)

ATTRIBUTES = (
    "model",
    "patches",
    "backup",
    "patches_uuid",
    "load_device",
    "offload_device",
    "device",
    "parent",
    "hook_patches",
    "object_patches",
    "injections",
    "patcher",
    "components",
    "cond_stage_model",
    "current_weight_patches_uuid",
    "diffusion_model",
    "__len__",
    "__class__",
)
ERRORS = (AttributeError, KeyError, NotImplementedError, RuntimeError, ZeroDivisionError, RecursionError)


def raising(base: type, name: str, error: type[Exception]) -> type:
    """A class whose instances raise when one attribute of them is read."""

    class Raising(base):  # type: ignore[misc]
        def __getattribute__(self, wanted: str) -> Any:
            if wanted == name and not object.__getattribute__(self, "__dict__").get("_building"):
                raise error(wanted)
            return super().__getattribute__(wanted)

    return Raising


def hostile(kind: type, model: nn.Module, name: str, error: type[Exception]) -> Any:
    """A patcher, CLIP or module that raises from now on."""
    made = kind(model) if kind is not CLIP else CLIP(ModelPatcher(model))
    made.add_patches({Q: lora_adapter(), CLIP_Q: lora_adapter()}, 1.0)
    made.__class__ = raising(kind, name, error)
    return made


@pytest.mark.parametrize(("name", "first"), [(name, index) for index, name in enumerate(ATTRIBUTES)])
def test_every_attribute_may_raise_at_any_time(name: str, first: int) -> None:
    """Two kinds of error at each place, and each kind at six places."""
    for index in (first, first + 3):
        error = ERRORS[index % len(ERRORS)]
        unet = hostile(ModelPatcher, BaseModel(), name, error)
        clip = hostile(CLIP, SDClipModel(), name, error)
        baseline = capture_lora_baseline(unet, clip)
        found = analyze_lora_application_results(baseline, unet, clip, (unet, clip))
        assert found["models_returned"] == 2


class Hostile:
    """Raises whatever it is asked."""

    def __init__(self, error: type[Exception]) -> None:
        self.__dict__["error"] = error

    def __getattr__(self, name: str) -> Any:
        raise self.__dict__["error"](name)

    def __iter__(self) -> Any:
        raise ZeroDivisionError

    def __len__(self) -> int:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    def __bool__(self) -> bool:
        raise RuntimeError

    __hash__ = None  # type: ignore[assignment]


class HostileMapping(Mapping[str, Any]):
    """A mapping that cannot be read."""

    def __getitem__(self, key: str) -> Any:
        raise RuntimeError(key)

    def __iter__(self) -> Any:
        raise RuntimeError("no iteration")

    def __len__(self) -> int:
        return 3


THINGS: list[Callable[[], Any]] = [
    lambda: Hostile(RuntimeError),
    lambda: Hostile(LookupError),
    HostileMapping,
    lambda: {"unet": Hostile(OSError), "captured": 3},
    lambda: [Hostile(OSError), nn.Linear(2, 2)],
    lambda: ModelPatcher(BaseModel()),
    lambda: nn.Linear(2, 2),
    lambda: 7,
    lambda: None,
    lambda: "text",
    lambda: ModelPatcher,
]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(range(len(THINGS))), min_size=5, max_size=5))
@pytest.mark.slow
def test_no_object_in_any_place_reaches_the_caller(chosen: list[int]) -> None:
    unet, clip, path, result, other = (THINGS[index]() for index in chosen)
    baseline = capture_lora_baseline(unet, clip, path)
    found = analyze_lora_application_results(baseline, clip, other, result)
    assert isinstance(found["findings"], list)
    assert isinstance(analyze_lora_application_results(other, unet, clip, result)["findings"], list)
    for model_type in ("UNet", "CLIP"):
        sigmascope.track_model_identity_changes(unet, clip, model_type)
        sigmascope.track_weight_modifications(unet, other, model_type)
        sigmascope.track_model_placement_changes(unet, clip, model_type)
        sigmascope.analyze_lora_patches(unet, model_type)
        sigmascope.calculate_memory_change(unet, clip)


def test_a_foreign_analysis_prints(capsys: pytest.CaptureFixture[str]) -> None:
    for analysis in ({}, {"lora_application_success": None}, {"unet_changes": 3, "anything": [1]}):
        print_lora_analysis_summary(analysis)
        assert "LORA APPLICATION ANALYSIS SUMMARY" in capsys.readouterr().out
