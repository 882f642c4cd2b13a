import importlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import typer

from sigmascope import __version__
from sigmascope.cli import main, root
from sigmascope.cli.groups import commands_on_demand, stopping_after_torch
from sigmascope.errors import CheckpointError, ConfigError, SigmascopeError
from sigmascope.lora import validate


def run_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the command line as if its command had raised; return the exit code."""

    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(root, "app", fail)
    with pytest.raises(SystemExit) as stop:
        root.run()
    return int(stop.value.code or 0)


def test_the_version_is_the_package_s() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sigmascope", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == __version__


@pytest.mark.parametrize(
    ("error", "code"),
    [(CheckpointError("model.safetensors", "is truncated."), 1), (ConfigError("--rank 0 keeps nothing."), 2)],
)
def test_an_error_has_its_exit_code(
    error: SigmascopeError, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_with(error, monkeypatch) == code


def test_an_error_and_its_next_step_go_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_with(CheckpointError("a[b].ckpt", "is empty.", hint="Download it again."), monkeypatch)
    out, err = capsys.readouterr()
    assert out == ""
    assert "a[b].ckpt: is empty." in err
    assert "Download it again." in err


def test_ctrl_c_exits_with_130_and_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_with(KeyboardInterrupt(), monkeypatch) == 130
    assert capsys.readouterr() == ("", "Stopped by Ctrl-C.\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_a_full_disk_under_the_output_is_told_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        suppress(OSError),
        Path("/dev/full").open("w", encoding="utf-8") as stream,
    ):  # closing writes the rest
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "argv", ["sigmascope", "lora", "--help"])
        with pytest.raises(SystemExit) as left:
            main()
    assert left.value.code == 1
    assert "The output cannot be written (No space left on device)." in capsys.readouterr().err


def test_an_error_that_nobody_planned_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root, "app", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        root.run()


@pytest.fixture
def keeps_ctrl_c() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("keeps_ctrl_c")
@pytest.mark.parametrize(
    ("told", "line"),
    [
        ("", "Stopped by Ctrl-C."),
        ("Stopped after 3 \x1b[2J pictures.", "Stopped after 3 \ufffd[2J pictures."),
    ],
)
def test_ctrl_c_inside_a_command_exits_with_130_and_one_line(
    told: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt(told)

    monkeypatch.setattr(validate, "validate_lora", stop)
    paths = ("--base_model_path", "a", "--tuned_model_path", "b", "--lora_path", "c")
    monkeypatch.setattr(sys, "argv", ["sigmascope", "lora", "validate", *paths])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 130
    assert capsys.readouterr() == ("", f"{line}\n")


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize("again", [False, True])
def test_ctrl_c_ends_with_an_exit_code_at_any_moment(again: bool) -> None:
    """While Python executes text, which it remembers, and again while it waits for a thread."""
    code = """if True:
        import signal, sys, threading, time
        from sigmascope.cli import main, root
        def stop(**_):
            threading.Thread(target=time.sleep, args=(WAIT,)).start()
            exec("signal.raise_signal(signal.SIGINT)")
        root.app = stop
        if AGAIN:
            threading._register_atexit(lambda: signal.raise_signal(signal.SIGINT))
        main()
    """
    code = code.replace("AGAIN", str(again)).replace("WAIT", "60" if again else "0")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Stopped by Ctrl-C.\n")


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_in_an_import_that_swallows_it_stops_the_command_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As PyTorch's import of NumPy does, in C."""
    code = """if True:
        import signal
        __name__ = "numpy.core"
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            pass
    """
    (tmp_path / "swallowing_sigint.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)

    def command() -> None:
        with stopping_after_torch():
            importlib.import_module("swallowing_sigint")
            time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        command()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_in_the_first_import_of_torch_ends_the_process_at_once(tmp_path: Path) -> None:
    """Nothing is being written then, and on a busy machine that import takes many seconds."""
    (tmp_path / "torch").mkdir()
    slow = "import signal, time\nsignal.raise_signal(signal.SIGINT)\ntime.sleep(60)\n"
    (tmp_path / "torch/__init__.py").write_text(slow)
    code = """if True:
        from sigmascope.cli.groups import stopping_after_torch
        print("before", end="")
        with stopping_after_torch():
            import torch
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "before", "Stopped by Ctrl-C.\n")


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_a_command_s_time_limit_by_an_alarm_stays() -> None:
    code = """if True:
        import signal, time
        from sigmascope.cli.groups import stopping_after_torch
        signal.alarm(1)
        with stopping_after_torch():
            pass
        time.sleep(20)
    """
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert done.returncode == -signal.SIGALRM


def test_commands_that_import_torch_wait_for_it() -> None:
    heard: list[bool] = []
    group = commands_on_demand({}, imports_torch=True)(name="lora", invoke_without_command=True)

    def seen() -> None:
        heard.append(signal.getsignal(signal.SIGINT) is not signal.default_int_handler)

    group.callback = seen
    group.main([], standalone_mode=False)
    assert heard == [True]


def test_demo_is_a_command() -> None:
    listed = typer.main.get_command(root.app).commands  # type: ignore[attr-defined]  # a group has them
    assert listed["demo"].help.startswith("Make, prove, apply and watch a LoRA")


def test_control_characters_of_a_file_do_not_reach_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_with(
        CheckpointError("model.safetensors", "has no \x1b[2Jweight.", hint="Look at \x1b]0;it\x07."),
        monkeypatch,
    )
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert "\x07" not in err


def test_a_command_does_not_wait_for_the_others() -> None:
    code = """if True:
        import sys
        from sigmascope.cli import main
        sys.argv = ["sigmascope", "lora", "inspect", "--help"]
        try:
            main()
        finally:
            print([name for name in sys.modules if name.startswith("sigmascope.cli.lora.")], file=sys.stderr)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "sigmascope.cli.lora.inspect" in done.stderr
    assert not {"extract", "calibration", "grid", "merge", "plan"} & set(
        re.findall(r"lora\.(\w+)", done.stderr)
    )
    assert "Usage: sigmascope lora inspect" in done.stdout


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (("--rank", "zero"), "Invalid value for '--rank': 'zero' should be a valid integer."),
        (("--format", "kohyaa"), "'kohyaa' is not one of 'native',"),
        (("--min_success_rate", "300"), "'300' should be less than or equal to 100."),
    ],
)
def test_a_value_that_does_not_do_is_in_the_error(
    option: tuple[str, str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = {"--rank": "resize", "--format": "convert"}.get(option[0], "validate")
    monkeypatch.setattr(sys, "argv", ["sigmascope", "lora", command, "a.safetensors", *option])
    with pytest.raises(SystemExit) as stop:
        root.run()
    assert stop.value.code == 2
    told = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert says in told
    assert "Value error" not in told
