"""Checks the package's annotations at run time, in every test.

beartype checks each call. Some modules need jaxtyping around it, which takes many times as long: those that write
shapes, as it holds the axes of one call against each other, and those that name types which they import for the type
checker alone, as strings; those that wrap functions of others, whose annotations are not ours: beartype's own hook,
which comes last, would refuse calls of these, and jaxtyping's comes first; and those with coroutine functions, which
beartype makes into functions that are none. In all of them it goes around the coroutine functions and those whose
annotations have a string, or shapes inside of other types, and beartype checks the others.

A shape that is an annotation by itself needs no more than a room in which the axes of one call are held against each
other, while beartype checks what goes in and what comes out: jaxtyping would bind the arguments to their names for its
messages, and check them a second time after the call.

A function inside a function is defined anew in each call, and each time jaxtyping writes and compiles two more for its
checks: a watch with hundreds of generations would do nothing else. The first few of each are checked, the others not.

beartype takes a third of the time of many tests to do the same. All of these are checked, as one check is written for all
functions that one `def` makes.
"""

import importlib.util
import operator
from collections import Counter
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, is_dataclass
from functools import update_wrapper, wraps
from inspect import iscoroutinefunction
from pathlib import Path
from types import CodeType, FunctionType, NoneType, UnionType
from typing import Any, Final, ForwardRef, get_args

import jaxtyping
from beartype import BeartypeConf, beartype
from beartype.claw import beartype_package
from beartype.claw._ast import _clawaststar
from jaxtyping import AbstractArray, install_import_hook

PACKAGE: Final = "sigmascope"
MOST_CHECKED: Final = 4
"""Of the functions that one `def` makes."""
_FUNCTION: Final = "__beartype_func"
_CALLED: Final = "__beartype_call_curr"
"""Names that beartype's checks have for what they are around, and for what their messages say of it."""
_PLAIN: Final = (NoneType, bool, int, float, str)
_SIGNS: Final = ("from jaxtyping import", "if TYPE_CHECKING:", "wraps(", "async def")
"""Of modules that need jaxtyping around some functions, or before another's decorator."""


def check_annotations() -> None:
    """Check all modules of the package that are imported from now on."""
    beartype_package(PACKAGE, conf=BeartypeConf(claw_is_pep526=False))
    install_import_hook(modules_for_jaxtyping(), "beartype.beartype")
    jaxtyping.jaxtyped = only_the_first_of_each(_where_needed(jaxtyping.jaxtyped))  # type: ignore[assignment]
    _clawaststar.__beartype__ = one_check_for_all(beartype)  # type: ignore[assignment]  # what modules import


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


def one_check_for_all(beartype: Any) -> Callable[..., Callable[[Any], Any]]:
    """The decorator that beartype writes above each function, which writes one check for all functions of an inner `def`."""
    known: dict[CodeType, _Check] = {}

    def configured(*, conf: BeartypeConf) -> Callable[[Any], Any]:
        decorate = beartype(conf=conf)

        def checked(part: Any) -> Any:
            is_inner = isinstance(part, FunctionType) and "<locals>" in part.__qualname__
            if not is_inner or hasattr(part, "__wrapped__"):  # many that a decorator made share its code
                return decorate(part)
            check = known.get(part.__code__)
            if check is not None and check.fits(part):
                return check.around(part)
            made = decorate(part)
            if (check := _Check.of(made, part)) is not None:
                known[part.__code__] = check
            return made

        return checked

    return configured


@dataclass(frozen=True)
class _Check:
    """What beartype wrote around a function, without the function: it would be kept alive with all that it holds.

    Attributes:
        code: Of the check; None where beartype finds nothing to check.
        annotations: Of the function. One whose annotations or defaults differ gets a check of its own.
        own_defaults: Of the function: plain values, and names of its module. Others might hold what is to be forgotten.
        called: What beartype keeps of the function for its messages, but for the function.
        defaults: The other values that the check names.
    """

    code: CodeType | None
    globals: dict[str, Any]
    annotations: dict[str, Any]
    own_defaults: tuple[object, ...]
    called: Any
    defaults: dict[str, Any]

    @classmethod
    def of(cls, made: Any, part: FunctionType) -> "_Check | None":
        """The check of a function; None if it cannot be put around another."""
        defaults = dict(getattr(made, "__kwdefaults__", None) or {})
        called = copy(defaults.pop(_CALLED, None))
        own = _defaults_of(part)
        lasting = {id(value) for value in part.__globals__.values()}
        has_none = made is part
        if not has_none and (defaults.pop(_FUNCTION, None) is not part or made.__closure__ or called is None):
            return None
        if not all(isinstance(one, _PLAIN) or id(one) in lasting for one in own):
            return None
        if any(isinstance(one, str) for one in part.__annotations__.values()):
            return None
        if has_none:
            return cls(None, {}, dict(part.__annotations__), own, None, {})
        called.decoratee = None
        return cls(made.__code__, made.__globals__, dict(part.__annotations__), own, called, defaults)

    def fits(self, part: FunctionType) -> bool:
        own = _defaults_of(part)
        are_same = len(own) == len(self.own_defaults) and all(map(operator.is_, own, self.own_defaults))
        return are_same and part.__annotations__ == self.annotations

    def around(self, part: FunctionType) -> FunctionType:
        if self.code is None:
            return part
        called = copy(self.called)
        called.decoratee = part
        made = FunctionType(self.code, self.globals, part.__name__)
        made.__kwdefaults__ = {**self.defaults, _CALLED: called, _FUNCTION: part}
        return update_wrapper(made, part)  # type: ignore[return-value]


def _defaults_of(part: FunctionType) -> tuple[object, ...]:
    return (*(part.__defaults__ or ()), *(part.__kwdefaults__ or {}).values())


def _where_needed(jaxtyped: Any) -> Any:
    """jaxtyping's check of a function or class, with beartype alone where no shape and no string is named."""

    def check(target: Any, *, typechecker: Any) -> Any:
        if is_dataclass(target):
            made: Any = target
            if isinstance(made.__init__, FunctionType):
                made.__init__ = check(made.__init__, typechecker=typechecker)
                return made
        if isinstance(target, FunctionType) and not iscoroutinefunction(target):
            others = [one for one in target.__annotations__.values() if not _is_plain_shape(one)]
            if not _has_shape(others):
                checked = beartype(target)
                has_shapes = len(others) < len(target.__annotations__)
                return _in_a_room(jaxtyped("context"), checked) if has_shapes else checked
        return jaxtyped(target, typechecker=typechecker)

    return check


def _is_plain_shape(annotation: Any) -> bool:
    """Whether it is a shape by itself, or one beside None, whose axes name no argument, as in "{rank}"."""
    if isinstance(annotation, UnionType):
        return all(one is NoneType or _is_plain_shape(one) for one in get_args(annotation))
    is_shape = isinstance(annotation, type) and issubclass(annotation, AbstractArray)
    return is_shape and "{" not in annotation.dim_str


def _in_a_room(room: Any, checked: Any) -> Any:
    """A function that beartype checks, in each call of which all axes of one name have one length."""

    @wraps(checked)
    def called(*args: Any, **kwargs: Any) -> Any:
        with room:
            return checked(*args, **kwargs)

    return called


def _has_shape(annotations: Iterable[Any]) -> bool:
    """Whether one of them is or holds a shape; one that is still a string may, or name what is not there."""
    return any(
        isinstance(annotation, str | ForwardRef)
        or (isinstance(annotation, type) and issubclass(annotation, AbstractArray))
        or _has_shape(annotation if isinstance(annotation, list) else get_args(annotation))
        for annotation in annotations
    )
