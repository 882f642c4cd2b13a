"""Memory that runs out, in the words of PyTorch, Python and Pillow."""

import pytest
import torch

from sigmascope.errors import ConfigError, DataError
from sigmascope.lbm.devices import explain_out_of_memory

CUDA = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 15.77 GiB of which 1 MiB is free."


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError(CUDA), " (CUDA out of memory. Tried to allocate 20.00 GiB)."),
        (MemoryError(), " memory."),
    ],
)
def test_it_says_what_did_not_fit_and_what_takes_less(error: Exception, said: str) -> None:
    with pytest.raises(ConfigError) as caught, explain_out_of_memory("training", "Lower batch_size."):
        raise error
    assert caught.value.message.startswith("training does not fit into memory")
    assert caught.value.message.endswith(said)
    assert caught.value.hint == "Lower batch_size."


def test_more_than_the_machine_has_is_pytorchs_own_refusal() -> None:
    with pytest.raises(ConfigError, match="does not fit into memory"), explain_out_of_memory("this", "Less."):
        torch.empty(2**60)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), DataError("no samples."), OSError(2, "")],
)
def test_other_errors_are_as_they_were(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, explain_out_of_memory("training", "Less."):
        raise error
    assert caught.value is error
