"""What fingerprints tell apart, and what they must not."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import xxhash
from torch import Tensor

from sigmascope.probes import fingerprints as fingerprints_module
from sigmascope.probes.fingerprints import Fingerprint, fingerprint, fingerprints

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.bool,
    torch.complex64,
]


def known(tensor: Tensor) -> Fingerprint:
    found = fingerprint(tensor).value
    assert found is not None
    return found


@pytest.fixture(scope="module")
def weight() -> Tensor:
    return torch.randn(300, 401, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_has_a_fingerprint(dtype: torch.dtype, weight: Tensor) -> None:
    found = known(weight.to(dtype))
    assert (found.shape, found.dtype) == ((300, 401), str(dtype).removeprefix("torch."))


@pytest.mark.parametrize("index", [0, 65_535, 65_536, 300 * 401 - 1])
def test_one_bit_anywhere_changes_it(index: int, weight: Tensor) -> None:
    changed = weight.clone()
    changed.view(-1).view(torch.int32)[index] ^= 1
    assert known(changed) != known(weight)


@pytest.mark.parametrize(
    "edit",
    [lambda w: -w, lambda w: w.flip(0), lambda w: w.roll(65_536), lambda w: w[torch.randperm(300)]],
    ids=["signs", "rows turned round", "pieces exchanged", "rows in another order"],
)
def test_the_same_values_elsewhere_change_it(edit: Callable[[Tensor], Tensor], weight: Tensor) -> None:
    assert known(edit(weight)) != known(weight)


def test_another_shape_of_the_same_bytes_changes_it(weight: Tensor) -> None:
    one, other = known(weight), known(weight.reshape(401, 300))
    assert one.digest == other.digest
    assert one != other


@pytest.mark.parametrize("shape", [(3, 8, 5, 7), (64, 64, 33, 33)])
def test_the_layout_in_memory_does_not_count(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape)
    assert known(weight.to(memory_format=torch.channels_last)) == known(weight)


def test_a_transposed_view_counts_as_what_it_shows(weight: Tensor) -> None:
    assert known(weight.T) == known(weight.T.contiguous())


def test_conjugation_and_negation_that_are_only_noted_count() -> None:
    weight = torch.randn(8, 8, dtype=torch.complex64)
    assert known(weight.conj()) == known(weight.conj().resolve_conj())
    assert known(weight.conj().imag) == known(weight.conj().imag.resolve_neg())
    found = fingerprints({"a": weight.imag, "b": weight.conj().imag})
    assert found["a"] != found["b"]


@pytest.mark.parametrize("elements", [0, 1, 65_535, 65_536, 65_537, 200_000])
def test_an_accelerators_way_gives_the_same(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"a": torch.randn(elements), "b": torch.randn(70_000).to(torch.bfloat16)}
    on_cpu = fingerprints(tensors)
    monkeypatch.setattr(fingerprints_module, "_on_cpu", lambda tensor: False)
    assert fingerprints(tensors) == on_cpu


def test_an_accelerators_way_takes_views_at_odd_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(200_001).to(torch.bfloat16)[1:]
    on_cpu = known(tensor)
    monkeypatch.setattr(fingerprints_module, "_on_cpu", lambda tensor: False)
    assert known(tensor) == on_cpu


def test_an_accelerators_tensors_come_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {str(i): torch.randn(70_000) for i in range(5)}
    on_cpu = fingerprints(tensors)
    monkeypatch.setattr(fingerprints_module, "_on_cpu", lambda tensor: False)
    monkeypatch.setattr(fingerprints_module, "_GROUP_BYTES", 600_000)
    assert fingerprints(tensors) == on_cpu


def test_threads_give_the_same_as_one() -> None:
    tensors = {str(i): torch.randn(1 << 21) for i in range(5)}
    assert fingerprints(tensors, threads=3) == fingerprints(tensors, threads=1)


def test_large_elements_shared_by_several_names_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Tensor] = []

    def bytes_of(tensor: Tensor) -> Tensor:
        read.append(tensor)
        return tensor.view(torch.uint8)

    monkeypatch.setattr(fingerprints_module, "_bytes_of", bytes_of)
    tied = torch.randn(1 << 13)
    found = fingerprints({"embedding": tied, "head": tied.detach()})
    assert found["embedding"] == found["head"]
    assert len(read) == 1


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int8]
)
def test_small_tensors_are_hashed_together_as_each_alone(dtype: torch.dtype) -> None:
    tensors = {str(size): torch.randn(size, 3).to(dtype) for size in (1, 2, 5)}
    tensors["turned"] = tensors["5"].T.contiguous().T
    tensors["scalar"] = tensors["1"][0, 0].clone()
    together = fingerprints(tensors)
    for name, tensor in tensors.items():
        digest = xxhash.xxh3_64_intdigest(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        whole = xxhash.xxh3_64_intdigest(digest.to_bytes(8, "little"))
        assert together[name].value == Fingerprint(tuple(tensor.shape), str(dtype)[6:], whole)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.empty(2, device="meta"), "a meta tensor has no values"),
        (torch.eye(2).to_sparse(), "the layout is sparse_coo"),
    ],
)
def test_what_has_no_values_in_reach_has_a_reason(tensor: Tensor, reason: str) -> None:
    found = fingerprint(tensor)
    assert (found.value, found.reason) == (None, reason)


def test_weights_that_were_freed_have_a_reason() -> None:
    weight = torch.randn(4)
    weight.untyped_storage().resize_(0)
    assert fingerprint(weight).reason == "the values were freed or moved"


def test_a_parameter_stays_as_it_is_and_is_not_kept() -> None:
    parameter = torch.nn.Parameter(torch.randn(8, 8))
    before, version = parameter.detach().clone(), parameter._version
    assert known(parameter) == known(before)
    assert torch.equal(parameter, before)
    assert parameter._version == version
    assert parameter.grad is None
    reference = weakref.ref(parameter)
    del parameter
    gc.collect()
    assert reference() is None


@pytest.mark.gpu
def test_a_weight_on_an_accelerator_has_the_fingerprint_it_had_on_the_cpu(weight: Tensor) -> None:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        pytest.skip("this machine has no accelerator")
    assert known(weight.to(device)) == known(weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.complex64, torch.bool])
def test_a_single_element_that_was_expanded_is_read(dtype: torch.dtype) -> None:
    one = torch.ones((), dtype=dtype)
    assert one.expand(1).stride() == (0,)
    assert known(one.expand(1)) == known(one.expand(1).clone())
