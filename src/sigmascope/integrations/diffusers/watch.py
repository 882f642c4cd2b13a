"""`watch`: one line that makes a record of what any pipeline does, and changes nothing about it.

`OBSERVERS` are what it puts on pipelines. `PipelineClassObserver` is for a watch that names no pipeline: it knows the
classes of pipelines that are loaded, and hears of those that come.
"""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import PurePath
from types import FunctionType, TracebackType
from typing import Any, ClassVar, Final

from torch import Tensor

from sigmascope.errors import ConfigError
from sigmascope.history.keeper import keep
from sigmascope.history.live import LiveRun, announce, withdraw
from sigmascope.integrations.autostart import say
from sigmascope.integrations.diffusers.components import (
    LoadingObserver,
    LoraObserver,
    TextEncodingObserver,
    TransferObserver,
    VaeObserver,
)
from sigmascope.integrations.diffusers.own_loops import OwnLoopObserver
from sigmascope.integrations.diffusers.pipeline_call import CallObserver, DenoiserObserver, SchedulerObserver
from sigmascope.integrations.diffusers.watch_session import Observer, Session, WatchOptions
from sigmascope.monitor.guard import log_quietly, to_the_end, whole_number
from sigmascope.monitor.hooks import After, Arguments, Keywords
from sigmascope.probes.model_fingerprints import forget_fingerprints
from sigmascope.probes.reading import attempt, describe
from sigmascope.records.prompts import PromptPrivacy, privacy_of
from sigmascope.records.run import IMPORTS, KEEP_GENERATIONS, RUNS_BEFORE, Run, short_repr

_log = logging.getLogger(__name__)
_BASES: Final = (
    ("diffusers.pipelines.pipeline_utils", "DiffusionPipeline", "register_modules"),
    ("diffusers.modular_pipelines.modular_pipeline", "ModularPipeline", "register_components"),
)
"""The bases of all pipelines, and what each calls when a pipeline is made."""


_TOLD: Final[dict[Any, Any]] = {}
"""Watches that were never entered and have been reported, as Python's `warnings` keeps it."""
_NEVER_ENTERED: Final = "sigmascope.watch(...) alone records nothing. Write: with sigmascope.watch(pipe) as run: ..., or @sigmascope.watch()."


class _Watched:
    """How many runs this process has watched."""

    count = 0


_watched: Final = _Watched()


class Watch:
    """A watch, entered with `with` or used as a decorator.

    After its block it has the attributes of the recorded `Run`: `stages`, `findings`, `save(path)` and so on. Inside the
    block it has those of the run so far. Entered again, it records another run.

    Args:
        pipelines: The pipelines to watch; if empty, every pipeline of the process.
        options: The caller's options.
        on_run: Called with each finished run.
        keep_run: Whether finished runs go to the store.
    """

    def __init__(
        self,
        pipelines: tuple[object, ...],
        options: WatchOptions,
        on_run: Callable[[Run], object] | None = None,
        *,
        keep_run: bool = False,
    ) -> None:
        self._pipelines = pipelines
        self._choices = options
        self._on_run = on_run
        self._keep_run = keep_run
        self._sessions: list[Session] = []
        self._record: Run | None = None
        self._process_id = os.getpid()
        self._is_used = False
        caller = sys._getframe()
        while caller.f_back is not None and caller.f_globals.get("__name__") == __name__:
            caller = caller.f_back
        self._made_at = caller.f_code.co_filename, caller.f_lineno

    def __del__(self) -> None:
        """Say that a watch which nobody entered recorded nothing, where it was made."""
        if not getattr(self, "_is_used", True):
            with suppress(Exception):  # at the end of the process modules may be gone
                warnings.warn_explicit(_NEVER_ENTERED, UserWarning, *self._made_at, registry=_TOLD)

    def __repr__(self) -> str:
        """What a notebook or prompt shows: a watch that nobody entered says how it is written."""
        return super().__repr__() if self._is_used else f"<Watch: {_NEVER_ENTERED}>"

    def record(self) -> Run:
        """The run of the open block so far, or else of the last block.

        Raises:
            AttributeError: The watch was never entered, or could not begin.
        """
        if self._sessions:
            return self._sessions[-1].record()
        if self._record is None:
            raise AttributeError("nothing has been recorded: enter the watch with `with`")
        return self._record

    def progress(self) -> LiveRun | None:
        """How far the run of the open block is; None: no block is open, or nothing in it."""
        return self._sessions[-1].recorder.progress() if self._sessions else None

    def hold_back(self, spare: int) -> None:
        """Keep this many more generations in full, until `take_older` takes them."""
        for session in self._sessions:
            session.recorder.spare = spare

    def take_older(self, least: int = 1) -> Run | None:
        """Fold the generations before those to keep and return them as a run; None if there are fewer than `least`."""
        return self._sessions[-1].recorder.take_older(least) if self._sessions else None

    def begin_at(self, moment_ns: int) -> None:
        """Let the record begin earlier, at this moment of `time.perf_counter_ns`."""
        for session in self._sessions:
            session.recorder.begin_at(moment_ns)

    def has_stages(self) -> bool:
        """Whether a stage has been opened; True too if none can be, because the watch failed to begin."""
        return not self._sessions or self._sessions[-1].recorder.first_stage_ns is not None

    def note_imports(self, seconds_before: Callable[[int], dict[str, float]]) -> None:
        """Record how long imports took before the first stage, by package."""
        for session in self._sessions:
            first_ns = session.recorder.first_stage_ns
            if first_ns is not None:
                session.recorder.fact(IMPORTS, seconds_before(first_ns))

    def __enter__(self) -> "Watch":
        self._is_used = True
        self._process_id = os.getpid()
        session: Session | None = None
        try:
            forget_fingerprints()
            session = Session(self._pipelines, self._choices, OBSERVERS)
            self._sessions.append(session)
            session.open()
            if self._keep_run:
                session.live = announce(session.recorder.progress)
        except Exception as failure:  # noqa: BLE001 - the host goes on without a record
            log_quietly(_log, "The watch could not begin: %s", describe(failure))
        except BaseException as interruption:  # Ctrl-C just now: nobody leaves a block that was not entered
            if session in self._sessions:
                self._sessions.remove(session)
                to_the_end(session.close, interruption)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._sessions:
            to_the_end(partial(self._leave, self._sessions[-1]), error)

    def _leave(self, session: Session, error: BaseException | None) -> None:
        """Leave the block. What Ctrl-C broke off is done by another call."""
        if session not in self._sessions:
            return
        withdraw(session.live)
        session.guard.read("watch.runs", lambda: session.recorder.fact(RUNS_BEFORE, _watched.count))
        try:
            session.close(error)
            self._record = record = session.record()
        except Exception as failure:  # noqa: BLE001 - as above
            self._sessions.remove(session)
            log_quietly(_log, "The watch could not end properly: %s", describe(failure))
            return
        self._sessions.remove(session)
        _watched.count += bool(record.stages)
        # A child that was forked in the block leaves it too, and must not write what its parent writes.
        if os.getpid() != self._process_id:
            return
        if self._keep_run and record.stages:
            keep(record, "watch", say)
        if self._on_run is not None:
            try:
                self._on_run(record)
            except Exception as failure:  # noqa: BLE001 - as above
                log_quietly(_log, "The watch could not end properly: %s", describe(failure))

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with a watch of its own around each call."""
        from sigmascope.monitor.performance import decorated

        self._is_used = True
        # Each call has a watch of its own, whose run this one keeps when it is over.
        return decorated(
            function, lambda: Watch(self._pipelines, self._choices, self._keep, keep_run=self._keep_run)
        )

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
    step_memory: bool = True,
    keep_generations: int | None = KEEP_GENERATIONS,
    thumbnails: bool = False,
    stacks: bool = False,
    on_run: Callable[[Run], object] | None = None,
    keep_run: bool = True,
) -> Watch:
    """Watch pipelines while a block or a function runs, without changing them or what they give.

        with sigmascope.watch(pipe) as run:
            image = pipe("a red fox").images[0]
        run.save("fox.json")

    Every call of a pipeline becomes a stage `generation`, with a stage inside it for each part of the work: text
    encoding, the schedule, denoising, decoding and so on. A part of the watch that fails is switched off, with a line
    in the log and the reason under `unavailable`.

    Args:
        *pipelines: Diffusers pipelines, modular pipelines, or denoisers alone; none: every pipeline of the process.
        prompts: What is kept of prompts: "full" their text, "hash" their SHA-256, "none" nothing.
        name: What the run is called; None: the class of the pipeline.
        sample_hz: How often a thread looks at memory, at most 10 a second; None: never.
        step_memory: Whether the process's resident bytes are read at the end of each step too, to find what grows from
            step to step: 2 µs a step.
        keep_generations: How many of the last generations the record holds in full; of earlier ones it holds sums
            (`Run.folded`). Stages outside generations are kept likewise, by name. None keeps all, in a record that
            grows as long as the watch lasts.
        thumbnails: Whether each generation keeps its first picture, at most 96 pixels wide and high, for reports to show.
        stacks: Whether a thread looks, some twenty times a second, where your own code is while no step runs: between the
            steps, in the rest of stages, outside of them. Reports name function and line.
        on_run: Called with the run when the block is left; not in a child that was forked inside of it.
        keep_run: Whether the run goes to the store of runs, on a thread of its own; `SIGMASCOPE_KEEP=0` keeps none.

    Returns:
        A context manager and decorator that gives the run's attributes.

    Raises:
        ConfigError: `prompts` is not one of the three, `keep_generations` is below 1, or what was given is not a pipeline,
            such as a function, a list or a name.
    """
    privacy_of(prompts)
    if keep_generations is not None:
        whole_number("keep_generations", keep_generations, least=1)
    for pipeline in pipelines:
        refusal = attempt(partial(_refusal_of, pipeline)).value
        if refusal is not None:
            raise refusal
    options = WatchOptions(prompts, name, sample_hz, step_memory, keep_generations, thumbnails, stacks)
    chosen = tuple(pipeline for pipeline in pipelines if pipeline is not None)
    return Watch(chosen, options, on_run, keep_run=keep_run)


_NO_PIPELINES: Final = (
    (FunctionType, "is a function, not a pipeline", "Write @sigmascope.watch() with parentheses."),
    ((list, tuple, set, frozenset), "is a collection, not a pipeline", "Give the pipelines one by one: sigmascope.watch(pipe, other)."),
    (type, "is a class, not a pipeline", "Load it first, and give what was loaded: sigmascope.watch(pipe)."),
    ((str, PurePath), "is a text, not a pipeline", "Load it with from_pretrained, and give what was loaded. To name the record, use name=."),
    ((bool, int, float, bytes, Mapping, Tensor), "is not a pipeline", "Give what from_pretrained loaded: sigmascope.watch(pipe)."),
)  # fmt: skip
"""What people give in place of a pipeline: its kinds, what it is, and what to give."""


def _refusal_of(given: object) -> ConfigError | None:
    """Why it cannot be watched; None: it may be a pipeline."""
    for kinds, what, hint in _NO_PIPELINES:
        if isinstance(given, kinds):
            name = given.__name__ if isinstance(given, FunctionType | type) else short_repr(given)
            return ConfigError(f"{name} {what}.", hint=hint)
    return None


class PipelineClassObserver(Observer):
    """Lets the other observers know the classes of pipelines, where no pipeline was named."""

    name: ClassVar[str] = "everywhere"

    def start(self) -> None:
        """Know all classes that there are, and hear when a pipeline of another is made."""
        if not self.session.is_everywhere:
            return
        for module, base, method in _BASES:
            self.when_loaded(base, module, base, partial(self._know, method))

    def _know(self, makes: str, base: type) -> None:
        """Know a base and its subclasses, and hear the method that it calls when a pipeline is made."""
        for kind in (base, *_subclasses(base)):
            if "__call__" in vars(kind):
                self.session.watch_class(kind)
        self.hook_class(base, makes, self._before)

    def _before(self, pipeline: object, args: Arguments, kwargs: Keywords) -> After | None:
        self.session.watch_class(type(pipeline))
        return None


def _subclasses(kind: type) -> Iterator[type]:
    subclasses: list[type] = kind.__subclasses__()
    for subclass in subclasses:
        yield subclass
        yield from _subclasses(subclass)


OBSERVERS: Final[tuple[type[Observer], ...]] = (
    OwnLoopObserver,  # its generation is around what the others open
    CallObserver,
    LoadingObserver,
    LoraObserver,
    TextEncodingObserver,
    VaeObserver,
    SchedulerObserver,
    DenoiserObserver,
    TransferObserver,
    PipelineClassObserver,
)
