"""A pretended accelerator: tensors that say cuda:0 or mps:0 while their values lie on the CPU.

In `pretend_device("cuda")` everything runs as a host writes it: `module.to("cuda")`, `torch.zeros(3, device="cuda")`.
Each operation is carried out on the CPU by PyTorch's own kernels, so that the values are those of the CPU, and

- tensors of two devices in one operation are refused, as CUDA refuses them;
- on "mps", float64 is refused, as Metal refuses it;
- what a real device would make the host wait for is noted with the line that asked (`PretendedDevice.waits`): `item()`,
  `nonzero`, an index by a mask, a copy to the CPU unless it goes to pinned memory without blocking;
- copies to the device from memory that is not pinned are noted too (`uploads`): the host waits for them as well.

What it cannot carry is in `CANNOT_CARRY`. It needs a C++ compiler, for thirty lines that tell PyTorch of the device.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
import torch
from tests.pretended_device.backends import Fakes
from tests.pretended_device.tensors import Kind, PretendedDevice, PretendedTensor, Wait, values_of
from torch import Tensor

__all__ = [
    "CANNOT_CARRY",
    "Kind",
    "PretendedDevice",
    "PretendedTensor",
    "Wait",
    "build_guard",
    "pretend_device",
    "same",
    "why_none",
]

CANNOT_CARRY: Final = {
    "backward, but with `backward=True`": "the autograd engine asks C++ for the accelerator of this build, and a CPU "
    "build has none; then C++ takes the tensors for the CPU's, and Python alone knows the device",
    "with `backward=True`: autocast, and a mix of devices inside backward": "C++ decides them by what it takes for the "
    "tensor's device",
    "torch.Generator('cuda')": "PyTorch makes generators in C++, by device; pass one of the CPU, as diffusers allows",
    "torch.compile and CUDA graphs": "they trace below the level at which the device is pretended",
    "torch.inference_mode": "views of its tensors share a count of writes that PyTorch keeps in C++ and refuses for ours",
    "operations that change a tensor's shape in place": "a tensor's shape is kept in C++; such an operation is refused",
    "fused attention": "its kernels for CUDA are not in a CPU build; attention runs as the plain formula",
    "the order of work on streams": "all work is done at once",
    "memory": "the allocator's figures are constants",
    "what Metal lacks besides float64": "its list changes with each version of PyTorch",
}
"""Each with its reason."""

_GUARD: Final = Path(__file__).parent / "pretended_device" / "guard.cpp"
_TYPES: Final = {"cuda": 1, "mps": 13}  # of c10::DeviceType


@contextmanager
def pretend_device(kind: Kind, guard: Path, *, backward: bool = False) -> Iterator[PretendedDevice]:
    """Pretend that PyTorch was built for a device, and that there is one. Afterwards nothing of it is left.

    Args:
        kind: "cuda" or "mps".
        guard: What `build_guard` built.
        backward: Carry backward too; see `CANNOT_CARRY` for what this costs.
    """
    library = ctypes.CDLL(str(guard))
    if library.is_installed(_TYPES[kind]):
        raise RuntimeError(f"there is a real {kind}, or one is pretended already")
    device = PretendedDevice(kind, backward=backward)
    # Not at the top: `check_annotations` comes before modules of ours, and Dynamo takes a second. It keeps what it finds
    # in torch.cuda when it is imported.
    import torch._dynamo

    from sigmascope.monitor.scope import accelerator_of_this_process

    library.install(_TYPES[kind])
    patch = pytest.MonkeyPatch()
    accelerator_of_this_process.cache_clear()
    lifts_cpu_only = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(..., device=...)` moves where modes see it
    try:
        Fakes(device, patch).put_on()
        with device.here():
            yield device
    finally:
        patch.undo()
        torch._C._set_only_lift_cpu_tensors(lifts_cpu_only)
        library.remove_guard(_TYPES[kind])
        accelerator_of_this_process.cache_clear()


def why_none() -> str | None:
    """The reason if no device can be pretended here."""
    if torch.version.cuda or torch.version.hip or torch.backends.mps.is_built():
        return "a device is pretended on a CPU build of PyTorch only"
    if _compiler() is None:
        return "no C++ compiler (g++, c++ or clang++), with which the pretended device is built"
    return None


def build_guard(folder: Path) -> Path:
    """Build the library that tells PyTorch of the device, unless the folder has it.

    Args:
        folder: Other processes may build into it at the same time.
    """
    source = _GUARD.read_bytes()
    digest = hashlib.sha256(source + torch.__version__.encode()).hexdigest()[:16]
    library = folder / f"guard-{digest}.so"
    if not library.exists():
        torch_folder = Path(torch.__file__).parent
        made = folder / f"{library.name}.{os.getpid()}"
        include, link = f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"
        command = [_compiler() or "c++", "-std=c++20", "-shared", "-fPIC", include, link, str(_GUARD)]
        subprocess.run([*command, "-o", str(made), "-lc10", "-ltorch_python"], check=True, timeout=120)
        made.replace(library)
    return library


def _compiler() -> str | None:
    return next((found for name in ("g++", "c++", "clang++") if (found := shutil.which(name))), None)


def same(tensors: Iterable[Tensor], expected: Iterable[Tensor], *, within: float = 0.0) -> bool:
    """Whether tensors of any device hold the same values, or the same but for a share of the largest."""
    for tensor, other in zip(tensors, expected, strict=True):
        a, b = values_of(tensor.detach()).double(), values_of(other.detach()).double()
        if a.shape != b.shape or float((a - b).abs().max()) > within * float(b.abs().max()):
            return False
    return True
