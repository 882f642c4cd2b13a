import pytest

from sigmascope.units import (
    MIB,
    counted,
    mebibytes,
    mib,
    mib_change,
    number,
    percent,
    percent_change,
    rough_percent,
    seconds,
    seconds_change,
    signed,
    statistic,
    time_to_come,
    took,
    with_noise,
)


def test_units_keep_what_is_unknown_apart_from_zero() -> None:
    assert (mib(None), mib(0), mib(MIB // 4)) == ("-", "0.0", "0.25")
    assert (mib_change(None, 5), mib_change(0, -MIB)) == ("-", "-1.0")
    assert (seconds(None), seconds(5e-6), seconds(0.0123), seconds(2.449)) == (
        "-",
        "5.00 µs",
        "12.3 ms",
        "2.45 s",
    )
    assert (seconds(-5.0), seconds(float("nan"))) == ("-", "-")
    assert (took(2.449), took(-5.0), took(None)) == ("took 2.45 s", *["its time is not recorded"] * 2)
    assert (seconds(0.0), seconds(0.9996), seconds(250.4)) == ("0.00 s", "1.00 s", "250 s")


def test_changes_have_a_sign_of_one_kind_and_what_rounds_to_zero_has_none() -> None:
    assert (signed(-1234.56), signed(0.04), signed(-0.04), signed(2.5, 0)) == ("-1,234.6", "0.0", "0.0", "+2")
    assert (seconds_change(-0.007), seconds_change(0.133), seconds_change(0.0)) == (
        "-7.00 ms",
        "+133 ms",
        "0.00 s",
    )
    assert (percent_change(-0.29), percent_change(-1e-5), percent_change(0.5, 0)) == (
        "-29.0 %",
        "0.0 %",
        "+50 %",
    )
    assert (mib_change(MIB, MIB), mib_change(2 * MIB, MIB)) == ("0.0", "-1.0")


@pytest.mark.parametrize(
    ("amount", "shown"),
    [(0.0, "0.0"), (0.0094, "0.0094"), (0.25, "0.25"), (9.5, "9.50"), (10.0, "10.0"), (-4096.0, "-4,096.0")],
)
def test_mebibytes_have_the_decimals_that_tell_something(amount: float, shown: str) -> None:
    assert mebibytes(amount) == shown


def test_counts_are_shown_in_full_and_statistics_short() -> None:
    assert (number(59136), number(1.23456), statistic(1.23456), number(None)) == (
        "59,136",
        "1.235",
        "1.23",
        "-",
    )


def test_a_share_of_nothing_is_a_dash() -> None:
    assert (percent(1.0, 4.0), percent(1.0, 0.0), percent(-1.0, 4.0)) == ("25 %", "-", "-")


@pytest.mark.parametrize(
    ("share", "digits", "shown"),
    [
        (0.0231, 2, "2.3 %"),
        (0.996, 2, "100 %"),
        (1.036, 2, "104 %"),
        (2.31, 2, "231 %"),
        (16.04, 2, "1,604 %"),
        (9.999, 3, "1,000 %"),
        (9.994, 3, "999 %"),
        (0.0, 2, "0 %"),
    ],
)
def test_a_large_share_has_no_exponent(share: float, digits: int, shown: str) -> None:
    assert rough_percent(share, digits) == shown


def test_a_count_agrees_with_its_noun_and_verb() -> None:
    assert [counted(number, "key") for number in (0, 1, 2)] == ["0 keys", "1 key", "2 keys"]
    assert counted(1, "module has", "modules have") == "1 module has"
    assert counted(3, "module has", "modules have") == "3 modules have"
    assert counted(2_000, "step") == "2,000 steps"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (190, "3 min 10 s"),
        (10959, "3 h 2 min"),
        (None, "-"),
        (-1.0, "-"),
    ],
)
def test_what_is_still_to_come_is_told_as_people_do(value: float | None, words: str) -> None:
    assert time_to_come(value) == words


@pytest.mark.parametrize(
    ("noise", "says"),
    [
        (0.0, "with no noise to speak of"),
        (0.0049, "with no noise to speak of"),
        (0.12, "with noise of 12 % of its size"),
    ],
)
def test_noise_that_is_none_is_said_so(noise: float, says: str) -> None:
    assert with_noise(noise, f"{100 * noise:.0f} % of") == says
