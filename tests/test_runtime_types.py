"""What the tests check by themselves: that the package is called as its annotations say."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, cast, no_type_check

import jaxtyping
import pytest
import torch
from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float, TypeCheckError
from tests.runtime_types import (
    MOST_CHECKED,
    modules_for_jaxtyping,
    one_check_for_all,
    only_the_first_of_each,
)
from torch import Tensor

from sigmascope.analysis.generations import projected_seconds
from sigmascope.lora.decompose import exact_right_subspace
from sigmascope.lora.linalg import max_rank
from sigmascope.monitor import hooks
from sigmascope.monitor.hooks import HookSet


def test_a_wrong_type_is_refused() -> None:
    with pytest.raises(BeartypeCallHintViolation):
        projected_seconds(cast(Any, "soon"), 1.0, 1)


def test_a_wrong_number_of_axes_is_refused() -> None:
    with pytest.raises(BeartypeCallHintViolation):
        exact_right_subspace(torch.zeros(3), 1)


def of_two(first: Float[Tensor, "n"], second: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return torch.cat((first, second))[: 2 * len(first) - int(first[0])]


CHECKED = jaxtyping.jaxtyped(typechecker=beartype)(of_two)


def test_axes_of_one_name_have_one_length_in_a_call_and_in_each_call_another() -> None:
    assert [len(CHECKED(torch.full((n,), float(n)), torch.ones(n))) for n in (2, 3)] == [2, 3]
    with pytest.raises(BeartypeCallHintViolation):
        CHECKED(torch.full((2,), 2.0), torch.ones(3))
    with pytest.raises(BeartypeCallHintViolation, match="return"):
        CHECKED(torch.ones(2), torch.ones(2))


def test_axes_of_a_function_inside_are_its_own() -> None:
    def outer(first: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        CHECKED(torch.full((5,), 5.0), torch.ones(5))
        return first

    checked = jaxtyping.jaxtyped(typechecker=beartype)(outer)
    assert len(checked(torch.ones(2))) == 2


def test_shapes_inside_of_others_are_checked() -> None:
    def of_several(several: list[Float[Tensor, "n"]], one: Float[Tensor, "n"]) -> None: ...

    checked = jaxtyping.jaxtyped(typechecker=beartype)(of_several)
    checked([torch.ones(2)], torch.ones(2))
    with pytest.raises(TypeCheckError):
        checked([torch.ones(2)], torch.ones(3))


def test_a_dataclass_is_checked_when_it_is_made() -> None:
    @dataclass
    class Made:
        count: int
        values: Float[Tensor, "n"]
        weights: Float[Tensor, "n"] | None = None

    checked = jaxtyping.jaxtyped(typechecker=beartype)(Made)
    assert checked(1, torch.ones(2), torch.ones(2)).count == 1
    for wrong in (("1", torch.ones(2)), (1, torch.ones(2, 2)), (1, torch.ones(2), torch.ones(3))):
        with pytest.raises(BeartypeCallHintViolation):
            checked(*wrong)


def test_a_wrong_type_is_refused_beside_functions_of_shapes() -> None:
    with pytest.raises(BeartypeCallHintViolation):
        max_rank(cast(Any, "wide"))


def test_beartype_alone_checks_a_function_without_shapes_in_a_module_that_wraps_others() -> None:
    with pytest.raises(BeartypeCallHintViolation):  # jaxtyping would say it in an error of its own
        HookSet(cast(Any, "guard"), "steps")


def test_only_modules_that_need_it_pay_for_jaxtyping() -> None:
    names = modules_for_jaxtyping()
    assert "sigmascope.lora.decompose" in names
    assert "sigmascope.monitor.recorder" not in names


def test_of_the_functions_that_one_def_makes_the_first_are_checked() -> None:
    decorated = only_the_first_of_each(lambda part, *, typechecker: "checked")(typechecker=None)

    def make() -> object:
        def inner() -> None: ...

        return decorated(inner)

    made = [make() for _ in range(MOST_CHECKED + 2)]
    assert [one == "checked" for one in made] == [True] * MOST_CHECKED + [False] * 2


class Held: ...


def counted() -> tuple[Callable[[Any], Any], list[object]]:
    """The decorator, and all functions for which beartype was asked to write a check."""
    written: list[object] = []

    def counting(*, conf: BeartypeConf) -> Callable[[Any], Any]:
        def decorate(part: Any) -> Any:
            written.append(part.__code__)
            return beartype(conf=conf)(part)

        return decorate

    return one_check_for_all(counting)(conf=BeartypeConf()), written


def inner_functions() -> tuple[Callable[[object], Callable[[Any], object]], list[object]]:
    """What makes a function of an inner `def`, and what beartype was asked to write."""
    decorated, written = counted()

    def make(held: object) -> Callable[[Any], object]:
        def inner(number: int) -> object:
            return number, held

        made: Callable[[Any], object] = decorated(inner)
        return made

    return make, written


def test_all_functions_of_an_inner_def_are_checked_by_one_check_and_are_themselves() -> None:
    make, written = inner_functions()
    made = [make(number) for number in range(5)]
    assert len(written) == 1
    assert [one(7) for one in made] == [(7, number) for number in range(5)]
    for one in made:
        with pytest.raises(BeartypeCallHintViolation, match=r"inner\(\) parameter number='7' violates"):
            one("7")
    assert {one.__qualname__ for one in made} == {"inner_functions.<locals>.make.<locals>.inner"}


def test_the_check_keeps_nothing_alive_that_a_function_held() -> None:
    make, _ = inner_functions()
    held = Held()
    gone = weakref.ref(held)
    make(held)
    del held
    gc.collect()
    assert gone() is None


def test_annotations_and_defaults_of_its_own_give_a_function_a_check_of_its_own() -> None:
    decorated = one_check_for_all(beartype)(conf=BeartypeConf())

    def make(kind: type, default: Any = None) -> tuple[Any, Any]:
        def inner(value: kind) -> object:  # type: ignore[valid-type]
            return value

        def other(value: object = default) -> object:
            return value

        return decorated(inner), decorated(other)

    (of_int, one), (of_text, two) = make(int, 1), make(str, 2)
    assert (of_int(1), of_text("1"), one(), two()) == (1, "1", 1, 2)
    for checked, wrong in ((of_int, "1"), (of_text, 1)):
        with pytest.raises(BeartypeCallHintViolation):
            checked(wrong)


def test_functions_with_the_same_defaults_share_a_check() -> None:
    decorated, written = counted()

    def make(number: int) -> Any:
        def inner(add: int = 1, *, kind: type = Held) -> tuple[int, type]:
            return number + add, kind

        return decorated(inner)

    made = [make(number) for number in range(3)]
    assert [one() for one in made] == [(1, Held), (2, Held), (3, Held)]
    assert len(written) == 1
    with pytest.raises(BeartypeCallHintViolation):
        made[2](kind=1)


def test_where_there_is_nothing_to_check_functions_stay_as_they_are() -> None:
    decorated, written = counted()

    def make(number: int) -> tuple[Any, Any]:
        def inner(one: Any = None, *others: Any) -> Any:
            return number

        return inner, decorated(inner)

    assert [inner is checked for inner, checked in map(make, range(3))] == [True] * 3
    assert len(written) == 1


def passed_on(function: Callable[[int], int]) -> Any:
    @wraps(function)
    def passing(*args: Any) -> int:
        return function(*args)

    return passing


def test_functions_that_one_decorator_made_have_their_own_checks() -> None:
    decorated = one_check_for_all(beartype)(conf=BeartypeConf())

    @no_type_check
    def free(number: int) -> int:
        return number

    def bound(number: int) -> int:
        return number

    assert decorated(passed_on(free))("1") == "1"
    with pytest.raises(BeartypeCallHintViolation):
        decorated(passed_on(bound))("1")


def test_modules_of_the_package_take_this_decorator() -> None:
    assert vars(hooks)["__beartype__"].__qualname__ == "one_check_for_all.<locals>.configured"
