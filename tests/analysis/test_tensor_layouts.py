import pytest
import torch
from torch import Tensor

from sigmascope import compare_tensors
from sigmascope.analysis.tensor_comparison import TensorComparison


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


A = random(1, 77, 16)


def explained(a: Tensor, b: Tensor) -> TensorComparison:
    """Compared both ways round: what explains B from A explains A from B."""
    found, other = compare_tensors(a, b), compare_tensors(b, a)
    assert found.verdict == other.verdict
    assert found.layout == other.layout
    assert not found.same_layout
    return found


def test_a_transposition_is_found() -> None:
    found = explained(A, A.transpose(1, 2))
    assert (found.verdict, found.layout) == ("identical", "permuted")
    assert "axes 1 and 2 swapped" in found.reason


def test_frames_and_channels_in_the_other_order_are_found() -> None:
    found = explained(random(1, 5, 16, 4, 4), random(1, 5, 16, 4, 4).permute(0, 2, 1, 3, 4))
    assert (found.verdict, found.layout) == ("identical", "permuted")


def test_of_several_orders_the_one_with_the_values_is_taken() -> None:
    latent = random(4, 4, 6, 2)
    found = explained(latent, latent.permute(3, 1, 0, 2))
    assert (found.verdict, found.layout) == ("identical", "permuted")


def test_a_square_that_is_transposed_is_found_though_its_shape_is_the_same() -> None:
    square = random(1, 8, 8)
    found = compare_tensors(square, square.transpose(1, 2))
    assert (found.verdict, found.layout) == ("identical", "permuted")
    assert found.differences == {}


def test_axes_of_size_1_are_found() -> None:
    assert explained(A, A[0]).layout == "axes_of_size_1"
    assert explained(A, A[0].T).layout == "axes_of_size_1+permuted"


@pytest.mark.parametrize(("tokens", "words"), [(154, "1 against 2 windows of 77"), (512, "the 512")])
def test_padding_with_zeros_is_found(tokens: int, words: str) -> None:
    found = explained(A, torch.cat([A, torch.zeros(1, tokens - 77, 16)], dim=1))
    assert (found.verdict, found.layout, found.remainder) == ("identical", "part", "zeros")
    assert words in found.reason


@pytest.mark.parametrize("rest", ["zeros", "values"])
def test_a_transposed_and_padded_tensor_is_found(rest: str) -> None:
    padding = torch.zeros(1, 50, 16) if rest == "zeros" else random(1, 50, 16, seed=1)
    found = explained(A, torch.cat([A, padding], dim=1).transpose(1, 2))
    assert (found.verdict, found.layout, found.remainder) == ("identical", "permuted+part", rest)
    assert "axes 1 and 2 swapped, A set against the first 77 of the 127" in found.reason


def test_a_changed_token_is_found_in_a_transposed_and_padded_tensor() -> None:
    changed = A.clone()
    changed[0, 9, :4] *= 1.1
    found = compare_tensors(A, torch.nn.functional.pad(changed, (0, 0, 0, 50)).transpose(1, 2))
    assert (found.layout, found.first_token) == ("permuted+part", 9)


def test_other_values_in_a_longer_shape_turned_round_are_unexplained() -> None:
    assert compare_tensors(A, random(1, 16, 127, seed=1)).layout is None


def test_padding_with_one_token_over_and_over_is_found() -> None:
    found = explained(A, torch.cat([A, random(1, 1, 16, seed=1).expand(1, 20, 16)], dim=1))
    assert (found.layout, found.remainder) == ("part", "repeated")


@pytest.mark.parametrize(("before", "after"), [(34, 0), (0, 34), (34, 5)])
def test_the_offset_of_the_tokens_is_found(before: int, after: int) -> None:
    around = random(1, before + after, 16, seed=1)
    found = explained(A, torch.cat([around[:, :before], A, around[:, before:]], dim=1))
    assert (found.verdict, found.layout, found.remainder) == ("identical", "part", "values")


def test_a_batch_that_repeats_a_prompt_is_found() -> None:
    found = explained(A, torch.cat([A, A, A]))
    assert (found.verdict, found.layout) == ("identical", "repeated")
    assert "3 times along the batch" in found.reason


def test_a_batch_in_which_each_prompt_is_repeated_is_found() -> None:
    two = random(2, 5, 4)
    found = explained(two, two.repeat_interleave(2, dim=0))
    assert (found.verdict, found.layout) == ("identical", "repeated")


def test_the_prompt_in_a_batch_with_the_negative_one_is_found() -> None:
    found = explained(A, torch.cat([random(1, 77, 16, seed=1), A]))
    assert (found.verdict, found.layout) == ("identical", "part")


def test_a_batch_in_the_other_order_is_found() -> None:
    batch = random(2, 7, 4)
    found = compare_tensors(batch, batch.flip(0))
    assert (found.verdict, found.layout) == ("identical", "parts_swapped")


def test_the_first_encoder_of_a_joint_width_is_found() -> None:
    found = explained(A, torch.cat([A, random(1, 77, 30, seed=1)], dim=2))
    assert (found.verdict, found.layout) == ("identical", "part")
    assert "width" in found.reason


def test_padding_along_tokens_and_width_is_found() -> None:
    found = explained(A, torch.nn.functional.pad(A, (0, 8, 0, 77)))
    assert (found.verdict, found.layout) == ("identical", "part")


def test_a_reshaped_tensor_is_found() -> None:
    assert explained(random(4, 6), random(4, 6).reshape(24)).layout == "reshaped"


def test_the_token_is_found_under_the_layout() -> None:
    changed = A.clone()
    changed[0, 30] *= 1.5
    for b in (changed.transpose(1, 2), changed[0], torch.cat([changed, changed[:, -1:].expand(1, 3, 16)], 1)):
        found = compare_tensors(A, b)
        assert (found.verdict, found.first_token) == ("different", 30)


def test_the_token_is_found_in_a_repeated_batch() -> None:
    changed = A.clone()
    changed[0, 30] *= 1.5
    assert compare_tensors(A, torch.cat([A, changed])).first_token in (None, 30)
    found = compare_tensors(A, torch.cat([changed, changed]))
    assert found.first_token == 30


@pytest.mark.parametrize("b", [random(5, 3), random(1, 78, 17), torch.zeros(0, 16), torch.tensor(1.0)])
def test_shapes_that_have_nothing_to_do_with_each_other_are_different(b: Tensor) -> None:
    found = explained(A, b)
    assert (found.verdict, found.layout, found.errors) == ("different", None, None)
    assert str(tuple(b.shape)) in found.reason


def test_without_values_no_layout_is_guessed() -> None:
    assert explained(torch.zeros(0, 3), torch.zeros(0, 6)).verdict == "different"


def test_padding_with_other_values_is_different_and_still_measured() -> None:
    found = explained(A, random(1, 154, 16, seed=5))
    assert found.verdict == "different"
    assert found.layout == "part"
    assert found.errors is not None


def test_the_random_state_stays_as_it_was() -> None:
    before = torch.random.get_rng_state()
    compare_tensors(random(1, 100, 100), random(1, 100, 101))
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.uint16, torch.bool, torch.complex64]
)
def test_every_kind_of_number_can_be_laid_out(dtype: torch.dtype) -> None:
    tensor = random(1, 6, 5).to(dtype)
    assert explained(tensor, tensor.transpose(1, 2)).verdict == "identical"
