"""The surfaces: ways to look at runs outside of the terminal. Each is an option of `sigmascope show`.

To add one, write a file with its `SURFACE` and put the file's name into `_FILES`.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Final

from sigmascope.files import atomic_path
from sigmascope.records.prompts import PromptPrivacy
from sigmascope.records.recorded import Recorded, runs_of
from sigmascope.records.run import Run

_FILES: Final = (
    "html",
    "markdown",
    "prometheus",
    "trace",
)


@dataclass(frozen=True, slots=True)
class Surface:
    """One way to look at runs.

    Attributes:
        name: Of its option in `sigmascope show`, without the dashes.
        help: Of that option.
        render: Gives the text of runs, with what a privacy lets it keep of prompts.
        is_file: Whether it is written to a file, which the option names; if not, it is printed.
        noun: What the file is called.
        is_private: Whether only its owner may read the file (mode 0600).
    """

    name: str
    help: str
    render: Callable[[Sequence[Run], PromptPrivacy], str]
    is_file: bool = True
    noun: str = "report"
    is_private: bool = False

    def write(
        self, runs: Recorded | Iterable[Recorded], path: str | os.PathLike[str], prompts: PromptPrivacy
    ) -> None:
        """Write it whole or not at all.

        Raises:
            ConfigError: What is given has no run.
            WriteError: The file cannot be written. What was there before stays.
        """
        text = self.render(runs_of(runs), prompts)
        with atomic_path(path, private=self.is_private) as temporary:
            temporary.write_text(text, encoding="utf-8")


@cache
def surfaces() -> tuple[Surface, ...]:
    """All of them, in the order of `sigmascope show --help`."""
    return tuple(import_module(f"sigmascope.reports.{name}").SURFACE for name in _FILES)
