"""The instruments that watch ComfyUI: one table, and how each is put on, tried out and taken off by itself.

An instrument is a class in a file of its own, called `INSTRUMENT` there, and a line in `_FILES`. Where the host is not as
it knows it, it stays off and says why; where it fails later, it takes itself off. Neither reaches a prompt.
"""

import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, ClassVar, Final, Literal, Protocol, TypedDict, runtime_checkable

from sigmascope.integrations.comfyui.needs import Need
from sigmascope.integrations.comfyui.recording import NodeWatch, PromptRecording
from sigmascope.integrations.comfyui.wraps import Wrap
from sigmascope.probes.reading import describe

_log = logging.getLogger("sigmascope")
_FILES: Final = (
    "prompts",
    "queueing",
    "progress",
    "execution",
    "values",
    "files",
    "loading",
    "tiles",
    "latents",
    "conditionings",
    "lora",
    "hook_lora",
    "encodings",
)
"""Modules of this folder, in the order in which their instruments are put on."""
State = Literal["on", "off"]


class InstrumentStatus(TypedDict):
    """What `status` says of an instrument."""

    name: str
    gives: str
    state: State
    reason: str | None


@runtime_checkable
class Watched(Protocol):
    """What instruments ask of the session that they belong to, and tell it."""

    @property
    def prompt(self) -> PromptRecording | None:
        """The prompt that runs; of several, the one that began last."""

    def prompt_of(self, prompt_id: object) -> PromptRecording | None:
        """The prompt of this id, if it runs."""

    def begin(self, prompt_id: str, graph: Any) -> None:
        """A prompt begins."""

    def end(self, prompt_id: str, messages: Iterable[Any], error: BaseException | None) -> None:
        """A prompt is over."""

    def finish(self) -> None:
        """Make the records of the prompts that are over."""

    def abandon(self) -> None:
        """The prompts that run are not recorded to their ends."""


class Instrument:
    """Something that watches ComfyUI by a few of its functions.

    Attributes:
        name: What it is called.
        gives: Which figures are missing without it.
        needs: Functions of ComfyUI that it wraps or relies on.
        works: Whether it is on and has not failed.
        reason: Why it is off.
        calls: How often code of ours ran for it.
        nanoseconds: What that took.
    """

    name: ClassVar[str]
    gives: ClassVar[str]
    needs: ClassVar[tuple[Need, ...]]

    def __init__(self, session: Watched) -> None:
        self.session = session
        self.works = False
        self.reason: str | None = "it was not put on"
        self.calls = 0
        self.nanoseconds = 0
        self.wraps: list[Wrap] = []

    def misfit(self) -> str | None:
        """Why the host is not as this knows it; None: it is. Nothing is changed."""
        return next((fault for need in self.needs if (fault := need.fault()) is not None), None)

    def put_on(self) -> None:
        """Begin to watch."""
        raise NotImplementedError

    def fault(self) -> str | None:
        """Why it does not work now that it is on; None: it does."""
        off = [wrap.name for wrap in self.wraps if not wrap.is_on]
        return f"{', '.join(off)} was not wrapped" if off else None

    def start(self) -> None:
        """Put it on if it fits, and try it out. Raises nothing."""
        try:
            reason = self.misfit()
            if reason is None:
                self.works, self.reason = True, None
                self.put_on()
                reason = self.fault()
        except Exception as failure:  # noqa: BLE001 - whatever an instrument raises must not reach the host
            reason = describe(failure)
        if reason is not None:
            self._stay_off(reason)

    def stop(self, reason: str | None = "it was taken off") -> None:
        """Take it off. Raises nothing."""
        self.works, self.reason = False, reason
        while self.wraps:
            self.wraps.pop().take_off()

    def at_the_beginning(self) -> None:
        """Put on what ComfyUI did not have yet when the rest was. On the host's thread, before each prompt."""

    def at_the_end(self, prompt: PromptRecording) -> None:
        """Say of a prompt, which is over, what is only known now. On the host's thread."""

    def attempt(self, act: Callable[[], None]) -> None:
        """Do something of its own, if it is on; where that fails, it takes itself off."""
        if self.works:
            began = time.perf_counter_ns()
            try:
                act()
            except Exception as failure:  # noqa: BLE001 - whatever an instrument raises must not reach the host
                self.failed(failure)
            self.took(time.perf_counter_ns() - began)

    def node_here(self) -> NodeWatch | None:
        """The node that runs in this context; where ComfyUI does not say, the one that started last."""
        prompt, node_id = self.here()
        return None if prompt is None else prompt.node(node_id)

    def prompt_here(self) -> PromptRecording | None:
        """The prompt that runs in this context; where ComfyUI does not say, the one that began last."""
        return self.here()[0]

    def here(self) -> tuple[PromptRecording | None, str | None]:
        """The prompt and the id of the node that run in this context; where ComfyUI does not say, the last prompt and None."""
        utils = sys.modules.get("comfy_execution.utils")
        context = None if utils is None else utils.get_executing_context()
        if context is None:
            return self.session.prompt, None
        return self.session.prompt_of(context.prompt_id), context.node_id

    def took(self, nanoseconds: int) -> None:
        """Know what a call of ours took."""
        self.calls += 1
        self.nanoseconds += nanoseconds

    def failed(self, failure: Exception) -> None:
        """Take it off, for good."""
        self._stay_off(describe(failure))

    def _stay_off(self, reason: str) -> None:
        if self.reason is None or not self.wraps:
            _log.warning("sigmascope: %s is off (%s); missing: %s", self.name, reason, self.gives)
        self.stop(reason)

    def status(self) -> InstrumentStatus:
        """Its state, for people."""
        return {
            "name": self.name,
            "gives": self.gives,
            "state": "on" if self.works else "off",
            "reason": self.reason,
        }


def weakly(thing: Any) -> Callable[[], Any] | None:
    """What gives a thing for as long as the host has it; None: it is nothing, or no object such as a model is one."""
    if thing is None:
        return None
    try:
        return weakref.ref(thing)
    except TypeError:  # a text, a number, a list: a node may call anything its "model"
        return None


def kinds() -> list[type[Instrument]]:
    """The classes of all instruments. One whose file cannot be imported is left out, with a line in the log."""
    found: list[type[Instrument]] = []
    for name in _FILES:
        try:
            found.append(import_module(f"{__package__}.{name}").INSTRUMENT)
        except Exception as failure:  # noqa: BLE001 - one broken file takes none of the others with it
            _log.warning("sigmascope: %s is off (%s)", name, describe(failure))
    return found
