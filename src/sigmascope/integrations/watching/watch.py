"""`watch`: one line that makes a record of what any pipeline does, and changes nothing of it."""

import inspect
import logging
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

from sigmascope.errors import ConfigError
from sigmascope.integrations.watching.calls import Calls
from sigmascope.integrations.watching.denoisers import Denoisers
from sigmascope.integrations.watching.everywhere import Everywhere
from sigmascope.integrations.watching.instrument import Instrument
from sigmascope.integrations.watching.loading import Loading
from sigmascope.integrations.watching.loras import Loras
from sigmascope.integrations.watching.schedulers import Schedulers
from sigmascope.integrations.watching.session import Choices, Session
from sigmascope.integrations.watching.text import TextEncoding
from sigmascope.integrations.watching.transfers import Transfers
from sigmascope.integrations.watching.vae import VaeCalls
from sigmascope.monitor.decorated import decorated
from sigmascope.monitor.guard import describe
from sigmascope.records.prompts import PromptPrivacy, check_privacy
from sigmascope.records.run import Run

_log = logging.getLogger(__name__)

INSTRUMENTS: Final[tuple[type[Instrument], ...]] = (
    Calls,
    Loading,
    Loras,
    TextEncoding,
    VaeCalls,
    Schedulers,
    Denoisers,
    Transfers,
    Everywhere,
)


class Watch:
    """A watch, entered with `with` or put over a function as a decorator.

    Once its block is left it has the attributes of the `Run` that was recorded: `stages`, `findings`, `save(path)`, ….
    Before that, those of the run as it is now. Entered again, it records another run.

    Args:
        pipelines: Those to watch; none: every pipeline of the process.
        choices: The caller's.
        on_run: Called with each run when it is over.
    """

    def __init__(
        self, pipelines: tuple[object, ...], choices: Choices, on_run: Callable[[Run], object] | None = None
    ) -> None:
        self._pipelines = pipelines
        self._choices = choices
        self._on_run = on_run
        self._sessions: list[Session] = []
        self._record: Run | None = None
        self._process_id = os.getpid()

    def record(self) -> Run:
        """The run of the block that is open, as it is now, or of the one that was left last.

        Raises:
            AttributeError: The watch was never entered, or could not begin.
        """
        if self._sessions:
            return self._sessions[-1].record()
        if self._record is None:
            raise AttributeError("nothing has been recorded: enter the watch with `with`")
        return self._record

    def __enter__(self) -> "Watch":
        self._process_id = os.getpid()
        try:
            session = Session(self._pipelines, self._choices, INSTRUMENTS)
            self._sessions.append(session)
            session.open()
        except Exception as failure:  # noqa: BLE001 - the host goes on without a record
            _log.warning("The watch could not begin: %s", describe(failure))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._sessions:
            return
        session = self._sessions.pop()
        try:
            session.close(error)
            self._record = session.record()
            # A child that was forked in the block leaves it too, and must not write what its parent writes.
            if self._on_run is not None and os.getpid() == self._process_id:
                self._on_run(self._record)
        except Exception as failure:  # noqa: BLE001 - as above
            _log.warning("The watch could not end as it should: %s", describe(failure))

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with a watch of its own around each call."""
        return decorated(function, self._another)

    def _another(self) -> "Watch":
        """A watch for one call, whose run this one keeps when it is over."""
        return Watch(self._pipelines, self._choices, self._keep)

    def _keep(self, run: Run) -> None:
        self._record = run
        if self._on_run is not None:
            self._on_run(run)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.record(), name)

    def __dir__(self) -> list[str]:
        known = set(super().__dir__())
        return sorted(known | set(dir(Run)))


def watch(
    *pipelines: Any,
    prompts: PromptPrivacy = "full",
    name: str | None = None,
    sample_hz: float | None = 10.0,
    step_memory: bool = False,
    on_run: Callable[[Run], object] | None = None,
) -> Watch:
    """Watch pipelines while a block or a function runs, without changing them or what they give.

        with sigmascope.watch(pipe) as run:
            image = pipe("a red fox").images[0]
        run.save("fox.json")

    Every call of a pipeline becomes a stage `generation`, and what happens in it the stages of SPEC section 2. Whatever
    of the watching fails is switched off, with a line in the log and the reason under `unavailable`.

    Args:
        *pipelines: Diffusers pipelines, modular pipelines, or denoisers alone; none: every pipeline of the process.
        prompts: What is kept of prompts: "full" their text, "hash" their SHA-256, "none" nothing.
        name: What the run is called; None: the class of the pipeline.
        sample_hz: How often a thread looks at memory, at most 10 a second; None: never.
        step_memory: Whether the process's resident bytes are read at the end of each step too, to find what grows from
            step to step. A step then costs half as much again, or more.
        on_run: Called with the run when the block is left; not in a child that was forked inside of it.

    Returns:
        A context manager and decorator that gives the run's attributes.

    Raises:
        ConfigError: `prompts` is none of the three, or a function was given.
    """
    check_privacy(prompts)
    for one in pipelines:
        if inspect.isfunction(one):
            raise ConfigError(
                f"{one.__name__} is a function and no pipeline.",
                hint="Write @sigmascope.watch() with parentheses.",
            )
    choices = Choices(prompts, name, sample_hz, step_memory)
    return Watch(tuple(one for one in pipelines if one is not None), choices, on_run)
