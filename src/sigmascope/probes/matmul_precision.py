"""How exactly PyTorch multiplies float32 matrices: a setting of the process, with an old name and newer ones by backend.

`torch.set_float32_matmul_precision` sets all backends. Since PyTorch 2.9, `fp32_precision` sets each one of them, and the
old name cannot be read once they differ: PyTorch raises then.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from sigmascope.probes.reading import attempt

_BACKENDS: Final[tuple[Any, ...]] = (
    torch.backends.cuda.matmul,
    getattr(torch.backends.mkldnn, "matmul", None),
)
_DEFAULT: Final = "highest"


_AMPERE: Final = 8
_AMD_MATRIX_CORES: Final = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
"""AMD's architectures that multiply matrices of bfloat16 in hardware: CDNA, and RDNA from its third generation."""


def multiplies_bfloat16(capability: str) -> bool:
    """Whether a CUDA or HIP device multiplies matrices of bfloat16 much faster than those of float32.

    Args:
        capability: As the device's facts have it: "8.9" of NVIDIA's, "gfx90a:sramecc+:xnack-" of AMD's. What HIP gives
            as the compute capability is the number of the architecture, and tells nothing.
    """
    major = capability.partition(".")[0]
    return int(major) >= _AMPERE if major.isdigit() else capability.startswith(_AMD_MATRIX_CORES)


@dataclass(frozen=True, slots=True)
class MatmulPrecision:
    """The setting at one moment.

    Attributes:
        by_name: "highest", "high" or "medium"; None: the backends differ, and have no name in common.
        by_backend: Of CUDA and of oneDNN ("none", "ieee", "tf32", "bf16"); None where this PyTorch has no such setting.
    """

    by_name: str | None
    by_backend: tuple[str | None, ...]

    def restore(self) -> None:
        """Set all backends as they were."""
        torch.set_float32_matmul_precision(self.by_name or _DEFAULT)
        for backend, precision in zip(_BACKENDS, self.by_backend, strict=True):
            if precision is not None:
                backend.fp32_precision = (
                    "none"  # which has the one of torch.backends.fp32_precision, now and later
                )
                if backend.fp32_precision != precision:
                    backend.fp32_precision = precision

    def __str__(self) -> str:
        """As `sigmascope doctor` says it."""
        cuda, mkldnn = self.by_backend
        return self.by_name or f"{cuda} on CUDA, {mkldnn} on the CPU"


def matmul_precision() -> MatmulPrecision:
    """The setting now; it never raises."""
    return MatmulPrecision(
        attempt(torch.get_float32_matmul_precision).value,
        tuple(getattr(backend, "fp32_precision", None) for backend in _BACKENDS),
    )


@contextmanager
def full_float32() -> Iterator[None]:
    """Multiply in full float32 on all backends, whatever the host has chosen, and give it its choice back."""
    before = matmul_precision()
    torch.set_float32_matmul_precision(_DEFAULT)
    try:
        yield
    finally:
        before.restore()
