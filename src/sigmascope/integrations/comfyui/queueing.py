"""The instrument that hears how long a prompt was validated, and how long it waited in ComfyUI's queue.

Both come before the prompt runs, on the server's own thread, and are no part of the record's time.
"""

import time
from collections import OrderedDict
from typing import Final

from sigmascope.integrations.comfyui.instruments import Instrument
from sigmascope.integrations.comfyui.needs import Need
from sigmascope.integrations.comfyui.recording import PromptRecording
from sigmascope.integrations.comfyui.wraps import Call, Wrap

BEFORE: Final = "seconds_before"
"""The prompt's fact: seconds of "validation" and in the "queue", before it ran."""
_MOST: Final = 10_000
"""Prompts that are known to wait: one that the user takes out of the queue never comes."""


class Queueing(Instrument):
    """Wraps `execution.PromptQueue.put` and `execution.validate_prompt`."""

    name = "queueing"
    gives = "how long prompts were validated and waited in the queue"
    needs = (
        Need("execution", "PromptQueue.put", ("item",), False),
        Need("execution", "validate_prompt", ("prompt_id",), True),
    )

    def put_on(self) -> None:
        """See `Instrument`."""
        self._validated: OrderedDict[str, float] = OrderedDict()
        self._queued_ns: OrderedDict[str, int] = OrderedDict()
        self.wraps.append(Wrap(self.needs[0], self, before=self._is_queued))
        self.wraps.append(Wrap(self.needs[1], self, before=_moment, after=self._is_validated))

    def _is_validated(self, call: Call, began_ns: int, _result: object, _error: BaseException | None) -> None:
        self._validated[str(call.get("prompt_id"))] = (time.perf_counter_ns() - began_ns) / 1e9
        while len(self._validated) > _MOST:
            self._validated.popitem(last=False)

    def _is_queued(self, call: Call) -> None:
        self._queued_ns[str(call.get("item")[1])] = time.perf_counter_ns()
        while len(self._queued_ns) > _MOST:
            self._queued_ns.popitem(last=False)

    def at_the_end(self, prompt: PromptRecording) -> None:
        """See `Instrument`."""
        queued_ns = self._queued_ns.pop(prompt.prompt_id, None)
        prompt.facts[BEFORE] = {
            "validation": self._validated.pop(prompt.prompt_id, None),
            "queue": None if queued_ns is None else (prompt.started_ns - queued_ns) / 1e9,
        }


def _moment(_call: Call) -> int:
    return time.perf_counter_ns()


INSTRUMENT = Queueing
