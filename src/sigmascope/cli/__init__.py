"""The command line: a module for each command or two of one subject, which parses, calls and renders.

A command's module is imported when the command is named, and all of them for the help that lists them, so that
`sigmascope lora extract` waits for what extracts alone.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from typer.core import TyperGroup
from typer.main import get_group


def main() -> None:
    """Run `sigmascope` with the arguments of this process (the console script's entry point)."""
    from sigmascope.cli.root import run

    run()


def commands_on_demand(modules: Mapping[str, str]) -> type[TyperGroup]:
    """The class of a group whose commands are imported when they are asked for.

    Args:
        modules: By the command's name, the module whose `app` has the command.
    """

    class Group(TyperGroup):
        """The commands of the modules, and then those that are there already."""

        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.commands: Any = _Commands(modules, self.commands)

        def list_commands(self, ctx: Any) -> list[str]:
            """Their names; nothing is imported for them."""
            return list(self.commands)

    return Group


class _Commands(Mapping[str, Any]):
    def __init__(self, modules: Mapping[str, str], imported: Mapping[str, Any]) -> None:
        self._modules, self._imported = modules, imported

    def __getitem__(self, name: str) -> Any:
        if name in self._modules:
            return get_group(import_module(self._modules[name]).app).commands[name]
        return self._imported[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._modules, *self._imported)))

    def __len__(self) -> int:
        return len({*self._modules, *self._imported})
