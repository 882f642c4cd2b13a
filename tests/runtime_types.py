"""Checks the package's annotations at run time, in every test.

beartype checks each call. Some modules need jaxtyping around it, which takes many times as long: those that write
shapes, as it holds the axes of one call against each other; those that name types which they import for the type checker
alone, and those that wrap functions of others, whose annotations are not ours: beartype by itself would refuse calls of
either; and those with coroutine functions, which it makes into functions that are none.

A function inside a function is defined anew in each call, and each time jaxtyping writes and compiles two more for its
checks: a watch with hundreds of generations would do nothing else. The first few of each are checked, the others not.
"""

import importlib.util
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any, Final

import jaxtyping
from beartype import BeartypeConf
from beartype.claw import beartype_package
from jaxtyping import install_import_hook

PACKAGE: Final = "sigmascope"
MOST_CHECKED: Final = 4
"""Of the functions that one `def` makes."""
_SIGNS: Final = ("from jaxtyping import", "if TYPE_CHECKING:", "wraps(", "async def")


def check_annotations() -> None:
    """Check all modules of the package that are imported from now on."""
    beartype_package(PACKAGE, conf=BeartypeConf(claw_is_pep526=False))
    install_import_hook(modules_for_jaxtyping(), "beartype.beartype")
    jaxtyping.jaxtyped = only_the_first_of_each(jaxtyping.jaxtyped)  # type: ignore[assignment]


def modules_for_jaxtyping() -> list[str]:
    """Names of the modules that need it; none of the package is imported to find them."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin)
    return sorted(
        ".".join((PACKAGE, *path.relative_to(package.parent).with_suffix("").parts))
        for path in package.parent.rglob("*.py")
        if path.name != "__init__.py"  # its name would stand for all that lies below it
        and any(sign in path.read_text(encoding="utf-8") for sign in _SIGNS)
    )


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
