import pytest
from tests.comfy_shapes.adapters import BOFTAdapter, GLoRAAdapter, LoKrAdapter, lora_adapter, random
from tests.comfy_shapes.modules import CONV, BaseModel, Q
from tests.comfy_shapes.patchers import Dimension, ModelPatcher
from torch import Tensor

from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.comfyui_patcher import read_patches

BOFT = BOFTAdapter(set(), (random(2, 2, 4, 4), None, None, None))
LOKR = LoKrAdapter(
    set(), (random(2, 2), None, 1.0, None, None, random(2, 4), random(2, 2), random(2, 2, 3, 3), None)
)


class NewestLoKrAdapter(LoKrAdapter):
    """Since mid-2026 a LoKr of fused projections gives each of them its rows."""

    row_offset: int | None = None


FUSED = (random(3, 2), random(8, 4), None, None, None, None, None, None, None)


def loaded(key: str, value: object, *, changed: bool) -> ModelPatcher:
    """A patcher whose model was loaded, in which the host has changed the weight or failed to."""
    patcher = ModelPatcher(BaseModel())
    patcher.add_patches({key: value})
    weight: Tensor = patcher.model.get_parameter(key)
    patcher.backup[key] = Dimension(weight.clone(), False)
    patcher.model.current_weight_patches_uuid = patcher.patches_uuid
    if changed:
        weight.add_(1)
    return patcher


def first(patcher: ModelPatcher) -> AppliedPatch:
    found = read_patches(patcher).value
    assert found is not None
    return found[0]


@pytest.mark.parametrize(("key", "value"), [(Q, BOFT), (CONV, LOKR)])
def test_what_is_known_to_fail_has_failed_where_the_weight_is_unchanged(key: str, value: object) -> None:
    patch = first(loaded(key, value, changed=False))
    assert patch.state == "failed"
    assert "did not change" in patch.state_reason


@pytest.mark.parametrize(("key", "value"), [(Q, BOFT), (CONV, LOKR)])
def test_what_is_known_to_fail_is_merged_where_the_weight_has_changed(key: str, value: object) -> None:
    assert first(loaded(key, value, changed=True)).state == "merged"


def test_what_was_not_merged_yet_may_fail() -> None:
    patcher = ModelPatcher(BaseModel())
    patcher.add_patches({Q: BOFT})
    assert first(patcher).state == "registered"
    assert "may fail" in first(patcher).state_reason


def test_beside_another_change_the_weight_cannot_tell() -> None:
    patcher = loaded(Q, BOFT, changed=True)
    patcher.patches[Q].append((1.0, lora_adapter(), 1.0, None, None))
    assert first(patcher).state == "merged"
    assert "may fail" in first(patcher).state_reason


def test_a_fused_lokr_fits_one_projection_where_the_host_takes_its_rows() -> None:
    patcher = ModelPatcher(BaseModel())
    patcher.add_patches({Q: NewestLoKrAdapter(set(), FUSED)})
    assert first(patcher).state == "registered"
    assert "rows of one projection" in first(patcher).state_reason


def test_a_fused_lokr_does_not_fit_one_projection_in_versions_before() -> None:
    patcher = ModelPatcher(BaseModel())
    patcher.add_patches({Q: LoKrAdapter(set(), FUSED)})
    assert first(patcher).state == "failed"


def test_a_glora_kept_as_a_tuple_may_fail_and_one_kept_as_an_adapter_does_not() -> None:
    factors = (random(8, 2), random(2, 8), random(8, 2), random(2, 8), 1.0, None)
    patcher = ModelPatcher(BaseModel())
    patcher.add_patches({Q: ("glora", factors)})
    patcher.add_patches({Q: GLoRAAdapter(set(), factors)})
    found = read_patches(patcher).value
    assert found is not None
    assert ["may fail" in patch.state_reason for patch in found] == [True, False]
