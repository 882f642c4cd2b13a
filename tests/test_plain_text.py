"""What comes from others is text to a terminal, a page and a log, and no stream fails of it."""

import io
import logging

import pytest

import sigmascope
from sigmascope.errors import CheckpointError, ConfigError
from sigmascope.monitor.guard import log_quietly
from sigmascope.plain_text import in_encoding, never_failing, printable
from sigmascope.records.run import Finding, Run, Stage

EVIL = "a\x1b]0;x\x07\x9b31m\u202eb"
ACTING = {"\x1b", "\x07", "\x9b", "\u202e"}


def test_an_exception_of_ours_is_harmless_in_a_program() -> None:
    error = CheckpointError(f"{EVIL}\n.safetensors", f"has no {EVIL}.", hint=f"Rename {EVIL}.")
    assert not ACTING & {*str(error)}
    assert not ACTING & {*error.args[0]}
    assert "\n" not in str(error)
    assert error.path.name == f"{EVIL}\n.safetensors"
    assert not ACTING & {*str(ConfigError(EVIL, hint=EVIL))}


def test_markdown_and_the_page_are_harmless() -> None:
    stage = Stage(
        EVIL, 0.0, 1.0, False, EVIL, findings=(Finding("id", "error", EVIL, {EVIL: EVIL}, EVIL, EVIL),)
    )
    run = Run(EVIL, EVIL, "2026-01-01T00:00:00+00:00", 1.0, stages=(stage,), facts={EVIL: EVIL})
    for text in (
        sigmascope.to_markdown(run, prompts="full"),
        sigmascope.to_html(run, prompts="full"),
        run._repr_html_(),
    ):
        assert not ACTING & {*text}
        assert "a\ufffd]0;x\ufffd\ufffd31m\ufffdb" in text.replace("\\]", "]")


def test_the_log_is_harmless(caplog: pytest.LogCaptureFixture) -> None:
    log_quietly(logging.getLogger(__name__), "It failed: %s", EVIL)
    assert not ACTING & {*caplog.text}
    assert printable(EVIL) in caplog.text


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("utf-8", "✓ 2 × 3 µs → 猫…"),
        ("cp1252", "+ 2 × 3 µs -> \\u732b…"),
        ("latin-1", "+ 2 × 3 µs -> \\u732b..."),
        ("ascii", "+ 2 x 3 us -> \\u732b..."),
        ("no such", "+ 2 x 3 us -> \\u732b..."),
    ],
)
def test_what_an_encoding_lacks(encoding: str, shown: str) -> None:
    text = "✓ 2 × 3 µs → 猫…"
    assert in_encoding(text, encoding) == shown
    if encoding != "no such":
        stream = io.TextIOWrapper(io.BytesIO(), encoding, "strict")
        never_failing(stream)
        stream.write(text)
        stream.seek(0)
        assert stream.read() == shown


def test_a_stream_that_cannot_be_told_stays_as_it_is() -> None:
    never_failing(None)
    never_failing(io.StringIO())


def test_a_record_is_printed_in_a_program_whose_output_is_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream is the program's own, and stays as it was."""
    stream = io.TextIOWrapper(io.BytesIO(), "ascii", "strict")
    monkeypatch.setattr("sys.stdout", stream)
    Run("id", "猫", "2026-01-01T00:00:00+00:00", 1.0, stages=(Stage("denoising", 0.0, 1.0),)).print(full=True)
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    assert "+ denoising" in stream.buffer.getvalue().decode("ascii")
    assert stream.errors == "strict"
