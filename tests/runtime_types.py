"""Checks the package's annotations at run time, in every test.

beartype checks each call. Some modules need jaxtyping around it, which takes many times as long: those that write
shapes, as it holds the axes of one call against each other, though only their functions whose annotations have a shape;
those that name types which they import for the type checker alone, and those that wrap functions of others, whose
annotations are not ours: beartype by itself would refuse calls of either; and those with coroutine functions, which it
makes into functions that are none.
"""

import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FunctionType
from typing import Any, Final, get_args

import jaxtyping
from beartype import BeartypeConf, beartype
from beartype.claw import beartype_package
from jaxtyping import AbstractArray, install_import_hook

PACKAGE: Final = "sigmascope"
_SHAPES: Final = "from jaxtyping import"
_WHOLE: Final = ("if TYPE_CHECKING:", "wraps(", "async def")
"""Signs of modules that need jaxtyping around every function."""


def check_annotations() -> None:
    """Check all modules of the package that are imported from now on."""
    beartype_package(PACKAGE, conf=BeartypeConf(claw_is_pep526=False))
    install_import_hook(modules_for_jaxtyping(), "beartype.beartype")
    jaxtyping.jaxtyped = _only_shapes(jaxtyping.jaxtyped, frozenset(_modules_with(_WHOLE)))


def modules_for_jaxtyping() -> list[str]:
    """Names of the modules that need it; none of the package is imported to find them."""
    return _modules_with((_SHAPES, *_WHOLE))


def _only_shapes(jaxtyped: Any, whole: frozenset[str]) -> Any:
    """The decorator that the hook puts before functions, with beartype alone where a function names no shape."""

    def checked(*, typechecker: Any) -> Callable[[Any], Any]:
        def check(target: Any) -> Any:
            plain = isinstance(target, FunctionType) and target.__module__ not in whole
            if plain and not _has_shape(target.__annotations__.values()):
                return beartype(target)
            return jaxtyped(target, typechecker=typechecker)

        return check

    return checked


def _has_shape(annotations: Iterable[Any]) -> bool:
    """Whether one of them is or holds a shape; one that is still a string may."""
    return any(
        isinstance(annotation, str)
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
