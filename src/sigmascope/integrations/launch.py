"""`sigmascope watch script.py`: become Python on the user's script; and the startup file for `SIGMASCOPE=1`.

`launch` starts Python in place of this process, with the watch in it. `install` writes the file that lets
`SIGMASCOPE=1` switch the watch on in any Python process of an environment. Only these commands load this module:
processes that are watched do not.
"""

import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from sigmascope.errors import ConfigError, WriteError
from sigmascope.files import atomic_path, reason_of, writing_hint
from sigmascope.integrations.watch_settings import LAUNCH_PREFIX, Settings

BOOTSTRAP = Path(__file__).parent / "bootstrap"
_PATH = "PYTHONPATH"
NAME = "sigmascope-watch.pth"
# Python runs each line of a .pth file that begins with "import" when it starts. Without the variable this one does
# nothing; with it, a Sigmascope that is gone is no error.
LINE = (
    'import os, sys; exec("try:\\n'
    " from sigmascope.integrations.autostart import start_from_environment as start\\n start()\\n"
    "except Exception as failure:\\n sys.stderr.write(f'Sigmascope: nothing is watched: {failure}\\\\n')"
    "\") if os.environ.get('SIGMASCOPE') == '1' else None\n"
)


def launch(program: Sequence[str], settings: Settings) -> NoReturn:
    """Become the program: same process, same arguments, same streams.

    Raises:
        ConfigError: Python was started with -E, -I or -S, which keep the watch out.
    """
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise ConfigError(
            "Python was started with -E, -I or -S, so the program cannot be watched from outside.",
            hint="Leave the option out, or call sigmascope.watch() in the program.",
        )
    command = [sys.executable, *interpreter_options(sys.orig_argv, len(sys.argv)), *program]
    environment = environment_for(os.environ, settings)
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "nt":  # there exec starts another process and ends this one with 0
        sys.exit(exit_code_of(command, environment))
    os.execve(sys.executable, command, environment)


def interpreter_options(original: Sequence[str], own: int) -> list[str]:
    """Python's own options among the words of a command line, such as `-X dev`."""
    options = list(original[1 : max(1, len(original) - own)])
    return options[:-1] if options and options[-1] == "-m" else options


def environment_for(environment: Mapping[str, str], settings: Settings) -> dict[str, str]:
    """The environment of the launched process: `bootstrap` is the first place where it looks for modules."""
    variables = {**environment, **settings.as_environment(LAUNCH_PREFIX)}
    original = environment.get(_PATH)
    if original is not None:
        variables[f"{LAUNCH_PREFIX}{_PATH}"] = original
    variables[_PATH] = os.pathsep.join([str(BOOTSTRAP), *([original] if original else [])])
    return variables


def exit_code_of(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a program to its end and give its exit code. Ctrl-C is for the program, which the console tells too."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return subprocess.call(command, env=dict(environment))
    finally:
        signal.signal(signal.SIGINT, before)


def install(path: Path | None = None) -> Path:
    """Put the file there.

    Raises:
        WriteError: It cannot be written.
    """
    path = path or startup_file()
    with atomic_path(path) as temporary:
        temporary.write_text(LINE, encoding="utf-8")
    return path


def uninstall(path: Path | None = None) -> bool:
    """Take the file away; False if there was none.

    Raises:
        WriteError: It cannot be removed.
    """
    path = path or startup_file()
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise WriteError(
            path, f"cannot be removed ({reason_of(error)}).", hint=writing_hint(error)
        ) from error
    return True


def startup_file() -> Path:
    """Where the file lies: beside this environment's packages."""
    return Path(sysconfig.get_path("purelib")) / NAME
