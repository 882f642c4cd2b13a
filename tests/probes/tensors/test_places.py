import pytest
import torch

from sigmascope.probes.tensors import place_of, places_of


def test_two_views_of_the_same_elements_are_in_one_place() -> None:
    tensor = torch.zeros(4, 4)
    assert place_of(tensor[1:]) == place_of(tensor[1:])


@pytest.mark.parametrize("other", [torch.zeros(4, 4), torch.zeros(4, 4, device="meta"), torch.zeros(0)])
def test_other_elements_are_elsewhere(other: torch.Tensor) -> None:
    assert place_of(torch.zeros(4, 4)) != place_of(other)


def test_another_reading_of_the_same_elements_is_another_place() -> None:
    tensor = torch.zeros(4, 4)
    assert len({place_of(tensor), place_of(tensor.T), place_of(tensor.view(torch.int32))}) == 3


def test_empty_and_meta_tensors_are_known_by_themselves() -> None:
    for tensor in (torch.zeros(0), torch.zeros(3, device="meta")):
        assert place_of(tensor) == place_of(tensor) == id(tensor)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_known_by_itself() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])  # its layout cannot be asked
    assert place_of(nested) == id(nested)


def test_places_of_many_are_equal_where_each_ones_are() -> None:
    tensor, empty = torch.zeros(4, 4), torch.zeros(0)
    many = [tensor, tensor.view(4, 4), tensor.T, tensor[1:], tensor.view(torch.int32), torch.ones(2), empty]
    many += [empty, torch.zeros(0), torch.zeros(3, device="meta")]
    places = places_of(many)
    for one, place in zip(many, places, strict=True):
        expected = [place_of(one) == place_of(other) for other in many]
        assert [place == other for other in places] == expected
