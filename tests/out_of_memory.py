"""What PyTorch raises when memory runs out, as its allocators, libraries and devices word it."""

import torch

OUT_OF_MEMORY: tuple[Exception, ...] = (
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation."),
    getattr(torch, "AcceleratorError", RuntimeError)("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    RuntimeError(
        "MPS backend out of memory (MPS allocated: 9.05 GB, other allocations: 1.2 GB, max allowed: 9.07 GB)."
    ),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
    ),
)
