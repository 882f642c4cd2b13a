"""What the settings of a watched process say, and how its user is told something."""

import sys

import pytest

from sigmascope.integrations.autostart import say
from sigmascope.integrations.watch_settings import USER_PREFIX, settings_from


class Stream:
    """One of the program's own, which fails as nobody expects."""

    def __init__(self) -> None:
        self.written: list[str] = []

    def write(self, text: str) -> int:
        self.written.append(text)
        raise RuntimeError("a stream of the program's own")

    def flush(self) -> None: ...


def test_stacks_are_sampled_where_the_environment_says_so() -> None:
    assert settings_from({"SIGMASCOPE_STACKS": "1"}, USER_PREFIX).is_on("stacks")
    assert not settings_from({"SIGMASCOPE_STACKS": "0"}, USER_PREFIX).is_on("stacks")
    assert not settings_from({}, USER_PREFIX).is_on("stacks")


def test_a_stream_that_fails_is_not_the_program_s_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    monkeypatch.setattr(sys, "__stderr__", stream)
    say("the record is in run.json")
    assert stream.written == ["Sigmascope: the record is in run.json\n"]


def test_what_a_terminal_would_obey_is_not_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    say("the record is in \x1b[2Jrun.json")
    assert capsys.readouterr().err == "Sigmascope: the record is in �[2Jrun.json\n"
