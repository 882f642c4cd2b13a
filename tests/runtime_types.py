"""Checks the package's annotations at run time, in every test.

beartype checks each call. Some modules need jaxtyping around it, which takes many times as long: those that write
shapes, as it holds the axes of one call against each other; those that name types which they import for the type checker
alone, and those that wrap functions of others, whose annotations are not ours: beartype by itself would refuse calls of
either; and those with coroutine functions, which it makes into functions that are none.
"""

import importlib.util
from pathlib import Path
from typing import Final

from beartype import BeartypeConf
from beartype.claw import beartype_package
from jaxtyping import install_import_hook

PACKAGE: Final = "sigmascope"
_SIGNS: Final = ("from jaxtyping import", "if TYPE_CHECKING:", "wraps(", "async def")


def check_annotations() -> None:
    """Check all modules of the package that are imported from now on."""
    beartype_package(PACKAGE, conf=BeartypeConf(claw_is_pep526=False))
    install_import_hook(modules_for_jaxtyping(), "beartype.beartype")


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
