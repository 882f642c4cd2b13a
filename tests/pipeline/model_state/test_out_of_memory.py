import errno
import gc
import weakref

import numpy as np
import pytest
import torch
from tests.out_of_memory import OUT_OF_MEMORY

from sigmascope.pipeline.model_state import let_go
from sigmascope.probes.reading import is_out_of_memory


def _raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001 - whatever it is
        return caught


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        RuntimeError("MPS backend out of memory (MPS allocated: 18.11 GB, max allowed: 18.13 GB)"),
        RuntimeError("Invalid buffer size: 24.00 GiB"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"
        ),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("UR backend failed. UR backend returns:39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        *OUT_OF_MEMORY,
    ],
    ids=lambda error: str(error)[:24],
)
def test_these_say_that_memory_ran_out(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Given groups=1, weight of size [8, 3, 3, 3], expected input to have 3 channels"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("index is out of memory bounds"),
        RuntimeError("cuDNN error: CUDNN_STATUS_BAD_PARAM"),
        RuntimeError(
            "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx( handle, opa, opb, m)`"
        ),
        RuntimeError(
            "CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasSgemm( handle, opa, opb)`"
        ),
        RuntimeError("could not create a primitive descriptor for a matmul primitive"),
        ValueError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
        ValueError("out of memory"),
        FloatingPointError("NaN in the latent"),
        OSError(errno.ENOSPC, "No space left on device"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: str(error)[:24],
)
def test_these_do_not(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_numpy_runs_out_of_memory_too() -> None:
    with pytest.raises(MemoryError) as caught:
        np.empty((1 << 60,), dtype=np.uint8)
    assert is_out_of_memory(caught.value)


def test_the_cpus_allocator_says_so_itself() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_an_error_raised_from_one_is_one() -> None:
    error = RuntimeError("the encoder failed")
    error.__cause__ = MemoryError()
    assert is_out_of_memory(error)


def test_an_error_raised_while_handling_one_is_not() -> None:
    error = ValueError("the encoder failed")
    error.__context__ = MemoryError()
    assert not is_out_of_memory(error)


def test_a_chain_that_bites_its_tail_ends() -> None:
    first, second = RuntimeError("one"), RuntimeError("two")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)


def _failing_with(tensors: list["weakref.ref[torch.Tensor]"]) -> None:
    activation = torch.zeros(8)
    tensors.append(weakref.ref(activation))
    try:
        raise MemoryError
    except MemoryError as error:
        raise RuntimeError("out of memory") from error


def test_a_kept_error_holds_no_tensor_once_let_go() -> None:
    tensors: list[weakref.ref[torch.Tensor]] = []
    kept = None
    try:
        _failing_with(tensors)
    except RuntimeError as error:
        kept = error
    assert tensors[0]() is not None
    assert kept is not None
    let_go(kept)
    gc.collect()
    assert tensors[0]() is None
    assert kept.__traceback__ is None


def test_what_the_caller_was_handling_keeps_its_traceback() -> None:
    outer = _raised(ValueError("the caller's"))
    inner = _raised(MemoryError())
    inner.__context__ = outer
    let_go(inner, outer)
    assert inner.__traceback__ is None
    assert outer.__traceback__ is not None


def test_an_interruption_is_none_whatever_it_was_raised_from() -> None:
    interruption = KeyboardInterrupt()
    interruption.__cause__ = MemoryError()
    assert not is_out_of_memory(interruption)
