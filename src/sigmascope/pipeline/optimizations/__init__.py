"""All kinds of optimization, in the order in which they are considered and applied."""

from typing import Final

from sigmascope.pipeline.optimizations.denoiser import (
    ATTENTION_KIND,
    CACHE_KIND,
    CHANNELS_LAST_KIND,
    COMPILE_KIND,
    FAST_MATMUL_KIND,
    FUSED_QKV_KIND,
)
from sigmascope.pipeline.optimizations.memory import PLACEMENT_KIND, SLICING_KIND, TILING_KIND
from sigmascope.pipeline.optimizations.precision import (
    LAYERWISE_CASTING_KIND,
    PRECISION_KIND,
    QUANTISATION_KIND,
)
from sigmascope.pipeline.plan import Kind

KINDS: Final[tuple[Kind, ...]] = (
    PRECISION_KIND,
    QUANTISATION_KIND,
    LAYERWISE_CASTING_KIND,
    FUSED_QKV_KIND,
    CHANNELS_LAST_KIND,
    ATTENTION_KIND,
    PLACEMENT_KIND,
    SLICING_KIND,
    TILING_KIND,
    FAST_MATMUL_KIND,
    CACHE_KIND,
    COMPILE_KIND,
)
"""Formats before placement, which must know how large weights will be; compiling last, over the hooks of the others."""
