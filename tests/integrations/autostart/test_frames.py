import sys
import threading
import traceback
from collections.abc import Callable
from types import CodeType

import pytest

from sigmascope.integrations.autostart import frames
from sigmascope.integrations.autostart.frames import forget_own, hide_own

OURS = frames._OURS[0] + "/taps.py"


def through(path: str, inner: Callable[[], None]) -> Callable[[], None]:
    """A function of that file, which calls another."""
    code: CodeType = compile("def between():\n    inner()\n", path, "exec")
    names: dict[str, Callable[[], None]] = {"inner": inner}
    exec(code, names)
    return names["between"]


def fail() -> None:
    raise ValueError("NaN")


def files_of(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def raised_by(function: Callable[[], None]) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any
        function()
    return caught.value


def test_our_frames_are_taken_out_and_the_others_stay() -> None:
    error = raised_by(through("host.py", through(OURS, fail)))
    forget_own(error)
    assert files_of(error) == [__file__, "host.py", __file__]


def test_those_of_causes_are_taken_out_too() -> None:
    def again() -> None:
        try:
            through(OURS, fail)()
        except ValueError as cause:
            raise OSError("again") from cause

    error = raised_by(again)
    forget_own(error)
    assert error.__cause__ is not None
    assert OURS not in files_of(error.__cause__)


def test_causes_in_a_ring_come_to_an_end() -> None:
    first, second = ValueError("1"), ValueError("2")
    first.__context__, second.__context__ = second, first
    forget_own(first)
    assert first.__context__ is second


def test_a_program_s_own_hook_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(*_: object) -> None: ...

    monkeypatch.setattr(sys, "excepthook", mine)
    hide_own()
    assert sys.excepthook is mine


def test_what_is_printed_is_what_python_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    hide_own()
    error = raised_by(through(OURS, fail))
    sys.excepthook(type(error), error, error.__traceback__)
    printed = capsys.readouterr().err
    assert printed == "".join(traceback.format_exception(error))
    assert OURS not in printed


def test_what_a_thread_prints_is_without_our_frames_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    hide_own()
    thread = threading.Thread(target=through(OURS, fail), name="worker")
    thread.start()
    thread.join()
    printed = capsys.readouterr().err
    assert printed.startswith("Exception in thread worker:\nTraceback")
    assert "ValueError: NaN" in printed
    assert OURS not in printed
