"""Whatever the host's objects do, reading gives a value or a reason."""

from typing import Any

import pytest
from tests.families import FAMILIES, make_pipeline
from tests.probes.peft.conftest import Inject
from torch import nn

from sigmascope.probes.adapted_modules import base_weights
from sigmascope.probes.peft import read_adapters


def test_model_without_adapters_has_none(model: nn.Module) -> None:
    assert read_adapters(model).value == ()


def test_model_with_adapters_has_some(inject: Inject) -> None:
    assert read_adapters(inject("conv")).value


def test_model_whose_adapters_were_deleted_has_none(model: nn.Module) -> None:
    import peft

    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["conv"]))
    assert read_adapters(wrapped.unload()).value == ()


@pytest.mark.parametrize("thing", [None, object(), "model", {"a": 1}])
def test_what_is_no_model_gives_a_reason(thing: object) -> None:
    reading = read_adapters(thing)
    assert reading.value is None
    assert "neither a module nor a pipeline" in (reading.reason or "")


def test_each_attribute_that_raises_leaves_the_other_layers_readable(
    inject: Inject, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = inject("conv", "linear")
    kind = type(model.conv)
    names = [name for name in dir(kind) if not name.startswith("__")] + list(vars(model.conv))

    for name in dict.fromkeys(names):

        def refuse(self: object) -> object:
            raise RuntimeError("not today")

        with monkeypatch.context() as patch:
            patch.setattr(kind, name, property(refuse), raising=False)
            found = read_adapters(model)
        keys = [change.key for change in found.value or ()]
        assert keys[:2] == ["blocks.0.linear.weight", "blocks.1.linear.weight"], name


def test_type_of_what_the_host_keeps(inject: Inject) -> None:
    (patch,) = read_adapters(inject("conv")).value or ()
    assert patch.data_type == "<class 'peft.tuners.lora.layer.Conv2d'>"
    assert (patch.patch_type, patch.source) == ("lora_up", "style")


@pytest.mark.parametrize("family", FAMILIES)
def test_adapter_on_a_real_denoiser_is_on_every_targeted_layer(family: str) -> None:
    from peft import LoraConfig

    denoiser = getattr(make_pipeline(family), FAMILIES[family].denoiser)
    names = [name for name, _ in base_weights(denoiser)]
    expected = [name for name in names if name.endswith((".to_q.weight", ".to_k.weight"))]
    denoiser.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k"]))
    found = read_adapters(denoiser).value or ()
    assert [patch.key for patch in found] == expected
    assert {patch.state for patch in found} == {"lazy"}
    assert [name for name, _ in base_weights(denoiser)] == names
