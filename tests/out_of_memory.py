"""What PyTorch raises when memory runs out, as its allocators, libraries and devices word it."""

import torch

NO_ROOM_TO_WORK: tuple[RuntimeError, ...] = (
    RuntimeError(
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input."
    ),
    RuntimeError("GET was unable to find an engine to execute this computation"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    RuntimeError("could not create a primitive"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`"),
)
"""Libraries without memory for their handle, their kernels or their workspace, as people have reported them."""

OUT_OF_MEMORY: tuple[Exception, ...] = (
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation."),
    getattr(torch, "AcceleratorError", RuntimeError)("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("miopenStatusAllocFailed"),
    RuntimeError("CUDA error: rocblas_status_memory_error when calling `rocblas_create_handle(handle)`"),
    *NO_ROOM_TO_WORK,
    RuntimeError(
        "MPS backend out of memory (MPS allocated: 9.05 GB, other allocations: 1.2 GB, max allowed: 9.07 GB)."
    ),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
    ),
)
