"""What an instrument needs of ComfyUI: functions with certain parameters. Looked for in a running process, or in its source.

`sigmascope comfyui status` reads the source alone, so that it can say what fits a version without starting it. In a
process, another pack may have put a function of its own there that takes anything and passes it on: of that the source
says what it takes.
"""

import ast
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

_ANYTHING: Final = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


class Signature(NamedTuple):
    """What a function takes, in its order, and whether it must be awaited."""

    parameters: tuple[str, ...]
    is_asynchronous: bool


class Need(NamedTuple):
    """A function or method of the host.

    Attributes:
        module: Where it is, such as "comfy.utils".
        name: The function's, with its class: "load_torch_file", "PromptExecutor.execute_async".
        parameters: Names that it must have.
        asynchronous: Whether it must be awaited; None: either.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    asynchronous: bool | None = None

    @property
    def where(self) -> str:
        """Such as "execution.PromptExecutor.execute_async"."""
        return f"{self.module}.{self.name}"

    def owner(self) -> Any:
        """The module or class that holds it in this process; None: it is not there."""
        found: Any = sys.modules.get(self.module)
        for part in self.name.split(".")[:-1]:
            found = getattr(found, part, None)
        return found

    @property
    def own_name(self) -> str:
        """Its name in its owner."""
        return self.name.rpartition(".")[2]

    def fault(self) -> str | None:
        """Why this process does not have it so; None: it does."""
        owner = self.owner()
        found = None if owner is None else vars(owner).get(self.own_name)
        return self._fault(self.signature_of(found)) if callable(found) else f"there is no {self.where}"

    def signature_of(self, found: Any) -> Signature:
        """What the function takes that stands in its place.

        Raises:
            ValueError: It does not say so.
        """
        parameters = inspect.signature(found).parameters
        if {parameter.kind for parameter in parameters.values()} >= _ANYTHING:
            file = getattr(sys.modules.get(self.module), "__file__", None)
            known = None if file is None else self._in_source(Path(file))
            if isinstance(known, Signature):
                return known
        functions = (found, inspect.unwrap(found))
        return Signature(tuple(parameters), any(map(inspect.iscoroutinefunction, functions)))

    def fault_in(self, folder: Path) -> str | None:
        """Why the source in a folder does not have it so; None: it does.

        Args:
            folder: ComfyUI's, with `main.py`.
        """
        known = self._in_source(folder.joinpath(*self.module.split(".")).with_suffix(".py"))
        return self._fault(known) if isinstance(known, Signature) else known

    def _in_source(self, path: Path) -> Signature | str:
        """What it takes by the source of its module, or why it is not there."""
        try:
            body: Sequence[ast.stmt] = ast.parse(path.read_bytes()).body
        except (OSError, SyntaxError, ValueError) as error:
            return f"{path.name} cannot be read ({type(error).__name__})"
        *classes, name = self.name.split(".")
        for part in classes:
            body = next(
                (item.body for item in body if isinstance(item, ast.ClassDef) and item.name == part), ()
            )
        for item in body:
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and item.name == name:
                words = item.args
                known = tuple(word.arg for word in (*words.posonlyargs, *words.args, *words.kwonlyargs))
                return Signature(known, isinstance(item, ast.AsyncFunctionDef))
        return f"there is no {self.where}"

    def _fault(self, known: Signature) -> str | None:
        missing = [parameter for parameter in self.parameters if parameter not in known.parameters]
        if missing:
            return f"{self.where} has no parameter {', '.join(missing)}"
        if self.asynchronous is not None and known.is_asynchronous is not self.asynchronous:
            return f"{self.where} is {'not ' if self.asynchronous else ''}asynchronous"
        return None


def output_data(*parameters: str) -> Need:
    """ComfyUI's function that runs a node and gives its outputs, with these parameters beside the node's ids."""
    return Need("execution", "get_output_data", ("prompt_id", "unique_id", *parameters), True)
