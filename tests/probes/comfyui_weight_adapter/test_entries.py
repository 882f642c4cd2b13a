import pytest
import torch
from tests.comfy_shapes.versions import PatchTuple

from sigmascope.probes.applied_patch import Standing
from sigmascope.probes.comfyui_weight_adapter import PatcherEntry, applied, read_entry


def test_an_entry_of_five_is_read() -> None:
    entry = read_entry((0.8, "value", 0.5, (0, 8, 4), None))
    assert (entry.strength, entry.value, entry.strength_model, entry.offset) == (0.8, "value", 0.5, (0, 8, 4))


def test_an_entry_of_three_changes_the_whole_weight() -> None:
    assert read_entry((1.0, "value", 1.0)).offset is None


def test_an_entry_of_two_leaves_the_weight_at_its_strength() -> None:
    assert read_entry((1.0, "value")).strength_model == 1.0


def test_an_entry_with_names_is_read_by_place() -> None:
    assert read_entry(PatchTuple(0.3, "value", 1.0, None, None)).strength == 0.3


def test_a_whole_number_is_a_strength() -> None:
    assert read_entry((2, "value", 1, None, None)).strength == 2.0


def test_a_strength_that_is_no_number_is_unavailable() -> None:
    entry = read_entry(({"start": 1.0}, "value", 1.0, None, None))
    assert entry.strength is None
    assert entry.unavailable == {"strength": "is dict, not a number"}


def test_an_offset_of_another_form_is_unavailable() -> None:
    assert "offset" in read_entry((1.0, "value", 1.0, (0, 8), None)).unavailable


def test_a_function_that_the_change_passes_through_is_named() -> None:
    def swap_scale_shift(change: object) -> object:
        return change

    assert (
        "swap_scale_shift" in read_entry((1.0, "value", 1.0, None, swap_scale_shift)).unavailable["function"]
    )


@pytest.mark.parametrize("kept", [None, 1.0, "strength", (1.0,)])
def test_what_is_no_entry_is_refused(kept: object) -> None:
    with pytest.raises(TypeError, match="tuple of strength and value"):
        read_entry(kept)


@pytest.mark.parametrize(("strength", "state"), [(0.0, "merged"), (1.0, "failed")])
def test_an_entry_without_a_change_multiplies_the_weight_at_strength_0(strength: float, state: str) -> None:
    """ComfyUI's UNetSelfAttentionMultiply puts such ones there; at another strength ComfyUI fails."""
    entry = PatcherEntry("q.weight", (strength, (None,), 0.5, None, None), Standing("merged", "by ComfyUI"))
    (patch,) = applied(entry, 0, torch.ones(3, 2))
    assert (patch.state, patch.strength, patch.strength_model) == (state, strength, 0.5)
