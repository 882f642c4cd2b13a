import pytest
from tests.comfy_shapes.adapters import lora_parts, random

from sigmascope.probes.comfyui_weight_adapter import Change, patch_misfit, read_value


def change(kind: str, *shapes: tuple[int, ...] | None) -> Change:
    return read_value((kind, tuple(None if shape is None else random(*shape) for shape in shapes)))


FITTING = [
    (change("lora", (8, 2), (2, 6)), (8, 6)),
    (change("lora", (8, 2, 1, 1), (2, 4, 3, 3)), (8, 4, 3, 3)),
    (change("lora", (8, 2), (2, 36)), (8, 4, 3, 3)),
    (change("lora", (8, 2, 1, 1), (2, 4, 1, 1), None, (2, 2, 3, 3)), (8, 4, 3, 3)),
    (change("lora", (8, 2), (2, 6), None, None, (8, 1)), (8, 6)),
    (change("lora", (8, 2), (2, 6), None, None, (1, 6)), (8, 6)),
    (change("loha", (8, 2), (2, 6), None, (8, 3), (3, 6)), (8, 6)),
    (change("loha", (2, 8), (2, 4), None, (2, 8), (2, 4), (2, 2, 3, 3), (2, 2, 3, 3)), (8, 4, 3, 3)),
    (change("lokr", (2, 2), (4, 3)), (8, 6)),
    (change("lokr", (2, 2), None, None, None, None, (4, 2), (2, 3)), (8, 6)),
    (change("lokr", (2, 2), (4, 2, 3, 3)), (8, 4, 3, 3)),
    (change("glora", (6, 2), (2, 6), (8, 2), (2, 6)), (8, 6)),
    (change("glora", (2, 6), (6, 2), (2, 6), (8, 2)), (8, 6)),
    (change("glora", (4, 2), (2, 4), (8, 2), (2, 36)), (8, 4, 3, 3)),
    (change("oft", (2, 4, 4)), (8, 6)),
    (change("boft", (3, 2, 4, 4)), (8, 6)),
    (change("diff", (8, 6)), (8, 6)),
    (change("set", (8, 6)), (8, 6)),
    (change("set", (6,)), (8, 6)),
    (Change("unknown"), (8, 6)),
]


@pytest.mark.parametrize(("fitting", "weight"), FITTING)
def test_what_fits_has_nothing_against_it(fitting: Change, weight: tuple[int, ...]) -> None:
    assert patch_misfit(fitting, weight) is None


@pytest.mark.parametrize(
    ("unfit", "why"),
    [
        (change("lora", (8, 2), (2, 5)), "the change is 8×5, the weight 8×6"),
        (change("lora", (8, 3), (2, 6)), "the rank is 3 in up and 2 in down"),
        (change("lora", (8, 2), (2, 6), None, None, (7, 1)), "its magnitudes are 7×1, the weight 8×6"),
        (change("lora", (8, 2)), "a factor is missing or has too few dimensions ('down')"),
        (change("loha", (8, 2), (2, 6), None, (8, 2), (2, 5)), "its two products are 8×6 and 8×5"),
        (change("lokr", (2, 2), (4, 4)), "the change is 4×16, the weight 8×6"),
        (change("glora", (5, 2), (2, 5), (8, 2), (2, 6)), None),
        (change("oft", (2, 3, 3)), "it turns 2 blocks of 3, the weight of 8×6 has 8 rows"),
        (change("diff", (6, 8)), "the difference is 6×8, the weight 8×6"),
        (change("set", (8, 7)), "the new value is 8×7, the weight 8×6"),
    ],
)
def test_what_does_not_fit_says_why(unfit: Change, why: str | None) -> None:
    found = patch_misfit(unfit, (8, 6))
    assert found is not None
    assert why is None or found == why


def test_only_the_number_of_elements_must_agree_as_the_host_reshapes() -> None:
    assert patch_misfit(change("lora", (6, 2), (2, 8)), (8, 6)) is None


def test_a_part_of_a_weight_is_what_must_fit() -> None:
    assert patch_misfit(change("lora", (4, 2), (2, 6)), (12, 6), (0, 8, 4)) is None


def test_a_part_outside_the_weight_does_not_fit() -> None:
    assert patch_misfit(change("lora", (4, 2), (2, 6)), (8, 6), (0, 8, 4)) == (
        "the part (0, 8, 4) lies outside the weight's 8×6"
    )


def test_a_lora_that_enlarges_the_weight_must_fit_what_comes_of_it() -> None:
    enlarging = read_value(("lora", (*lora_parts(10, 2, 6)[:5], [10, 6])))
    assert patch_misfit(enlarging, (8, 6)) is None


def test_a_difference_that_pads_the_weight_fits() -> None:
    assert patch_misfit(read_value(("diff", (random(10, 6), {"pad_weight": True}))), (8, 6)) is None


def test_a_weight_is_not_made_smaller() -> None:
    padded = patch_misfit(read_value(("diff", (random(7, 6), {"pad_weight": True}))), (8, 6))
    assert padded == "the weight's 8×6 cannot be enlarged to 7×6"
