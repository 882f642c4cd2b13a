from collections.abc import Callable
from typing import Any

import pytest
from tests.analysis.faulty_runs import stage

from sigmascope.records.run import Finding

Found = Callable[..., dict[str, Finding]]

SOUND = {"pictures": 4, "is_video": False, "looked_at": 4, "one_colour": 0, "not_finite": 0, "replaced": None}


def _picture_findings(found: Found, **facts: Any) -> set[str]:
    seen = stage("generation", 1.0, facts={"pictures": SOUND | facts})
    return {name for name in found(seen) if name.startswith("picture.")}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, set()),
        ({"replaced": 0}, set()),
        ({"one_colour": 1, "colour": [0, 0, 0]}, {"picture.is_one_colour"}),
        ({"one_colour": 3, "colour": [0, 0, 0], "is_video": True}, set()),  # a video may begin in black
        ({"one_colour": 4, "colour": [0, 0, 0], "is_video": True}, {"picture.is_one_colour"}),
        ({"one_colour": 2, "colour": [0, 0, 0], "replaced": 2}, {"picture.replaced_by_safety_checker"}),
        ({"not_finite": 1}, {"picture.not_finite"}),
        ({"one_colour": None, "looked_at": "4", "colour": 7}, set()),
    ],
)
def test_pictures_without_content_are_told(found: Found, facts: dict[str, Any], expected: set[str]) -> None:
    assert _picture_findings(found, **facts) == expected


@pytest.mark.parametrize("seen", [None, "black", [1]])
def test_facts_of_another_form_are_passed_over(found: Found, seen: object) -> None:
    assert not [
        name for name in found(stage("generation", 1.0, facts={"pictures": seen})) if "picture" in name
    ]
