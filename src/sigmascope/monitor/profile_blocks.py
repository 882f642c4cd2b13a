"""Which parts of a denoiser a profile tells apart, and the marks around their calls."""

import threading
from collections.abc import Callable, Mapping
from typing import Final

from torch import nn
from torch.autograd.profiler import record_function
from torch.utils.hooks import RemovableHandle

from sigmascope.monitor.hooks import COMPILED_IN_PLACE, Hook
from sigmascope.probes.architecture import denoisers_of
from sigmascope.probes.modules import unwrap

LABEL: Final = "sigmascope::"
"""What the marks of a profile's blocks begin with; the path in the denoiser follows."""
COMPILED: Final = "the denoiser is compiled as a whole: its parts run as one"


def denoiser_of(model: object) -> nn.Module | None:
    """The module whose forward calls are steps; None if there is none.

    Args:
        model: A module (taken as it is, also one that torch.compile wrapped), a pipeline, or what wraps a module.
    """
    for candidate in denoisers_of(model):
        module = candidate if isinstance(candidate, nn.Module) else unwrap(candidate)
        # ComfyUI calls the inner model of what its patcher holds, never the outer one.
        inner = getattr(module, "diffusion_model", None)
        found = inner if isinstance(inner, nn.Module) else module
        if found is not None:
            return found
    return None


def blocks_of(denoiser: nn.Module) -> dict[str, nn.Module]:
    """The denoiser's parts by path: its direct children, and of lists of modules their entries."""
    found: dict[str, nn.Module] = {}
    for name, child in denoiser.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            found |= {f"{name}.{path}": block for path, block in blocks_of(child).items()}
        else:
            found[name] = child
    return found


def why_no_blocks(denoiser: nn.Module, blocks: Mapping[str, nn.Module]) -> str | None:
    """Why the parts cannot be told apart; None if they can."""
    if hasattr(denoiser, "_orig_mod"):
        return COMPILED
    if any(getattr(block, "_compiled_call_impl", None) is not None for block in blocks.values()):
        return f"blocks: {COMPILED_IN_PLACE.partition(';')[0]}"
    return None


class Mark(record_function):
    """A name for what the profiler sees from `open` to `close`."""

    def open(self) -> "Mark":
        """Begin."""
        self.__enter__()  # type: ignore[no-untyped-call]
        return self

    def close(self) -> None:
        """End."""
        self.__exit__(None, None, None)


class Marks:
    """Names every call of a denoiser's blocks to the profiler, through hooks that are on for a step.

    Args:
        blocks: By the path that the marks carry.
    """

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        self._blocks = blocks
        self._handles: list[RemovableHandle] = []
        self._open: list[Mark] = []
        self._thread = 0

    def put_on(self) -> None:
        """Begin the denoiser's own mark, and put the hooks on. Marks are of this thread's calls alone."""
        self._thread = threading.get_ident()
        self._open.append(Mark(LABEL).open())
        for path, block in self._blocks.items():
            before, after = Hook(self._opening(LABEL + path)), Hook(self._close)
            self._handles.append(block.register_forward_pre_hook(before, prepend=True))
            self._handles.append(block.register_forward_hook(after, always_call=True))

    def take_off(self) -> None:
        """Take them off, and end the denoiser's mark, and those of calls that Ctrl-C broke off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        while self._open:
            self._open.pop().close()

    def _opening(self, label: str) -> Callable[[], None]:
        def open_mark() -> None:
            if threading.get_ident() == self._thread:
                self._open.append(Mark(label).open())

        return open_mark

    def _close(self) -> None:
        if threading.get_ident() == self._thread and len(self._open) > 1:
            self._open.pop().close()
