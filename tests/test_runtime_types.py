"""What the tests check by themselves: that the package is called as its annotations say."""

from typing import Any, cast

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import TypeCheckError
from tests.runtime_types import MOST_CHECKED, modules_for_jaxtyping, only_the_first_of_each

from sigmascope.analysis.generations import projected_seconds
from sigmascope.lora.decompose import exact_right_subspace
from sigmascope.lora.linalg import max_rank
from sigmascope.monitor.hooks import HookSet


def test_a_wrong_type_is_refused() -> None:
    with pytest.raises(BeartypeCallHintViolation):
        projected_seconds(cast(Any, "soon"), 1.0, 1)


def test_a_wrong_number_of_axes_is_refused() -> None:
    with pytest.raises(TypeCheckError):
        exact_right_subspace(torch.zeros(3), 1)


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
