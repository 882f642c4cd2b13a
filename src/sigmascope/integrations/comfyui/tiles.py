"""The instrument that hears when a VAE works in tiles, and whether the node asked for that or memory ran out."""

import threading
from functools import partial
from typing import Any, Final

from sigmascope.integrations.comfyui.findings import tell
from sigmascope.integrations.comfyui.instruments import Instrument
from sigmascope.integrations.comfyui.needs import Need
from sigmascope.integrations.comfyui.recording import NodeWatch
from sigmascope.integrations.comfyui.wraps import Call, Wrap

TILED: Final = "tiled"
"""The fact of a node's stage that lists each time."""
_ASKED: Final = ("decode_tiled", "encode_tiled")
_TILED: Final = (
    "decode_tiled_",
    "decode_tiled_1d",
    "decode_tiled_3d",
    "encode_tiled_",
    "encode_tiled_1d",
    "encode_tiled_3d",
    "_decode_tiled_owned",
    "_encode_tiled_owned",
)


class Tiles(Instrument):
    """Wraps the methods of `comfy.sd.VAE` that work in tiles, of which a version has some."""

    name = "tiles"
    gives = "that a VAE fell back to tiles"
    needs = tuple(Need("comfy.sd", f"VAE.{name}") for name in (*_ASKED, "decode_tiled_", "encode_tiled_"))

    def put_on(self) -> None:
        """See `Instrument`."""
        self._asked = threading.local()
        for need in self.needs[: len(_ASKED)]:
            self.wraps.append(Wrap(need, self, before=self._asks, after=self._asked_for))
        for name in _TILED:
            need = Need("comfy.sd", f"VAE.{name}")
            if need.fault() is None:
                self.wraps.append(Wrap(need, self, before=partial(self._works, name), after=self._worked))

    def _asks(self, _call: Call) -> None:
        self._asked.depth = getattr(self._asked, "depth", 0) + 1

    def _asked_for(self, _call: Call, _known: Any, _result: object, _error: BaseException | None) -> None:
        self._asked.depth -= 1

    def _works(self, method: str, _call: Call) -> NodeWatch | None:
        node = self.node_here()
        if node is None:
            return None
        node.tiled_calls += 1
        fallback = getattr(self._asked, "depth", 0) == 0
        if fallback and not any(tiles["fallback"] for tiles in node.facts.get(TILED, ())):
            tell(node, "comfyui.tiled_fallback")
        node.add(TILED, {"method": method, "fallback": fallback})
        return node

    def _worked(
        self, _call: Call, node: NodeWatch | None, _result: object, _error: BaseException | None
    ) -> None:
        if node is not None:
            node.tiled_calls -= 1


INSTRUMENT = Tiles
