"""Which weights of int8 ConvRot can be read."""

import pytest

from sigmascope.checkpoints.kinds.convrot import KIND


@pytest.mark.parametrize("group", [1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
def test_groups_need_a_regular_hadamard_matrix_which_only_powers_of_4_have(group: int) -> None:
    """The package that reads them raised a ValueError, past the errors that are told."""
    assert KIND.unusable is not None
    reason = KIND.unusable({"convrot_groupsize": group}, (512, 512)) or ""
    assert ("power of 4" in reason) == (group not in {4, 16, 64, 256})
