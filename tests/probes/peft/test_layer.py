"""Which adapters act, told from PEFT's own layers."""

from collections.abc import Callable

from tests.probes.peft.conftest import Inject
from torch import nn

from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.peft import read_adapters

KEY = "blocks.0.linear.weight"
Read = Callable[[], dict[str, AppliedPatch]]


def layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "base_layer")]


def states(model: nn.Module) -> dict[str | None, str]:
    return {patch.source: patch.state for patch in read_adapters(model).value or () if patch.key == KEY}


def test_injected_adapter_runs_beside_the_weight(inject: Inject, read: Read) -> None:
    inject("linear")
    assert read()[KEY].state == "lazy"


def test_merged_adapter_is_in_the_weight(inject: Inject) -> None:
    model = inject("linear")
    for layer in layers(model):
        layer.merge()  # type: ignore[operator]
    assert states(model) == {"style": "merged"}


def test_unmerged_adapter_runs_beside_the_weight_again(inject: Inject) -> None:
    model = inject("linear")
    for layer in layers(model):
        layer.merge()  # type: ignore[operator]
        layer.unmerge()  # type: ignore[operator]
    assert states(model) == {"style": "lazy"}


def test_adapter_that_is_not_set_active_is_inactive(inject: Inject) -> None:
    inject("linear", name="style")
    model = inject("linear", name="other")
    for layer in layers(model):
        layer.set_adapter("other")  # type: ignore[operator]
    assert states(model) == {"style": "inactive", "other": "lazy"}


def test_two_active_adapters_both_run_in_the_order_that_was_set(inject: Inject) -> None:
    inject("linear", name="style")
    model = inject("linear", name="other")
    for layer in layers(model):
        layer.set_adapter(["other", "style"])  # type: ignore[operator]
    found = [patch for patch in read_adapters(model).value or () if patch.key == KEY]
    assert [(patch.source, patch.index, patch.state) for patch in found] == [
        ("other", 0, "lazy"),
        ("style", 1, "lazy"),
    ]


def test_active_adapter_beside_a_merged_one_is_inactive(inject: Inject) -> None:
    inject("linear", name="style")
    model = inject("linear", name="other")
    for layer in layers(model):
        layer.set_adapter(["style", "other"])  # type: ignore[operator]
        layer.merge(adapter_names=["other"])  # type: ignore[operator]
    assert states(model) == {"other": "merged", "style": "inactive"}


def test_adapters_that_are_switched_off_are_inactive(inject: Inject) -> None:
    model = inject("linear")
    for layer in layers(model):
        layer.enable_adapters(False)  # type: ignore[operator]
    assert states(model) == {"style": "inactive"}


def test_merged_adapter_that_is_switched_off_is_still_in_the_weight(inject: Inject, read: Read) -> None:
    model = inject("linear")
    for layer in layers(model):
        layer.merge()  # type: ignore[operator]
        layer.enable_adapters(False)  # type: ignore[operator]
    assert read()[KEY].state == "merged"
    assert "next call" in read()[KEY].state_reason


def test_strength_of_0_is_inactive(inject: Inject) -> None:
    model = inject("linear")
    for layer in layers(model):
        layer.set_scale("style", 0.0)  # type: ignore[operator]
    assert states(model) == {"style": "inactive"}


def test_dora_of_strength_0_still_acts(inject: Inject) -> None:
    model = inject("linear", use_dora=True)
    for layer in layers(model):
        layer.set_scale("style", 0.0)  # type: ignore[operator]
    assert states(model) == {"style": "lazy"}
