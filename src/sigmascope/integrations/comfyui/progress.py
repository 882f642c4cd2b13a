"""The instrument that hears of each node's start and end and of each step.

Nodes come by a progress handler as ComfyUI has them. ComfyUI 0.33 leaves out steps that follow each other within 0.1 s when
it tells handlers, so steps are heard of where a node moves its bar; by the handler only where that cannot be wrapped.
"""

import math
import sys
import time
from collections.abc import Callable
from numbers import Real
from typing import Any, Final
from weakref import WeakKeyDictionary

from sigmascope.integrations.comfyui.instruments import Instrument
from sigmascope.integrations.comfyui.needs import Need
from sigmascope.integrations.comfyui.recording import PromptRecording
from sigmascope.integrations.comfyui.wraps import Call, Wrap

_MODULE: Final = "comfy_execution.progress"
_NAME: Final = "sigmascope"
_BAR: Final = Need("comfy.utils", "ProgressBar.update_absolute", ("value", "total"), False)
_EVENTS: Final = ("start_handler", "update_handler", "finish_handler")


class Progress(Instrument):
    """Registers a handler with each `ProgressRegistry`, which is made anew for each prompt, and wraps `ProgressBar`."""

    name = "progress"
    gives = "steps, and what each node took and used"
    needs = (
        Need(_MODULE, "ProgressRegistry.__init__", ("prompt_id", "dynprompt")),
        Need(_MODULE, "ProgressRegistry.register_handler"),
        *(Need(_MODULE, f"ProgressHandler.{event}", ("node_id", "prompt_id")) for event in _EVENTS),
    )

    def put_on(self) -> None:
        """See `Instrument`."""
        module = sys.modules[_MODULE]
        # By bar, the prompt and the node that moved it first.
        self._bars: WeakKeyDictionary[Any, tuple[str, str]] = WeakKeyDictionary()
        self.hears_bars = _BAR.fault() is None
        if self.hears_bars:
            self.wraps.append(Wrap(_BAR, self, before=self._moves))
        self._handler = _handler_of(module.ProgressHandler, self)
        self.wraps.append(Wrap(self.needs[0], self, after=self._made))

    def fault(self) -> str | None:
        """A registry that nobody else sees tells our handler of a node."""
        registry = sys.modules[_MODULE].ProgressRegistry("sigmascope", None)
        handler = registry.handlers.get(_NAME)
        if handler is not self._handler:
            return "a new ProgressRegistry does not have our handler"
        return super().fault()

    def _moves(self, call: Call) -> None:
        prompt, node_id = self.here()
        bar, value, total = call.arguments[0], call.get("value"), call.get("total")
        maximum = bar.total if total is None else total
        if prompt is None or not (_is_place(value) and _is_place(maximum)):
            return
        if node_id is not None:
            self._bars[bar] = prompt.prompt_id, node_id
        elif bar in self._bars:  # a thread of its own moves it, maybe when its node has long ended
            prompt_id, node_id = self._bars[bar]
            if prompt_id != prompt.prompt_id:
                return
        elif (node := prompt.node(None)) is not None:
            self._bars[bar] = prompt.prompt_id, node.id
        named = getattr(bar, "node_id", None)
        prompt.ticked(prompt.node(node_id) if named is None else prompt.nodes.get(named), value, maximum)

    def _made(self, call: Call, _known: None, _result: object, error: BaseException | None) -> None:
        if error is None:
            registry = call.get("self")
            registry.register_handler(self._handler)
            if (prompt := self.session.prompt_of(registry.prompt_id)) is not None:
                prompt.dynprompt = registry.dynprompt


def _is_place(value: object) -> bool:
    """Whether a bar can stand there."""
    return isinstance(value, Real) and math.isfinite(value)


def _handler_of(kind: Any, instrument: Progress) -> Any:
    """A handler of ComfyUI's class that tells the session, and raises nothing."""
    session = instrument.session

    class Handler(kind):  # type: ignore[misc]
        """Tells of nodes and steps."""

        def __init__(self) -> None:
            super().__init__(_NAME)

        def start_handler(self, node_id: str, state: object, prompt_id: str) -> None:
            """A node starts."""
            guarded(prompt_id, lambda prompt: prompt.started(node_id))

        def update_handler(
            self,
            node_id: str,
            value: int | float,
            max_value: int | float,
            state: object,
            prompt_id: str,
            *_: object,
            **__: object,
        ) -> None:
            """A node's bar moves."""
            if not instrument.hears_bars:
                guarded(prompt_id, lambda prompt: prompt.ticked(prompt.nodes.get(node_id), value, max_value))

        def finish_handler(self, node_id: str, state: object, prompt_id: str) -> None:
            """A node ends well; told of cached nodes too, which never started."""
            guarded(prompt_id, lambda prompt: prompt.ended(node_id))

    def guarded(prompt_id: str, act: Callable[[PromptRecording], None]) -> None:
        if not instrument.works:
            return
        began = time.perf_counter_ns()
        try:
            # A node that runs a prompt of its own leaves its registry in the place of the outer prompt's.
            prompt = session.prompt_of(prompt_id) or session.prompt
            if prompt is not None:
                act(prompt)
        except Exception as failure:  # noqa: BLE001 - whatever ours raises must not reach the host
            instrument.failed(failure)
        instrument.took(time.perf_counter_ns() - began)

    return Handler()


INSTRUMENT = Progress
