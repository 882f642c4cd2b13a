import math
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from sigmascope.probes import tensor_facts, tensors
from sigmascope.records import TensorFacts


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def assert_agrees(facts: TensorFacts, expected: Tensor) -> None:
    """NumPy in float64 is the judge."""
    array = expected.detach().to(torch.float64).numpy()
    assert facts.min == array.min()
    assert facts.max == array.max()
    assert facts.mean == pytest.approx(array.mean(), rel=1e-12, abs=1e-15)
    assert facts.std == pytest.approx(array.std(ddof=1), rel=1e-12)


def test_shape_dtype_device_and_bytes() -> None:
    facts = tensor_facts(torch.zeros(1, 4, 64, 64, dtype=torch.bfloat16))
    assert (facts.shape, facts.dtype, facts.device) == ((1, 4, 64, 64), "bfloat16", "cpu")
    assert (facts.num_elements, facts.nbytes) == (16384, 32768)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.bool,
    ],
)
def test_statistics_of_every_real_dtype(dtype: torch.dtype) -> None:
    tensor = values(7, 9).mul(3).abs().to(dtype)
    facts = tensor_facts(tensor)
    assert facts.dtype == str(dtype).removeprefix("torch.")
    assert_agrees(facts, tensor)
    assert (facts.nan_count, facts.inf_count) == (0, 0)


def test_nan_and_inf_are_counted_and_left_out_of_the_statistics() -> None:
    tensor = torch.tensor([1.0, math.nan, 3.0, math.inf, -math.inf, math.nan, 5.0])
    facts = tensor_facts(tensor)
    assert (facts.nan_count, facts.inf_count) == (2, 2)
    assert_agrees(facts, torch.tensor([1.0, 3.0, 5.0]))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_value_of_each_kind_is_found(bad: float) -> None:
    tensor = values(100)
    tensor[37] = bad
    facts = tensor_facts(tensor)
    assert (facts.nan_count or 0) + (facts.inf_count or 0) == 1


def test_a_tensor_of_nan_alone_has_counts_and_no_statistics() -> None:
    facts = tensor_facts(torch.full((3,), math.nan))
    assert facts.nan_count == 3
    assert facts.mean is None
    assert facts.unavailable == dict.fromkeys(("min", "max", "mean", "std"), "no finite element")


def test_pieces_are_combined_as_if_they_were_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_CPU_PIECE", 64)
    tensor = values(11, 53) * 3 + 1000
    assert_agrees(tensor_facts(tensor), tensor)


def test_bad_values_in_one_piece_do_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_CPU_PIECE", 64)
    tensor = values(1000)
    tensor[100:300] = math.nan
    facts = tensor_facts(tensor)
    assert facts.nan_count == 200
    assert_agrees(facts, torch.cat([tensor[:100], tensor[300:]]))


@pytest.mark.parametrize(
    "view",
    [
        values(2, 3, 16, 16).to(memory_format=torch.channels_last),
        values(20, 30).t(),
        values(20, 30)[::2, 1::3],
        values(20, 1).expand(20, 30),
        values(5, 6, 7).permute(2, 0, 1)[1:, :, ::2],
        torch.tensor(3.0).expand(5),
    ],
    ids=["channels_last", "transposed", "strided", "expanded", "permuted slice", "repeated scalar"],
)
def test_views_are_read_without_a_whole_copy(view: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_CPU_PIECE", 16)
    assert max(piece.numel() for piece in tensors._pieces(view, 16)) <= 16
    assert_agrees(tensor_facts(view), view)


def test_the_mean_does_not_lose_digits_to_float32() -> None:
    tensor = torch.full((1 << 20,), 0.1)
    facts = tensor_facts(tensor)
    assert facts.mean == pytest.approx(float(np.float32(0.1)), rel=1e-15)
    assert facts.std == pytest.approx(0.0, abs=1e-12)


def test_an_empty_tensor_has_no_statistics() -> None:
    facts = tensor_facts(torch.empty(0, 4))
    assert (facts.num_elements, facts.nbytes, facts.nan_count) == (0, 0, 0)
    assert facts.unavailable["min"] == "no elements"


def test_one_element_has_a_mean_and_no_spread() -> None:
    facts = tensor_facts(torch.tensor(2.5))
    assert (facts.shape, facts.mean, facts.std) == ((), 2.5, None)
    assert facts.unavailable == {"std": "a single element has no standard deviation"}


def test_a_quantized_tensor_is_read_by_its_values() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = torch.quantize_per_tensor(torch.tensor([0.0, 1.0, 2.0]), 0.5, 0, torch.qint8)
        facts = tensor_facts(tensor)
    assert (facts.dtype, facts.nbytes, facts.mean) == ("qint8", 3, 1.0)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(3, dtype=torch.complex64), "no order"),
        (torch.zeros(3, device="meta"), "meta tensor"),
        (torch.eye(3).to_sparse(), "sparse_coo"),
    ],
    ids=["complex", "meta", "sparse"],
)
def test_what_has_no_statistics_says_why(tensor: Tensor, reason: str) -> None:
    facts = tensor_facts(tensor, statistics=True)
    assert facts.mean is None
    assert facts.nan_count is None
    assert reason in facts.unavailable["mean"]


def test_a_sparse_tensor_takes_the_bytes_of_its_indices_and_values() -> None:
    tensor = torch.eye(3).to_sparse()
    assert tensor_facts(tensor).nbytes == 2 * 3 * 8 + 3 * 4


def test_a_meta_tensor_takes_the_bytes_it_would() -> None:
    assert tensor_facts(torch.zeros(10, device="meta")).nbytes == 40


def test_statistics_can_be_left_out() -> None:
    facts = tensor_facts(values(3), statistics=False)
    assert facts.mean is None
    assert facts.unavailable["mean"] == "not asked for"


def test_a_tensor_subclass_that_refuses_to_be_read_says_why() -> None:
    class Sealed(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if getattr(func, "__name__", "") in {"to", "detach"}:
                raise RuntimeError("sealed")
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    facts = tensor_facts(values(3).as_subclass(Sealed))
    assert facts.num_elements == 3
    assert facts.unavailable["mean"] == "RuntimeError: sealed"


def test_a_tensor_without_a_shape_says_why() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
        facts = tensor_facts(nested)
    assert facts.dtype == "float32"
    assert set(facts.unavailable) >= {"shape", "nbytes", "mean"}


def test_the_tensor_and_its_graph_stay_as_they_are() -> None:
    leaf = values(4, 4).requires_grad_()
    tensor = leaf * 2
    copy, version = tensor.detach().clone(), tensor._version
    facts = tensor_facts(tensor)
    assert_agrees(facts, tensor)
    assert torch.equal(tensor.detach(), copy)
    assert tensor._version == version
    tensor.sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.full((4, 4), 2.0))


def test_an_inference_tensor_is_read() -> None:
    with torch.inference_mode():
        tensor = values(5)
    assert_agrees(tensor_facts(tensor), tensor)


def test_the_random_state_stays() -> None:
    before = torch.get_rng_state()
    tensor_facts(values(10))
    assert torch.equal(torch.get_rng_state(), before)


class OnDevice(Tensor):
    """A tensor that says it is on a device that is not here."""

    @property
    def device(self) -> torch.device:  # type: ignore[override] # it is a read-only property of torch's too
        return torch.device("cuda:0")


@pytest.mark.parametrize("is_capturing", [False, True])
def test_values_are_not_read_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch, is_capturing: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    facts = tensor_facts(torch.ones(3).as_subclass(OnDevice), statistics=True)
    assert facts.mean == (None if is_capturing else 1.0)
    assert ("graph" in facts.unavailable.get("mean", "")) == is_capturing
