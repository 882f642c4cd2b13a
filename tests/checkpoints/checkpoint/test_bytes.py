import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from sigmascope.checkpoints.checkpoint import iter_tensor_bytes

STRIDED = {
    "transposed": torch.arange(24.0).reshape(4, 6).T,
    "every other": torch.arange(24.0)[::2],
    "permuted": torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
    "one of a column": torch.arange(8.0).reshape(4, 2)[1:2, 1:],
    "expanded": torch.arange(3.0).expand(5, 3),
    "scalar": torch.tensor(3.0),
    "conjugated": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj(),
    "negated view": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj().imag,
    "needs a gradient": torch.arange(3.0, requires_grad=True),
}


@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize("chunk_bytes", [1, 5, 16, 10_000])
def test_pieces_are_the_elements_in_row_major_order(name: str, chunk_bytes: int) -> None:
    tensor = STRIDED[name]
    joined = b"".join(bytes(piece) for piece in iter_tensor_bytes(tensor, chunk_bytes))
    assert joined == tensor.detach().resolve_conj().resolve_neg().numpy().tobytes()


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    chunk_bytes=st.integers(4, 200),
)
def test_copied_pieces_are_no_larger_than_asked(shape: list[int], chunk_bytes: int) -> None:
    tensor = torch.zeros(*shape, 2)[..., 0]
    pieces = [bytes(piece) for piece in iter_tensor_bytes(tensor, chunk_bytes)]
    assert sum(map(len, pieces)) == tensor.numel() * 4
    assert tensor.is_contiguous() or all(len(piece) <= chunk_bytes for piece in pieces)


def test_a_contiguous_tensor_is_not_copied() -> None:
    tensor = torch.zeros(4)
    (piece,) = iter_tensor_bytes(tensor)
    tensor[0] = 1.0
    assert bytes(piece[:4]) == torch.ones(1).numpy().tobytes()


def test_an_empty_tensor_has_no_pieces() -> None:
    assert list(iter_tensor_bytes(torch.empty(3, 0))) == []
