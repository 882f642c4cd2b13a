"""A copy with other values is the one that `dataclasses.replace` makes."""

from dataclasses import dataclass, field, replace

import pytest

from sigmascope.replaced import replaced


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float = 0.0
    names: list[str] = field(default_factory=list)


@pytest.mark.parametrize(
    "changes", [{}, {"y": 3.0}, {"x": -1.0, "names": ["b"]}, {"names": [], "y": 0.0, "x": 0.0}]
)
def test_a_copy_is_that_of_dataclasses(changes: dict[str, object]) -> None:
    point = Point(1.0, 2.0, ["a"])
    assert replaced(point, **changes) == replace(point, **changes)  # type: ignore[arg-type]
    assert point == Point(1.0, 2.0, ["a"])


def test_what_stays_is_the_same_object() -> None:
    point = Point(1.0, names=["a"])
    assert replaced(point, x=2.0).names is point.names


def test_a_name_that_is_no_field_is_refused() -> None:
    with pytest.raises(KeyError, match="z"):
        replaced(Point(1.0), z=1.0)
