"""Alpha, rank and strength as they were given to PEFT."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.probes.peft.conftest import Inject

from sigmascope.probes.applied_patch import AppliedPatch

KEY = "blocks.0.linear.weight"
Read = Callable[[], dict[str, AppliedPatch]]


def test_alpha_rank_and_scale(inject: Inject, read: Read) -> None:
    inject("linear", r=4, lora_alpha=6)
    patch = read()[KEY]
    assert (patch.rank, patch.alpha, patch.scale, patch.strength) == (4, 6.0, 1.5, 1.0)


def test_rank_stabilised_scale_is_over_the_root(inject: Inject, read: Read) -> None:
    inject("linear", r=4, lora_alpha=6, use_rslora=True)
    patch = read()[KEY]
    assert (patch.scale, patch.strength) == (3.0, 1.0)


@pytest.mark.parametrize("strength", [0.1, 0.7, -1.5, 0.0, 1.2345e-10])
def test_strength_that_was_set(strength: float, inject: Inject, read: Read) -> None:
    model: Any = inject("linear", r=3, lora_alpha=7)
    model.blocks[0].linear.set_scale("style", strength)
    assert read()[KEY].strength == strength
    assert read()["blocks.1.linear.weight"].strength == 1.0


def test_patterns_give_layers_ranks_of_their_own(inject: Inject, read: Read) -> None:
    inject("linear", r=4, lora_alpha=4, rank_pattern={"0.linear": 2}, alpha_pattern={"1.linear": 1})
    first, second = read()[KEY], read()["blocks.1.linear.weight"]
    assert (first.rank, first.alpha, first.scale) == (2, 4.0, 2.0)
    assert (second.rank, second.alpha, second.scale) == (4, 1.0, 0.25)


def test_excluded_layer_has_no_adapter(inject: Inject, read: Read) -> None:
    inject("linear", exclude_modules=["blocks.1.linear"])
    assert read().keys() == {KEY}


def test_alpha_of_0_leaves_a_scale_of_0(inject: Inject, read: Read) -> None:
    inject("linear", lora_alpha=0)
    patch = read()[KEY]
    assert (patch.alpha, patch.scale, patch.strength) == (0.0, 0.0, 1.0)


def test_scale_of_loha(inject: Inject, read: Read) -> None:
    inject("linear", kind="LoHaConfig", r=4, alpha=2)
    patch = read()[KEY]
    assert (patch.rank, patch.alpha, patch.scale, patch.strength) == (4, 2.0, 0.5, 1.0)
