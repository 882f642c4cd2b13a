"""A GPU without a GPU: real pipelines run on the CPU, on a clock and an allocator of their own."""

from .gpu import SimulatedGpu
from .nvml import Nvml, asked_through
from .watching import found, number, on_this_gpu, watched

__all__ = ["Nvml", "SimulatedGpu", "asked_through", "found", "number", "on_this_gpu", "watched"]
