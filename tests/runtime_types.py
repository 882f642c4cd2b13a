"""Checks the package's annotations at run time, in every test.

beartype checks each call. Some modules need jaxtyping around it, which takes many times as long: those that write
shapes, as it holds the axes of one call against each other, and those that name types which they import for the type
checker alone, as strings, though of either only the functions whose annotations have a shape or a string; those that
wrap functions of others, whose annotations are not ours: beartype by itself would refuse calls of these; and those with
coroutine functions, which it makes into functions that are none.

A function inside a function is defined anew in each call, and each time jaxtyping writes and compiles two more for its
checks: a watch with hundreds of generations would do nothing else. The first few of each are checked, the others not.
"""

import importlib.util
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Final, ForwardRef, get_args

import jaxtyping
from beartype import BeartypeConf, beartype
from beartype.claw import beartype_package
from jaxtyping import AbstractArray, install_import_hook

PACKAGE: Final = "sigmascope"
MOST_CHECKED: Final = 4
"""Of the functions that one `def` makes."""
_IN_PART: Final = ("from jaxtyping import", "if TYPE_CHECKING:")
"""Signs of modules that need jaxtyping around some functions."""
_WHOLE: Final = ("wraps(", "async def")
"""Signs of modules that need it around every function."""


def check_annotations() -> None:
    """Check all modules of the package that are imported from now on."""
    beartype_package(PACKAGE, conf=BeartypeConf(claw_is_pep526=False))
    install_import_hook(modules_for_jaxtyping(), "beartype.beartype")
    checked = _only_shapes(jaxtyping.jaxtyped, frozenset(_modules_with(_WHOLE)))
    jaxtyping.jaxtyped = only_the_first_of_each(checked)  # type: ignore[assignment]


def modules_for_jaxtyping() -> list[str]:
    """Names of the modules that need it; none of the package is imported to find them."""
    return _modules_with((*_IN_PART, *_WHOLE))


def only_the_first_of_each(jaxtyped: Any) -> Callable[..., Callable[[Any], Any]]:
    """The decorator that jaxtyping writes above each function, for the first functions of each `def` alone."""
    made: Counter[CodeType] = Counter()

    def of_typechecker(*, typechecker: Any) -> Callable[[Any], Any]:
        def checked(part: Any) -> Any:
            code = getattr(part, "__code__", None)  # classes have none
            if code is not None:
                made[code] += 1
                if made[code] > MOST_CHECKED:
                    return part
            return jaxtyped(part, typechecker=typechecker)

        return checked

    return of_typechecker


def _only_shapes(jaxtyped: Any, whole: frozenset[str]) -> Any:
    """jaxtyping's check of a function or class, with beartype alone where a function names no shape and no string."""

    def check(target: Any, *, typechecker: Any) -> Any:
        plain = isinstance(target, FunctionType) and target.__module__ not in whole
        if plain and not _has_shape(target.__annotations__.values()):
            return beartype(target)
        return jaxtyped(target, typechecker=typechecker)

    return check


def _has_shape(annotations: Iterable[Any]) -> bool:
    """Whether one of them is or holds a shape; one that is still a string may, or name what is not there."""
    return any(
        isinstance(annotation, str | ForwardRef)
        or (isinstance(annotation, type) and issubclass(annotation, AbstractArray))
        or _has_shape(annotation if isinstance(annotation, list) else get_args(annotation))
        for annotation in annotations
    )


def _modules_with(signs: tuple[str, ...]) -> list[str]:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin)
    return sorted(
        ".".join((PACKAGE, *path.relative_to(package.parent).with_suffix("").parts))
        for path in package.parent.rglob("*.py")
        if path.name != "__init__.py"  # its name would stand for all that lies below it
        and any(sign in path.read_text(encoding="utf-8") for sign in signs)
    )
