"""All kinds of choices, in the order in which they are considered and applied."""

from typing import Final

from sigmascope.pipeline.optimizing import (
    attention,
    caching,
    compiling,
    fast_matmul,
    fused_qkv,
    layerwise,
    memory_format,
    placement,
    precision,
    quantisation,
    vae_memory,
)
from sigmascope.pipeline.optimizing.kind import Kind

KINDS: Final[tuple[Kind, ...]] = (
    precision.KIND,
    quantisation.KIND,
    layerwise.KIND,
    fused_qkv.KIND,
    memory_format.KIND,
    attention.KIND,
    placement.KIND,
    vae_memory.SLICING_KIND,
    vae_memory.TILING_KIND,
    fast_matmul.KIND,
    caching.KIND,
    compiling.KIND,
)
"""Formats before placement, which must know how large weights will be; compiling last, over the hooks of the others."""
