import os
import signal
import sys
from pathlib import Path

import pytest
from tests.integrations.programs import ended, environment, watched, write

import sigmascope
from sigmascope.errors import ConfigError
from sigmascope.integrations.launch import BOOTSTRAP, environment_for, exit_code_of, interpreter_options
from sigmascope.integrations.process_recording import prompts_of, sample_hz_of
from sigmascope.integrations.watch_settings import (
    LAUNCH_PREFIX,
    USER_PREFIX,
    Settings,
    settings_from,
    take_settings,
)


@pytest.mark.parametrize(
    ("original", "own", "options"),
    [
        (["python", "/bin/sigmascope", "watch", "s.py"], 3, []),
        (["python", "-X", "dev", "/bin/sigmascope", "watch", "s.py"], 3, ["-X", "dev"]),
        (["python", "-m", "sigmascope", "watch", "s.py"], 3, []),
        (["python", "-W", "error", "-m", "sigmascope", "watch", "s.py"], 3, ["-W", "error"]),
    ],
)
def test_python_s_own_options_are_passed_on(original: list[str], own: int, options: list[str]) -> None:
    assert interpreter_options(original, own) == options


def test_the_path_for_modules_begins_with_ours_and_the_original_is_kept() -> None:
    told = environment_for({"PYTHONPATH": "/mine"}, Settings())
    assert told["PYTHONPATH"] == f"{BOOTSTRAP}{os.pathsep}/mine"
    assert told["SIGMASCOPE_WATCH_PYTHONPATH"] == "/mine"


def test_settings_survive_the_environment() -> None:
    settings = Settings("run.json", "trace.json", "hash", "portrait", "5.0", "1", "1")
    told = settings.as_environment(LAUNCH_PREFIX)
    assert take_settings(told, LAUNCH_PREFIX) == settings
    assert told == {}


def test_what_users_set_stays_in_the_environment() -> None:
    told = {"SIGMASCOPE": "1", "SIGMASCOPE_OUTPUT": "runs", "SIGMASCOPE_NAME": ""}
    assert settings_from(told, USER_PREFIX) == Settings(output="runs")
    assert len(told) == 3


@pytest.mark.slow
@pytest.mark.parametrize("options", [["-X", "utf8=0"], ["-W", "error::UserWarning"], ["-O"]])
def test_a_script_sees_the_options_that_python_was_given(options: list[str], tmp_path: Path) -> None:
    import subprocess

    write(tmp_path, "script.py", "import sys; print(sys.flags, sys.warnoptions, sys._xoptions)")

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *options, *command],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        return ended(done).out

    assert run("-m", "sigmascope", "watch", "script.py") == run("script.py")


@pytest.mark.parametrize("told", ["fast", "-3", "0", "nan", "inf"])
def test_a_rate_that_is_none_is_refused_by_the_variable_s_name(told: str) -> None:
    with pytest.raises(ConfigError, match=f"SIGMASCOPE_SAMPLE_HZ={told} is not a number above 0"):
        sample_hz_of(Settings(sample_hz=told))


def test_a_privacy_that_does_not_exist_is_refused_by_the_variable_s_name() -> None:
    with pytest.raises(ConfigError, match="SIGMASCOPE_PROMPTS=loud"):
        prompts_of(Settings(prompts="loud"))
    assert (prompts_of(Settings()), sample_hz_of(Settings())) == ("full", 10.0)


def test_where_a_process_cannot_be_replaced_the_program_s_exit_code_is_given_on() -> None:
    before = signal.getsignal(signal.SIGINT)
    program = [sys.executable, "-c", "import os; os._exit(int(os.environ['CODE']))"]
    assert exit_code_of(program, {**os.environ, "CODE": "7"}) == 7
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.skipif(os.name == "nt", reason="processes send each other no Ctrl-C there")
def test_ctrl_c_is_left_to_the_program_that_is_waited_for() -> None:
    interrupts = (
        "import os, signal, sys\nsignal.signal(signal.SIGINT, lambda *_: sys.exit(3))\n"
        "os.kill(os.getppid(), signal.SIGINT)\nos.kill(os.getpid(), signal.SIGINT)\n"
    )
    assert exit_code_of([sys.executable, "-c", interrupts], os.environ) == 3


@pytest.mark.parametrize(("told", "is_so"), [(None, False), ("0", False), ("1", True), ("yes", True)])
def test_zero_is_no(told: str | None, is_so: bool) -> None:
    assert Settings(step_memory=told).is_on("step_memory") is is_so
    assert Settings(quiet=told).is_on("quiet") is is_so


@pytest.mark.slow
def test_the_user_sees_the_whole_error_that_a_private_record_shortens(tmp_path: Path) -> None:
    code = """
from sigmascope.monitor import stage
with stage("denoising"):
    raise ValueError("cannot draw " + "a red fox")
"""
    settings = Settings("run.json", "trace.json", "none", quiet="1", launched="1")
    seen = watched([write(tmp_path, "script.py", code), "--prompt", "a red fox"], tmp_path, settings)
    assert 'raise ValueError("cannot draw " + "a red fox")' in seen.err
    assert "ValueError: cannot draw a red fox" in seen.err
    stage = sigmascope.load_run(tmp_path / "run.json").stage("denoising")
    assert stage.error == "ValueError (script.py:4 in <module>)"
    assert "fox" not in (tmp_path / "run.json").read_text() + (tmp_path / "trace.json").read_text()
    assert os.name == "nt" or (tmp_path / "run.json").stat().st_mode & 0o777 == 0o600
