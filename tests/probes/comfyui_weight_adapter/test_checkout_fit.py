"""Against a real ComfyUI: what is said to fit is merged, what is said not to leaves the weight as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.comfy_shapes.adapters import random
from tests.comfy_shapes.checkout import Checkout
from torch import Tensor

from sigmascope.lora.effect import effect_of
from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.comfyui_patcher import original_weight, read_patches

pytestmark = pytest.mark.comfyui

Shapes = tuple[tuple[int, ...] | float | None, ...]
PARTS = {"lora": 6, "loha": 8, "lokr": 9, "glora": 6, "oft": 4, "boft": 4, "diff": 1, "set": 1}

FITTING: list[tuple[str, str, Shapes]] = [
    ("matrix", "lora", ((8, 2), (2, 6), 1.0)),
    ("matrix", "lora", ((8, 2), (2, 6), None, None, (8, 1))),
    ("matrix", "lora", ((8, 2), (2, 6), 3.0, None, (1, 6))),
    ("matrix", "lora", ((6, 2), (2, 8))),
    ("kernel", "lora", ((8, 2, 1, 1), (2, 4, 3, 3), 1.0)),
    ("kernel", "lora", ((8, 2), (2, 36), 1.0)),
    ("kernel", "lora", ((8, 2, 1, 1), (2, 4, 1, 1), 1.0, (2, 2, 3, 3))),
    ("kernel", "lora", ((8, 2, 1, 1), (2, 4, 3, 3), 1.0, None, (8, 1, 1, 1))),
    ("matrix", "loha", ((8, 2), (2, 6), 1.0, (8, 3), (3, 6))),
    ("kernel", "loha", ((2, 8), (2, 4), 1.0, (2, 8), (2, 4), (2, 2, 3, 3), (2, 2, 3, 3))),
    ("matrix", "loha", ((8, 2), (2, 6), 1.0, (8, 2), (2, 6), None, None, (8, 1))),
    ("matrix", "lokr", ((2, 2), (4, 3))),
    ("matrix", "lokr", ((2, 2), None, 1.0, None, None, (4, 2), (2, 3))),
    ("matrix", "lokr", (None, (4, 3), 1.0, (2, 1), (1, 2))),
    ("kernel", "lokr", ((2, 2), (4, 2, 3, 3), 1.0)),
    ("matrix", "glora", ((6, 2), (2, 6), (8, 2), (2, 6), 1.0)),
    ("matrix", "glora", ((2, 6), (6, 2), (2, 6), (8, 2), 1.0)),
    ("square", "glora", ((8, 2), (2, 8), (8, 2), (2, 8), 1.0)),
    ("square", "glora", ((2, 8), (8, 2), (2, 8), (8, 2), 1.0)),
    ("kernel", "glora", ((4, 2), (2, 4), (8, 2), (2, 36), 1.0)),
    ("matrix", "oft", ((2, 4, 4), None, 1.0)),
    ("kernel", "oft", ((4, 2, 2), None, 1.0)),
    ("matrix", "boft", ((2, 2, 4, 4), None, 1.0)),
    ("matrix", "boft", ((1, 2, 4, 4), (8, 1), 1.0)),
    ("kernel", "boft", ((2, 2, 4, 4), None, 1.0)),
    ("matrix", "diff", ((8, 6),)),
    ("norm", "diff", ((8,),)),
    ("matrix", "set", ((8, 6),)),
]

UNFIT: list[tuple[str, str, Shapes]] = [
    ("matrix", "lora", ((8, 2), (2, 5))),
    ("matrix", "lora", ((8, 3), (2, 6))),
    ("matrix", "lora", ((8, 2), (2, 6), 1.0, None, (7, 1))),
    ("norm", "lora", ((8, 2), (2, 1), 1.0, None, (8, 1))),
    ("matrix", "loha", ((8, 2), (2, 5), 1.0, (8, 2), (2, 5))),
    ("matrix", "lokr", ((2, 2), (4, 4))),
    ("kernel", "lora", ((8, 2), (2, 4))),
    ("matrix", "oft", ((2, 3, 3), None, 1.0)),
    ("matrix", "boft", ((2, 2, 3, 3), None, 1.0)),
    ("matrix", "boft", ((2, 2, 4, 4), None, None)),
    ("kernel", "lokr", ((2, 2), None, 1.0, None, None, (2, 4), (2, 2), (2, 2, 3, 3))),
    ("matrix", "diff", ((6, 8),)),
]


def value_of(comfy: Checkout, kind: str, shapes: Shapes) -> Any:
    """The value as this version keeps it: an adapter object if it has them, else a tuple."""
    parts = [
        random(*shape, seed=n) * 0.3 if isinstance(shape, tuple) else shape for n, shape in enumerate(shapes)
    ]
    whole = (*parts, *[None] * (PARTS[kind] - len(parts)))
    if kind in ("diff", "set"):
        return kind, whole
    if not (comfy.folder / "comfy" / "weight_adapter").is_dir():
        return kind, whole
    adapters = {adapter.name: adapter for adapter in comfy.module("comfy.weight_adapter").adapters}
    return adapters[kind](set(), whole)


@pytest.fixture
def merge(comfy: Checkout, make_patcher: Callable[..., Any]) -> Callable[..., tuple[Any, Tensor, Tensor]]:
    """Merge one change: the patcher, the weight before and the weight after."""

    def load(layer: str, kind: str, shapes: Shapes, strength: float = 1.0) -> tuple[Any, Tensor, Tensor]:
        wanted = _wanted(kind, shapes)
        if not comfy.knows(wanted):
            pytest.skip(f"this version knows no {wanted}")
        patcher = make_patcher()
        before = getattr(patcher.model, layer).weight.detach().clone()
        patcher.add_patches({f"{layer}.weight": value_of(comfy, kind, shapes)}, strength)
        patcher.patch_model(device_to=torch.device("cpu"))
        return patcher, before, getattr(patcher.model, layer).weight.detach()

    return load


def _wanted(kind: str, shapes: Shapes) -> str:
    """What a version must know to merge this: of LoRAs and LoHas with magnitudes, and GLoRAs, not all do."""
    if kind == "glora":
        return "glora" if shapes[0] == (2, 6) or shapes[0] == (2, 8) else "newer glora"
    return "dora" if len(shapes) == {"lora": 5, "loha": 8}.get(kind) else kind


def only(patcher: Any) -> AppliedPatch:
    found = read_patches(patcher).value
    assert found is not None
    (patch,) = found
    return patch


@pytest.mark.parametrize(("layer", "kind", "shapes"), FITTING)
def test_what_is_said_to_fit_is_merged(merge: Any, layer: str, kind: str, shapes: Shapes) -> None:
    patcher, before, after = merge(layer, kind, shapes)
    assert only(patcher).state == "merged"
    assert not torch.equal(before, after)


@pytest.mark.parametrize(("layer", "kind", "shapes"), UNFIT)
def test_what_is_said_not_to_fit_leaves_the_weight(merge: Any, layer: str, kind: str, shapes: Shapes) -> None:
    patcher, before, after = merge(layer, kind, shapes)
    assert torch.equal(before, after)
    assert only(patcher).state == "failed"


def test_a_rotation_without_alpha_is_merged_where_the_version_can(merge: Any) -> None:
    patcher, before, after = merge("matrix", "oft", ((2, 4, 4),))
    assert only(patcher).state == ("failed" if torch.equal(before, after) else "merged")


@pytest.mark.parametrize("strength", [1.0, 0.5, -0.3])
@pytest.mark.parametrize(("layer", "kind", "shapes"), FITTING)
def test_the_effect_of_what_was_read_is_what_merging_did(
    merge: Any, layer: str, kind: str, shapes: Shapes, strength: float
) -> None:
    patcher, before, after = merge(layer, kind, shapes, strength)
    effect = effect_of([only(patcher)], original_weight(patcher, f"{layer}.weight"))
    expected = torch.linalg.vector_norm(after.double() - before.double()).item()
    assert effect.delta_norm == pytest.approx(expected, rel=1e-4, abs=1e-6)
