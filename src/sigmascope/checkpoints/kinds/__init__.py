"""The ways of storing a quantised weight that can be read, one in a file, in the order in which they are asked.

To add one, write a file with its `Kind` and a line here.
"""

from typing import Final

from sigmascope.checkpoints.kinds import bitsandbytes, convrot, mxfp8, nvfp4, scaled
from sigmascope.checkpoints.kinds.kind import Kind

KINDS: Final[dict[str, Kind]] = {
    "bitsandbytes": bitsandbytes.FOUR_BITS,
    "bitsandbytes_int8": bitsandbytes.INT8_ROWS,
    "nvfp4": nvfp4.KIND,
    "convrot": convrot.KIND,
    "mxfp8": mxfp8.KIND,
    "scaled": scaled.KIND,
}
