import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from typer.testing import CliRunner

from sigmascope.cli import root
from sigmascope.errors import ConfigError, SigmascopeError, WriteError
from sigmascope.integrations import launch
from sigmascope.integrations.watch_settings import Settings


class Launched(Exception):
    """What would have been launched."""

    def __init__(self, program: list[str], settings: Settings) -> None:
        super().__init__(program)
        self.program = program
        self.settings = settings


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(program: list[str], settings: Settings) -> NoReturn:
        raise Launched(program, settings)

    monkeypatch.setattr(launch, "launch", stop)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("print('done')")


def launched(*arguments: str) -> Launched:
    error = CliRunner().invoke(root.app, ["watch", *arguments]).exception
    assert isinstance(error, Launched), error
    return error


def refused(*arguments: str) -> SigmascopeError:
    error = CliRunner().invoke(root.app, ["watch", *arguments]).exception
    assert isinstance(error, SigmascopeError), error
    return error


def test_all_that_follows_the_script_is_its_own() -> None:
    arguments = ["--output", "x.png", "-h", "--my_flag", "--", "-m"]
    assert launched("script.py", *arguments).program == ["script.py", *arguments]


def test_a_module_is_run_as_python_does() -> None:
    assert launched("-m", "package.tool", "-q").program == ["-m", "package.tool", "-q"]


def test_code_and_stdin_are_run_as_python_does() -> None:
    assert launched("-c", "print(1)", "-c", "x").program == ["-c", "print(1)", "-c", "x"]
    assert launched("-", "--steps", "4").program == ["-", "--steps", "4"]


def test_places_are_whole_paths(tmp_path: Path) -> None:
    settings = launched("--output", "run.json", "--trace", "trace.json", "script.py").settings
    assert (settings.output, settings.trace) == (str(tmp_path / "run.json"), str(tmp_path / "trace.json"))


def test_thumbnails_are_kept_where_they_are_asked_for() -> None:
    assert launched("--thumbnails", "script.py").settings.thumbnails == "1"
    assert launched("script.py").settings.thumbnails is None


def test_stacks_are_sampled_where_they_are_asked_for() -> None:
    assert launched("--stacks", "script.py").settings.stacks == "1"
    assert launched("script.py").settings.stacks is None


def test_options_reach_the_process() -> None:
    settings = launched(
        "--prompts", "hash", "--name", "portrait", "--sample_hz", "5", "--no_step_memory", "-q", "script.py"
    ).settings
    assert settings == Settings(None, None, "hash", "portrait", "5.0", "0", "1", None, "1", "100")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "No script is named"),
        (["nothing.py"], "nothing.py does not exist"),
        (["--prompts", "some", "script.py"], "--prompts some does not exist."),
        (["--sample_hz", "0", "script.py"], "--sample_hz must be finite and above 0, got 0."),
        (["--sample_hz", "nan", "script.py"], "--sample_hz must be finite and above 0, got nan."),
        (["--sample_hz", "inf", "script.py"], "--sample_hz must be finite and above 0, got inf."),
        (["-m", "-c", "script"], "-m and -c cannot be used together"),
        (["--install", "--uninstall"], "cannot be used together"),
        (["--install", "script.py"], "take no script"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], words: str) -> None:
    error = refused(*arguments)
    assert words in error.message
    assert error.exit_code == 2
    assert error.hint


@pytest.mark.parametrize(
    "path", ["taken/run.json", "nowhere/", f"{'x' * 70_000}.json"], ids=["taken", "nowhere", "long"]
)
def test_a_place_that_cannot_be_written_is_refused_before_the_script_runs(path: str) -> None:
    Path("taken").write_text("")
    assert path.partition("/")[0][:40] in refused("--output", path, "script.py").message


def test_the_startup_file_is_installed_and_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "startup_file", lambda: tmp_path / launch.NAME)
    for option, words, there in (
        ("--install", "SIGMASCOPE=1 now watches", True),
        ("--uninstall", "Removed ", False),
        ("--uninstall", "Nothing was installed", False),
    ):
        assert words in CliRunner().invoke(root.app, ["watch", option]).output
        assert (tmp_path / launch.NAME).exists() is there


@pytest.mark.slow
@pytest.mark.parametrize("option", ["-E", "-I", "-S"])
def test_a_python_that_nothing_comes_into_is_refused(option: str) -> None:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    code = (
        f"import sys; sys.path[:0] = {path.split(os.pathsep)!r}; sys.argv = ['sigmascope', 'watch', 'script.py']\n"
        "from sigmascope.cli import main\nmain()\n"
    )
    done = subprocess.run([sys.executable, option, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == ConfigError.exit_code
    assert "so the program cannot be watched" in " ".join(done.stderr.split())


def test_errors_of_places_are_errors_of_writing() -> None:
    Path("taken").write_text("")
    assert isinstance(refused("--trace", "taken/t.json", "script.py"), WriteError)


@pytest.mark.slow
def test_the_exit_code_and_the_output_are_the_script_s() -> None:
    Path("script.py").write_text("import sys; print(sys.argv[1:]); sys.exit(3)")
    done = subprocess.run(
        [sys.executable, "-m", "sigmascope", "watch", "script.py", "--steps", "4"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, "['--steps', '4']\n")


@pytest.mark.slow
def test_a_file_s_name_does_not_speak_to_the_terminal() -> None:
    output = "run\x1b]0;mine\x07.json"
    code = "import sigmascope\nwith sigmascope.stage('own'): pass"
    watched = [sys.executable, "-m", "sigmascope", "watch", "--output", output, "-c", code]
    ended = subprocess.run(watched, capture_output=True, text=True, check=False)
    assert "run\N{REPLACEMENT CHARACTER}]0;mine" in ended.stderr
    assert "\x1b]" not in ended.stderr + ended.stdout


@pytest.mark.slow
def test_a_script_with_a_watch_of_its_own_is_watched(tmp_path: Path) -> None:
    code = "import sigmascope\nwith sigmascope.watch(): pass\nwith sigmascope.stage('own'): pass"
    watched = [sys.executable, "-m", "sigmascope", "watch", "--output", "run.json", "-c", code]
    ended = subprocess.run(watched, capture_output=True, text=True, check=False)
    assert "nothing is watched" not in ended.stderr
    assert "the record is in" in ended.stderr
    assert (tmp_path / "run.json").stat().st_size > 0


def test_no_line_of_a_message_is_endless() -> None:
    error = ConfigError(f"{'x' * 200_000}\nshort", hint="Look.")
    assert 1000 < len(str(error)) < 5000
    assert str(error).endswith("…\nshort Look.")
