import pytest

from sigmascope.probes import Reading
from sigmascope.probes.reading import attempt, describe, reasons


def fail(error: BaseException) -> int:
    raise error


def test_a_value_has_no_reason() -> None:
    assert attempt(lambda: 3) == Reading(3, None)


@pytest.mark.parametrize(
    "error", [AssertionError("a"), AttributeError("a"), RuntimeError("a"), KeyError("a")]
)
def test_an_expected_error_is_a_reason(error: Exception) -> None:
    reading = attempt(lambda: fail(error))
    assert reading.value is None
    assert (reading.reason or "").startswith(type(error).__name__)


def test_a_librarys_own_error_is_a_reason_too() -> None:
    class LibraryError(Exception):
        pass

    assert attempt(lambda: fail(LibraryError("gone"))).reason == "LibraryError: gone"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit()])
def test_the_users_wish_to_stop_passes(error: BaseException) -> None:
    with pytest.raises(type(error)):
        attempt(lambda: fail(error))


def test_a_reason_is_one_line() -> None:
    assert (
        describe(RuntimeError("CUDA error: out of memory\nCompile with…"))
        == "RuntimeError: CUDA error: out of memory"
    )
    assert describe(RuntimeError()) == "RuntimeError"


def test_reasons_are_those_of_the_failed() -> None:
    assert reasons({"a": Reading(1), "b": Reading(None, "gone")}) == {"b": "gone"}
