"""The pipelines are real, small, and the same each time."""

import pytest
import torch
from tests.families import FAMILIES, generate, make_pipeline
from tests.families.weights import copied
from torch import nn

from sigmascope.lora.families import layout_of

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)


@EVERY_FAMILY
def test_two_pipelines_of_a_family_give_the_same_image(family: str) -> None:
    first, second = (generate(make_pipeline(family), family) for _ in range(2))
    assert torch.equal(first, second)


@EVERY_FAMILY
def test_output_is_finite_and_varies(family: str) -> None:
    output = generate(make_pipeline(family), family)
    assert output.isfinite().all()
    assert output.std() > 0.01


@EVERY_FAMILY
def test_prompt_changes_the_output(family: str) -> None:
    pipeline = make_pipeline(family)
    first = generate(pipeline, family)
    assert not torch.equal(first, generate(pipeline, family, prompt="a castle"))


@EVERY_FAMILY
def test_pipelines_share_no_weight(family: str) -> None:
    first, second = (make_pipeline(family) for _ in range(2))
    name = FAMILIES[family].denoiser
    addresses = {weight.data_ptr() for weight in getattr(first, name).parameters()}
    assert not any(weight.data_ptr() in addresses for weight in getattr(second, name).parameters())


@EVERY_FAMILY
def test_denoiser_is_recognised_as_its_family(family: str) -> None:
    denoiser = getattr(make_pipeline(family), FAMILIES[family].denoiser)
    layout = layout_of({key: tuple(value.shape) for key, value in denoiser.state_dict().items()})
    assert layout.family == family.removesuffix("_vace")


def test_building_leaves_the_random_state_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    make_pipeline("sd15")
    assert torch.equal(before, torch.get_rng_state())


def test_copies_share_no_weight_and_tied_ones_stay_tied() -> None:
    @copied
    def tied() -> nn.Module:
        model = nn.ModuleDict({"one": nn.Linear(3, 3), "two": nn.Linear(3, 3)})
        model["two"].weight = model["one"].weight
        return model.requires_grad_(False)

    first, second = tied(), tied()
    first.get_parameter("one.weight").zero_()
    assert first.get_parameter("two.weight").count_nonzero() == 0
    assert second.get_parameter("one.weight").count_nonzero() == 9
    assert second.get_parameter("two.weight") is second.get_parameter("one.weight")
