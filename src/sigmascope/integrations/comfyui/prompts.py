"""The instrument that hears of each prompt's beginning and end."""

from collections.abc import Mapping
from typing import Any, Final

from sigmascope.integrations.comfyui.instruments import Instrument
from sigmascope.integrations.comfyui.needs import Need
from sigmascope.integrations.comfyui.wraps import Call, Wrap

_LONGEST_ID: Final = 100
_TOLD_OF_ITS_END: Final = Need("execution", "PromptQueue.get_flags", (), False)
"""What ComfyUI calls next once a prompt's end is known to whoever waits for it, and before it unloads models on request."""


class Prompts(Instrument):
    """Wraps `PromptExecutor.execute_async`, without which there is no record at all, and `PromptQueue.get_flags`."""

    name = "prompts"
    gives = "the records of prompts"
    needs = (Need("execution", "PromptExecutor.execute_async", ("prompt", "prompt_id", "extra_data"), True),)

    def put_on(self) -> None:
        """See `Instrument`."""
        self.wraps.append(Wrap(self.needs[0], self, before=self._begins, after=self._ends))
        self._finishes_later = _TOLD_OF_ITS_END.fault() is None
        if self._finishes_later:
            self.wraps.append(Wrap(_TOLD_OF_ITS_END, self, before=self._told))

    def stop(self, reason: str | None = "it was taken off") -> None:
        """See `Instrument`."""
        self.session.abandon()
        super().stop(reason)

    def _begins(self, call: Call) -> None:
        self.session.begin(str(call.get("prompt_id")), call.get("prompt"))
        if (prompt := self.session.prompt) is not None:
            prompt.facts["workflow"] = _workflow_of(call.get("extra_data"))

    def _ends(self, call: Call, _known: None, _result: object, error: BaseException | None) -> None:
        executor = call.get("self")
        messages = getattr(executor, "status_messages", ())
        self.session.end(str(call.get("prompt_id")), messages, error)
        if not self._finishes_later:
            self.session.finish()

    def _told(self, _call: Call) -> None:
        self.session.finish()


def _workflow_of(extra_data: Any) -> str | None:
    """The id of the workflow that the browser posted the prompt from; None: it was posted otherwise."""
    found = extra_data
    for name in ("extra_pnginfo", "workflow", "id"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, str) and len(found) <= _LONGEST_ID else None


INSTRUMENT = Prompts
