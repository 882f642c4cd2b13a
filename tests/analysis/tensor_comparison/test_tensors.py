import json
import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from sigmascope import compare_tensors
from sigmascope.errors import ConfigError

FLOATS = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


COND = random(1, 77, 64)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64, torch.int32, torch.bool, torch.complex64])
def test_a_copy_is_identical(dtype: torch.dtype) -> None:
    tensor = COND.to(dtype)
    found = compare_tensors(tensor, tensor.clone())
    assert (found.verdict, found.differences) == ("identical", {})


@settings(max_examples=40, deadline=None)
@given(dtype=st.sampled_from(FLOATS), seed=st.integers(0, 2**31), power=st.integers(-30, 5))
def test_a_rounded_copy_is_rounding(dtype: torch.dtype, seed: int, power: int) -> None:
    a = random(1, 9, 8, seed=seed) * 2.0**power
    found = compare_tensors(a, a.to(dtype))
    assert found.verdict in ("rounding", "identical")
    assert found.differences["dtype"] == ("float32", str(dtype).removeprefix("torch."))


def test_the_reason_names_the_dtype() -> None:
    found = compare_tensors(COND, COND.bfloat16())
    assert found.reason == "Every value is equal once rounded to bfloat16."


def test_values_below_the_normal_range_are_rounding_too() -> None:
    tiny = torch.linspace(0, 1e-6, 100)
    assert compare_tensors(tiny, tiny.half()).verdict == "rounding"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_per_cent_more_is_different_and_called_a_scale(dtype: torch.dtype) -> None:
    found = compare_tensors(COND.to(dtype), (COND * 1.01).to(dtype))
    assert found.verdict == "different"
    assert "B is A times 1.01" in found.reason


def test_one_per_cent_of_noise_in_float32_is_different() -> None:
    noisy = COND * (1 + 0.01 * random(1, 77, 64, seed=1))
    assert compare_tensors(COND, noisy).verdict == "different"


def test_a_lower_precision_inside_float32_is_close() -> None:
    # TF32 keeps 11 bits of the significand of what it multiplies.
    weight, rounded = random(64, 64, seed=1), random(64, 64, seed=1).half().float()
    found = compare_tensors(COND @ weight, COND.half().float() @ rounded)
    assert found.verdict == "close"


@pytest.mark.parametrize("kind", ["clip", "t5"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_encoder_computed_in_half_precision_is_rounding(kind: str, dtype: torch.dtype) -> None:
    encoder = encoder_of(kind)
    tokens = torch.randint(2, 60, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        exact = encoder(input_ids=tokens).last_hidden_state
        half = encoder.to(dtype)(input_ids=tokens).last_hidden_state
    found = compare_tensors(exact, half)
    assert found.errors is not None
    assert found.errors.beyond_storage > 0
    assert found.verdict == "rounding"
    assert "computing in" in found.reason


def encoder_of(kind: str) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "t5":
            return T5EncoderModel(
                T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=6, num_heads=4)
            ).eval()
        return CLIPTextModel(
            CLIPTextConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=6,
                num_attention_heads=4,
                bos_token_id=0,
                eos_token_id=1,
                pad_token_id=1,
            )
        ).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("token", [0, 12, 76])
def test_a_planted_change_in_one_token_is_found_there(dtype: torch.dtype, token: int) -> None:
    changed = COND.clone()
    changed[0, token] += 0.05 * random(64, seed=2)
    found = compare_tensors(COND.to(dtype), changed.to(dtype))
    assert found.verdict == "different"
    assert found.first_token == token
    assert found.errors is not None
    assert found.errors.tokens is not None
    assert found.errors.tokens.worst == token
    assert found.errors.first_difference is not None
    assert found.errors.first_difference.index[:2] == (0, token)
    assert f"token {token} " in found.reason


def test_one_token_among_rounded_ones_is_found() -> None:
    changed = COND.clone()
    changed[0, 40] *= 1.2
    found = compare_tensors(COND, changed.bfloat16())
    assert (found.verdict, found.first_token) == ("different", 40)


def test_equal_tokens_before_the_first_difference_are_told() -> None:
    changed = torch.cat([COND[:, :30], random(1, 47, 64, seed=3)], dim=1)
    found = compare_tensors(COND, changed)
    assert found.first_token == 30
    assert "first 30 tokens are equal" in found.reason


def test_a_token_that_is_zero_in_one_is_named() -> None:
    padded = COND.clone()
    padded[0, 50] = 0
    found = compare_tensors(padded, COND)
    assert found.first_token == 50
    assert "A is zero there" in found.reason


def zero_padded(words: Tensor, tokens: int = 512) -> Tensor:
    """As WAN's pipeline pads a prompt."""
    return torch.nn.functional.pad(words, (0, 0, 0, tokens - words.shape[1]))


def test_zero_padding_does_not_turn_rounding_into_a_difference() -> None:
    words = random(1, 20, 64)
    computed = words * (1 + 0.004 * random(1, 20, 64, seed=1))
    found = compare_tensors(zero_padded(words), zero_padded(computed).bfloat16())
    assert (found.verdict, found.first_token) == ("rounding", None)


def test_a_changed_token_in_front_of_zero_padding_is_found() -> None:
    words = random(1, 20, 64)
    changed = words.clone()
    changed[0, 7] *= 1.2
    found = compare_tensors(zero_padded(words), zero_padded(changed).bfloat16())
    assert (found.verdict, found.first_token) == ("different", 7)


def test_other_words_in_front_of_zero_padding_are_different() -> None:
    found = compare_tensors(zero_padded(random(1, 20, 64)), zero_padded(random(1, 20, 64, seed=1)))
    assert found.verdict == "different"


def test_a_result_of_zeros_is_called_that() -> None:
    found = compare_tensors(COND, torch.zeros_like(COND))
    assert found.verdict == "different"
    assert found.reason.startswith("B is zero and A is not")


def test_values_whose_squares_are_beyond_float64_are_said_to_be() -> None:
    huge = random(4, 4).double() * 1e200
    found = compare_tensors(huge, huge * 1.5)
    assert found.verdict == "different"
    assert "beyond float64" in found.reason


def test_integers_of_two_kinds_are_told_apart_beyond_float64() -> None:
    signed, unsigned = torch.tensor([2**62 + 1]), torch.tensor([2**62]).to(torch.uint64)
    assert compare_tensors(signed, unsigned).verdict == "different"
    assert compare_tensors(torch.tensor([2**62]), unsigned).verdict == "identical"
    assert compare_tensors(torch.tensor([-1]), torch.tensor([-1]).to(torch.uint64)).verdict == "different"


def test_a_default_device_of_the_host_does_not_matter() -> None:
    changed = COND.clone()
    changed[0, 3] += 1
    with torch.device("meta"):
        found = compare_tensors(COND, changed)
        assert compare_tensors(COND, COND[:, :5]).layout == "part"
    assert found.first_token == 3


def test_another_token_axis_can_be_named() -> None:
    latent = random(1, 4, 6, 5)
    changed = latent.clone()
    changed[0, 2] += 1
    assert compare_tensors(latent, changed).first_token is None
    assert compare_tensors(latent, changed, token_axis=1).first_token == 2
    assert compare_tensors(latent, changed, token_axis=-3).first_token == 2
    with pytest.raises(ConfigError, match="4 axes"):
        compare_tensors(latent, changed, token_axis=4)


def test_nan_in_one_is_different_and_found() -> None:
    broken = COND.clone()
    broken[0, 5, 3] = math.nan
    found = compare_tensors(COND, broken)
    assert (found.verdict, found.first_token) == ("different", 5)
    assert "B has 1 NaN" in found.reason


def test_nan_at_the_same_places_is_identical_and_said() -> None:
    broken = COND.clone()
    broken[0, 5, 3] = math.nan
    found = compare_tensors(broken, broken.clone())
    assert found.verdict == "identical"
    assert "NaN" in found.reason


def test_overflow_to_float16_is_explained() -> None:
    large = COND * 1e5
    found = compare_tensors(large, large.half())
    assert found.verdict == "different"
    assert "65504" in found.reason


@pytest.mark.parametrize("shape", [(0,), (0, 77, 8), (1, 0, 8)])
def test_empty_tensors_of_one_shape_are_identical(shape: tuple[int, ...]) -> None:
    assert compare_tensors(torch.zeros(shape), torch.zeros(shape)).verdict == "identical"


def test_integers_are_identical_or_different() -> None:
    mask = torch.tensor([1, 1, 0])
    found = compare_tensors(mask, mask.bool())
    assert (found.verdict, found.differences["dtype"]) == ("identical", ("int64", "bool"))
    assert compare_tensors(mask, torch.tensor([1, 0, 0])).verdict == "different"


def test_the_user_s_tolerance_decides() -> None:
    more = COND * 1.01
    assert compare_tensors(COND, more, rtol=0.02).verdict == "close"
    assert compare_tensors(COND, more, rtol=0.001).verdict == "different"
    strict = compare_tensors(COND, COND.bfloat16(), rtol=0.0)
    assert strict.verdict == "different"
    assert "rounded to bfloat16" in strict.reason


def test_fp4_is_compared_by_its_codes() -> None:
    a = torch.tensor([1, 2, 3], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    b = torch.tensor([1, 2, 4], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert compare_tensors(a, a).verdict == "identical"
    assert compare_tensors(a, b).verdict == "different"
    with pytest.raises(ConfigError, match="float4"):
        compare_tensors(a, torch.zeros(3))


def test_arrays_are_as_good_as_tensors() -> None:
    array = COND.numpy().copy()
    array.flags.writeable = False
    assert compare_tensors(array, COND).verdict == "identical"
    with pytest.raises(ConfigError, match="array"):
        compare_tensors(np.array(["a"]), COND)


@pytest.mark.parametrize("bad", [torch.eye(2).to_sparse(), torch.empty(2, 2, device="meta")])
def test_a_tensor_without_plain_values_is_refused(bad: Tensor) -> None:
    with pytest.raises(ConfigError, match="cannot be compared"):
        compare_tensors(bad, torch.eye(2))


def test_the_tensors_stay_as_they_are() -> None:
    a, b = COND.clone().requires_grad_(), COND * 2
    before = b.clone()
    compare_tensors(a, b)
    assert torch.equal(b, before)
    assert torch.equal(a, COND)
    assert a.grad is None


@pytest.mark.parametrize(
    "b", [COND, COND * math.inf, COND[:, :5], random(3), torch.zeros(1, 77, 64), COND.bfloat16()]
)
def test_the_dict_is_strict_json(b: Tensor) -> None:
    plain = compare_tensors(COND, b).as_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
