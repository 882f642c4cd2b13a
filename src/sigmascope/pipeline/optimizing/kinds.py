"""All kinds of choices, in the order in which they are considered and applied."""

from typing import Final

from sigmascope.pipeline.optimizing.attention import ATTENTION_KIND
from sigmascope.pipeline.optimizing.caching import CACHE_KIND
from sigmascope.pipeline.optimizing.compiling import COMPILE_KIND
from sigmascope.pipeline.optimizing.fast_matmul import FAST_MATMUL_KIND
from sigmascope.pipeline.optimizing.fused_qkv import FUSED_QKV_KIND
from sigmascope.pipeline.optimizing.kind import Kind
from sigmascope.pipeline.optimizing.layerwise import LAYERWISE_CASTING_KIND
from sigmascope.pipeline.optimizing.memory_format import CHANNELS_LAST_KIND
from sigmascope.pipeline.optimizing.placement import PLACEMENT_KIND
from sigmascope.pipeline.optimizing.precision import PRECISION_KIND
from sigmascope.pipeline.optimizing.quantisation import QUANTISATION_KIND
from sigmascope.pipeline.optimizing.vae_memory import SLICING_KIND, TILING_KIND

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
