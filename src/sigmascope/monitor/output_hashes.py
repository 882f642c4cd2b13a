"""Hashes of what the stages of a call made, taken without making the call wait.

A stage's output on the CPU is hashed when the stage is over, if that takes less than a millisecond. Anything larger, and
all that is on an accelerator, is held until the call has returned (`HeldOutputs`), and hashed then: for no longer, and
not if it is so large that holding it would be felt. PyTorch counts what is written to a tensor; one that the host wrote
to meanwhile has no hash. What NumPy writes to the same memory is not counted.

From a CUDA device the bytes are copied while the host goes on, and hashed once they are there (`Arrivals`): at the end of
a later call, or of the watch. So is what a recipe tells of weights.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from sigmascope.monitor.recorder import LiveStage
from sigmascope.probes.accelerators import CAPTURED, is_capturing
from sigmascope.probes.copies import HostCopy, copy_to_host
from sigmascope.probes.fingerprints import fingerprint
from sigmascope.probes.reading import Reading, attempt
from sigmascope.probes.tensors import why_unreadable
from sigmascope.units import MIB, format_size

AT_ONCE_BYTES: Final = 16 * MIB
"""Hashing as much takes less than half a millisecond."""
HELD_BYTES: Final = 256 * MIB
"""Of all outputs of a call together."""
HELD_BYTES_ON_DEVICE: Final = 64 * MIB
"""Of one output: holding it keeps that memory from the host until the call is over."""
_LONGEST_WAIT_SECONDS: Final = 2.0
"""Seconds, at the end of a watch, for copies that are on their way."""
_LOOK_EVERY: Final = 0.0005

CHANGED: Final = "the host wrote to it before the call was over"
COUNTS_NOTHING: Final = "an inference tensor does not tell whether it was written to before the call was over"
FAILED: Final = "the call did not return"
OUTSIDE: Final = (
    "it is on an accelerator and was made outside a pipeline's call, where there is no moment to wait for it"
)
ON_ITS_WAY: Final = "its bytes were still on their way from the accelerator"


def output_hash(tensor: Tensor) -> Reading[str]:
    """Sixteen hexadecimal digits for the bytes of a tensor in row-major order; what is on an accelerator is waited for."""
    reading = fingerprint(tensor)
    return Reading(None if reading.value is None else f"{reading.value.digest:016x}", reading.reason)


@dataclass(slots=True, eq=False)
class _Held:
    stage: LiveStage
    name: str
    tensor: Tensor
    version: int


class HeldOutputs:
    """What the stages of one call made, until the call has returned."""

    def __init__(self, *, in_call: bool) -> None:
        self._in_call = in_call
        self._held: list[_Held] = []
        self._bytes = 0

    def take(self, stage: LiveStage, name: str, tensor: Tensor) -> None:
        """Hash what a stage made, which is over, or hold it until the call is."""
        why = why_unreadable(tensor)
        on_cpu = tensor.device.type == "cpu"
        if why is None and on_cpu and (tensor.nbytes <= AT_ONCE_BYTES or not self._in_call):
            stage.output_hash(name, output_hash(tensor))
            return
        why = why or self._why_not_held(tensor)
        if why is not None:
            stage.output_hash(name, Reading(None, why))
            return
        self._held.append(_Held(stage, name, tensor.detach(), tensor._version))
        self._bytes += tensor.nbytes

    def _why_not_held(self, tensor: Tensor) -> str | None:
        if not self._in_call:
            return OUTSIDE
        most = HELD_BYTES if tensor.device.type == "cpu" else HELD_BYTES_ON_DEVICE
        if tensor.nbytes > most or self._bytes + tensor.nbytes > HELD_BYTES:
            return f"{format_size(tensor.nbytes)} are too much to hold until the call is over"
        return COUNTS_NOTHING if tensor.is_inference() else None

    def hand_on(self, outer: "HeldOutputs") -> None:
        """Let a call around this one, which is over, hold what this one held."""
        outer._held += self._held
        outer._bytes += self._bytes
        self._held, self._bytes = [], 0

    def settle(self, arrivals: "Arrivals") -> None:
        """Hash what is held, and let go of it: the call has returned."""
        for held in self._emptied():
            if held.tensor._version != held.version:
                held.stage.output_hash(held.name, Reading(None, CHANGED))
            elif held.tensor.device.type == "cpu":
                held.stage.output_hash(held.name, output_hash(held.tensor))
            else:
                arrivals.send(held.stage, held.name, held.tensor)

    def drop(self) -> None:
        """Let go of what is held: the call failed, and its device may no longer answer."""
        for held in self._emptied():
            held.stage.output_hash(held.name, Reading(None, FAILED))

    def _emptied(self) -> Iterator[_Held]:
        """What is held, each let go of as the next is taken."""
        held, self._held, self._bytes = self._held, [], 0
        while held:
            yield held.pop(0)


class Arrivals:
    """What is on its way from an accelerator, and what to do once it is there."""

    def __init__(self, copy: Callable[[Tensor], HostCopy] = copy_to_host) -> None:
        self._copy = copy
        self._waiting: list[tuple[Callable[[], bool], Callable[[], object]]] = []

    def send(self, stage: LiveStage, name: str, tensor: Tensor) -> None:
        """Begin to copy an output, without keeping the output alive."""
        if is_capturing(tensor.device.type):
            stage.output_hash(name, Reading(None, CAPTURED))
            return
        copied = attempt(lambda: self._copy(tensor))
        copy = copied.value
        if copy is None:
            stage.output_hash(name, Reading(None, copied.reason))
            return
        stage.output_hash(name, Reading(None, ON_ITS_WAY))
        self.expect(copy.has_arrived, lambda: stage.output_hash(name, output_hash(copy.tensor)))

    def expect(self, has_arrived: Callable[[], bool], then: Callable[[], object]) -> None:
        """Do something once something has arrived, perhaps at once."""
        self._waiting.append((has_arrived, then))
        self.look()

    def look(self) -> None:
        """Take in what has arrived. Waits for nothing."""
        waiting, self._waiting = self._waiting, []
        try:
            while waiting:
                has_arrived, then = waiting.pop(0)
                if has_arrived():
                    then()
                else:
                    self._waiting.append((has_arrived, then))
        finally:  # what fails takes nothing else with it
            self._waiting += waiting

    def wait(self, seconds: float = _LONGEST_WAIT_SECONDS) -> None:
        """Wait for what is still on its way, but not for long, and forget what does not come."""
        end = time.monotonic() + seconds
        self.look()
        while self._waiting and time.monotonic() < end:
            time.sleep(_LOOK_EVERY)
            self.look()
        self._waiting.clear()
