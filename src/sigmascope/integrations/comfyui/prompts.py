"""The instrument that hears of each prompt's beginning and end."""

import sys

from sigmascope.integrations.comfyui.instruments import Instrument
from sigmascope.integrations.comfyui.wraps import Call, Wrap, misfit


class Prompts(Instrument):
    """Wraps `PromptExecutor.execute_async`. Without it there is no record at all."""

    name = "prompts"
    gives = "the records of prompts"

    def misfit(self) -> str | None:
        """See `Instrument`."""
        executor = getattr(sys.modules.get("execution"), "PromptExecutor", None)
        if executor is None:
            return "there is no execution.PromptExecutor"
        return misfit(executor, "execute_async", ("prompt", "prompt_id", "extra_data"), asynchronous=True)

    def put_on(self) -> None:
        """See `Instrument`."""
        executor = sys.modules["execution"].PromptExecutor
        self.wraps.append(Wrap(executor, "execute_async", self, before=self._begins, after=self._ends))

    def _begins(self, call: Call) -> None:
        self.session.begin(str(call.get("prompt_id")), call.get("prompt"))

    def _ends(self, call: Call, _known: None, _result: object, error: BaseException | None) -> None:
        executor = call.get("self")
        messages = getattr(executor, "status_messages", ())
        self.session.end(str(call.get("prompt_id")), messages, error)


INSTRUMENT = Prompts
