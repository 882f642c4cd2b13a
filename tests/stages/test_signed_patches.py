"""What is kept of the patches of a baseline, beside those that are there now."""

import torch
from torch import Tensor

from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.stages.signed_patches import keep_patches, with_tensors_of


def patch_of(up: Tensor, *, source: str = "a", strength: float = 1.0) -> AppliedPatch:
    return AppliedPatch(
        "layer.weight",
        "lora",
        "lora_up",
        "",
        "lazy",
        source=source,
        strength=strength,
        tensors={"up": up, "down": torch.ones(2, 3)},
    )


def test_a_change_that_holds_the_same_numbers_as_before_is_asked_of_once() -> None:
    up = torch.arange(8.0).view(4, 2)
    kept = keep_patches([patch_of(up, strength=0.5)], (), 1 << 20).result()
    now = patch_of(up)
    (before,) = with_tensors_of(kept, [now]).patches
    assert before.tensors is now.tensors
    assert (before.strength, now.strength) == (0.5, 1.0)
    assert kept.patches[0].tensors is not now.tensors  # what was kept stays as it was


def test_a_change_of_other_numbers_keeps_its_own() -> None:
    up = torch.arange(8.0).view(4, 2)
    kept = keep_patches([patch_of(up)], (), 1 << 20).result()
    others = {
        "edited in place": patch_of(up.clone().fill_(2.0)),
        "of another shape": patch_of(up.view(2, 4)),
        "of another type": patch_of(up.double()),
        "without values": patch_of(up.to("meta")),
        "of another adapter": patch_of(up, source="b"),
        "NaN": patch_of(up * torch.nan),
    }
    for name, other in others.items():
        (before,) = with_tensors_of(kept, [other]).patches
        assert before.tensors is kept.patches[0].tensors, name
        assert torch.equal(before.tensors["up"], up), name


def test_a_change_that_held_nan_keeps_its_own() -> None:
    up = torch.full((4, 2), torch.nan)
    kept = keep_patches([patch_of(up)], (), 1 << 20).result()
    assert with_tensors_of(kept, [patch_of(up)]).patches[0].tensors is kept.patches[0].tensors
