"""An entry where it was found."""

from typing import NamedTuple

from sigmascope.probes.adapters.applied import PatchState


class Standing(NamedTuple):
    """How far a change has come, and what that was read from."""

    state: PatchState
    reason: str


class Found(NamedTuple):
    """One entry of a patcher.

    Attributes:
        key: The weight's name.
        kept: The entry as the host keeps it, or made in its form where the host keeps it otherwise.
        standing: How far it has come.
        source: What it came from.
        bypass: Whether it acts beside the layer, where ComfyUI looks at no magnitudes.
    """

    key: str
    kept: object
    standing: Standing
    source: str | None = None
    bypass: bool = False
