"""Groups of commands, each imported only when it is named; a group's help and completion import none."""

import gc
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from types import FrameType
from typing import Any, Final, NamedTuple

from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from sigmascope.plain_text import printable


@contextmanager
def importing() -> Iterator[None]:
    """Import without the garbage collector, and take what is there out of its later rounds.

    What is imported stays. Looking through PyTorch's objects again and again is a fifth of a short command's time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


@contextmanager
def one_line_if_stopped(*, is_outermost: bool = True) -> Iterator[None]:
    """Print a line for Ctrl-C, which is what the exception says if a command has more to say; it goes on."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if is_outermost and sys.stderr is not None:
            sys.stderr.write(f"{printable(stop) or 'Stopped by Ctrl-C.'}\n")
        raise


@contextmanager
def stopping_after_torch() -> Iterator[None]:
    """Let Ctrl-C end the process at once in the first import of PyTorch or NumPy, and wait in a later one, for ten seconds at most.

    PyTorch's import swallows what is raised in its import of NumPy: of Ctrl-C nothing is left, or an ImportError. If it is
    cut short elsewhere, MKL may end the process with a code of its own. Before the first, a command has begun nothing.
    """
    import signal
    import threading

    is_ours = (
        hasattr(signal, "setitimer")
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        # An alarm is somebody's: `perl -e 'alarm 60; exec @ARGV'` limits a command's time so.
        and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
        and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    )
    if not is_ours:
        yield
        return
    tries = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal tries
        tries += 1
        if not _is_importing(frame, {"numpy", "torch"}) or tries > _MOST_TRIES:
            raise KeyboardInterrupt
        if _is_first_import():
            _end_process()
        signal.setitimer(signal.ITIMER_REAL, _SECONDS_BETWEEN)

    alarm = signal.signal(signal.SIGALRM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, alarm)


_SECONDS_BETWEEN: Final = 0.02
_MOST_TRIES: Final = 500


def _is_first_import() -> bool:
    specs = (getattr(sys.modules.get(name), "__spec__", None) for name in ("numpy", "torch"))
    return any(getattr(spec, "_initializing", False) for spec in specs)


def _end_process() -> None:
    import os

    from sigmascope.errors import STOPPED_BY_USER

    with suppress(KeyboardInterrupt, OSError, ValueError), one_line_if_stopped():
        raise KeyboardInterrupt
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(STOPPED_BY_USER)


def _is_importing(frame: FrameType | None, packages: Collection[str]) -> bool:
    """Whether a module of one of these packages is being executed somewhere below a frame, or what that calls."""
    while frame is not None:
        is_module = frame.f_code.co_name == "<module>"
        if is_module and str(frame.f_globals.get("__name__")).partition(".")[0] in packages:
            return True
        frame = frame.f_back
    return False


class OnDemand(NamedTuple):
    """A command, or a group of them, that is not imported yet."""

    module: str
    """Its `app` has the command, or is the group."""
    summary: str
    """The first sentence of its help."""


def commands_on_demand(commands: Mapping[str, OnDemand], *, imports_torch: bool = False) -> type[TyperGroup]:
    """The class of a group whose help lists commands without importing them.

    Args:
        commands: By name, in the order of the help.
        imports_torch: Whether they import PyTorch and run no code of the user's: Ctrl-C waits for that import.
    """

    class Group(TyperGroup):
        """The commands of the modules."""

        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.commands: Any = _Commands(commands)

        def list_commands(self, ctx: Any) -> list[str]:
            """The commands' names, without importing any."""
            return list(commands)

        def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
            """Read the command line."""
            with one_line_if_stopped(is_outermost=parent is None):
                return super().make_context(info_name, args, parent, **extra)

        def invoke(self, ctx: Any) -> Any:
            """Run the command."""
            waiting = stopping_after_torch() if imports_torch else nullcontext()
            with one_line_if_stopped(is_outermost=ctx.parent is None), waiting:
                return super().invoke(ctx)

        def format_help(self, ctx: Any, formatter: Any) -> None:
            """Write the help, without importing any command."""
            with self._summaries_alone():
                super().format_help(ctx, formatter)

        def shell_complete(self, ctx: Any, incomplete: str) -> Any:
            """Complete an option or a command's name, without importing any."""
            with self._summaries_alone():
                return super().shell_complete(ctx, incomplete)

        @contextmanager
        def _summaries_alone(self) -> Iterator[None]:
            whole = self.commands
            self.commands = {
                name: TyperCommand(name, help=command.summary) for name, command in commands.items()
            }
            try:
                yield
            finally:
                self.commands = whole

    return Group


class _Commands(Mapping[str, Any]):
    def __init__(self, commands: Mapping[str, OnDemand]) -> None:
        self._commands = commands

    def __getitem__(self, name: str) -> Any:
        with importing():
            module = import_module(self._commands[name].module)
        group = get_group(module.app)
        if name in group.commands:
            return group.commands[name]
        group.name = name
        return group

    def __iter__(self) -> Iterator[str]:
        return iter(self._commands)

    def __len__(self) -> int:
        return len(self._commands)
