"""Groups of commands, each imported only when it is named; a group's help and completion import none."""

import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

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


class OnDemand(NamedTuple):
    """A command, or a group of them, that is not imported yet."""

    module: str
    """Its `app` has the command, or is the group."""
    summary: str
    """The first sentence of its help."""


def commands_on_demand(commands: Mapping[str, OnDemand]) -> type[TyperGroup]:
    """The class of a group whose help lists commands without importing them.

    Args:
        commands: By name, in the order of the help.
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
            with one_line_if_stopped(is_outermost=ctx.parent is None):
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
