"""Ctrl-C at one exact place of the package's own code."""

import dis
import sys
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import sigmascope

PACKAGE = str(Path(sigmascope.__file__).parent)
Place = tuple[CodeType, int]
"""A function's code and the offset of an instruction in it; the first is where a call of the function begins."""


class Interruption:
    """Raises KeyboardInterrupt where Python itself does: as a function of the package begins, and after it has called one.

    Args:
        folders: Of the package, where it may come.
        at: Where to raise it, once; None: nowhere.

    Attributes:
        places: Those that were passed, each once, in their order.
        is_raised: Whether it was.
    """

    def __init__(self, *folders: str, at: Place | None = None) -> None:
        self.places: dict[Place, None] = {}
        self._files = tuple(f"{PACKAGE}/{folder}/" for folder in folders)
        self.is_raised = False
        self._at = at

    def during(self, act: Callable[[], object]) -> None:
        """Do something, and be interrupted meanwhile."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            act()
        finally:
            sys.settrace(before)

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if self.is_raised or not code.co_filename.startswith(self._files):
            return None
        frame.f_trace_opcodes = True
        if event == "call" or (event == "opcode" and frame.f_lasti in _after_calls(code)):
            place = (code, -1 if event == "call" else frame.f_lasti)
            self.places[place] = None
            if place == self._at:
                self.is_raised = True
                raise KeyboardInterrupt
        return self


@cache
def _after_calls(code: CodeType) -> set[int]:
    """Offsets of the instructions that follow a call."""
    pairs = pairwise(dis.get_instructions(code))
    return {after.offset for call, after in pairs if call.opname.startswith("CALL")}
