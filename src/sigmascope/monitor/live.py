"""What a watched program holds in its hands: `with recorder.stage(...) as stage`, `with recorder.step()`."""

from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch import Tensor

from sigmascope.monitor.gpu_timing import Mark
from sigmascope.monitor.instruments import Clock
from sigmascope.monitor.json_values import as_json
from sigmascope.monitor.scope import Scope, StepListener
from sigmascope.probes import module_facts, tensor_facts
from sigmascope.records.run import Stage

if TYPE_CHECKING:
    from sigmascope.monitor.recorder import Recorder


class Frame:
    """A place in a context's chain of open scopes. `scope` is the recorder's own outside all stages."""

    __slots__ = ("is_open", "outer", "recorder", "scope")

    def __init__(self, recorder: "Recorder", scope: Scope, outer: "Frame | None") -> None:
        self.recorder = recorder
        self.scope = scope
        self.outer = outer
        self.is_open = True

    @property
    def is_stage(self) -> bool:
        """Whether it is a stage, and not a recorder's own place outside all stages."""
        return self.scope.was_opened


CURRENT: ContextVar[Frame | None] = ContextVar("sigmascope_current", default=None)
"""The innermost scope of this thread's or task's context. A task starts with its creator's."""


def push(frame: Frame) -> None:
    """Make the frame current in this context."""
    CURRENT.set(frame)


def pop(frame: Frame) -> None:
    """Close the frame, and leave all closed frames of this context.

    Scopes need not close in the reverse order of their opening, nor in the context that opened them.
    """
    frame.is_open = False
    current = CURRENT.get()
    while current is not None and not current.is_open:
        current = current.outer
    CURRENT.set(current)


def step_listener_here(clock: Clock) -> StepListener | None:
    """Return who listens to the steps of the stage that is open here, be it another recorder's with the same clock."""
    frame = CURRENT.get()
    while frame is not None and not (frame.is_open and frame.is_stage and frame.recorder.clock is clock):
        frame = frame.outer
    return None if frame is None else frame.scope.step_listener


class LiveStage:
    """A stage to be entered with `with`. Entered again, it is a new stage of the same name.

    What it is told goes to the stage that was entered last, also after its end: facts that take time to
    read are best told then, when the stage's clock has stopped. Threads need an object each.
    """

    __slots__ = ("_entered", "_recorder", "_scope")

    def __init__(self, recorder: "Recorder", name: str) -> None:
        self._recorder = recorder
        self._scope = recorder.new_scope(name)
        self._entered: list[Frame] = []

    def __enter__(self) -> "LiveStage":
        recorder = self._recorder
        if self._scope.was_opened:
            self._scope = recorder.new_scope(self._scope.name)
        self._entered.append(recorder.open_stage(self._scope))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._entered:
            self._recorder.close_stage(self._entered.pop(), error)
        if self._entered:
            self._scope = self._entered[-1].scope

    def tensor(self, name: str, tensor: Tensor, *, statistics: bool | None = None) -> None:
        """Note facts about a tensor. The tensor is not kept.

        Args:
            name: What to call it in `Stage.tensors`.
            tensor: Any tensor, of any shape.
            statistics: True also for an accelerator's tensor, which waits for it; None: for CPU tensors
                only; False: none.
        """
        self._note("tensors", name, lambda: tensor_facts(tensor, statistics=statistics))

    def module(self, name: str, module: object) -> None:
        """Note facts about a model: an `nn.Module` or what wraps one. The model is not kept."""
        self._note("modules", name, lambda: module_facts(module))

    def fact(self, name: str, value: object) -> None:
        """Note anything else that is known; it is turned into a JSON value at once (see `as_json`)."""
        self._note("facts", name, lambda: as_json(value))

    def on_step(self, listener: StepListener) -> None:
        """Call the listener at the end of each step of this stage, and of stages that are opened in it from now on.

        Args:
            listener: Fast, and raises nothing.
        """
        self._scope.step_listener = listener

    def record(self) -> Stage:
        """Return what is known of the stage that was entered last, on a clock that begins with it."""
        return self._scope.freeze(self._scope.started_ns)

    def _note(self, what: Literal["tensors", "modules", "facts"], name: str, read: Callable[[], Any]) -> None:
        scope = self._scope
        facts, reason = scope.instruments.guard.read(what, read)
        if reason is None:
            getattr(scope, what)[name] = facts
        else:
            scope.unavailable[f"{what}.{name}"] = reason


Entered: TypeAlias = "tuple[int, Scope, Mark | None, Entered | None]"


class Step:
    """A step of the innermost open stage, to be entered with `with`, as often as one likes.

    Every entry is one step, also one inside another. Threads need an object each. `last` is when the
    step that was left last began and ended, in nanoseconds of the recorder's clock; None: none was open.
    """

    __slots__ = ("_entered", "_recorder", "last")

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder
        # started, scope, mark at the start, and what was entered before: a chain, for re-entry
        self._entered: Entered | None = None
        self.last: tuple[int, int] | None = None

    def __enter__(self) -> "Step":
        recorder = self._recorder
        scope = recorder.current_scope()
        try:
            mark = None if scope.columns.timings is None else scope.instruments.mark()
            self._entered = (recorder.clock(), scope, mark, self._entered)
        except Exception as failure:  # noqa: BLE001 - a monitor's failure must not reach the host
            scope.instruments.guard.switch_off("steps", failure)
        return self

    def drop(self) -> None:
        """Let no step have been entered: what is open is counted nowhere."""
        self._entered = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended_ns = self._recorder.clock()
        if self._entered is None:
            self.last = None
            return
        started_ns, scope, mark, self._entered = self._entered
        self.last = (started_ns, ended_ns)
        try:
            scope.add_step(started_ns, ended_ns, mark)
        except Exception as failure:  # noqa: BLE001 - as above
            scope.instruments.guard.switch_off("steps", failure)
