"""The file that lets `SIGMASCOPE=1` switch the watch on in any Python process of an environment."""

import sysconfig
from pathlib import Path

from sigmascope.errors import WriteError
from sigmascope.records.atomic import atomic_path
from sigmascope.records.os_errors import reason_of, writing_hint

NAME = "sigmascope-watch.pth"

# Python runs each line of a .pth file that begins with "import" when it starts. Without the variable this one does
# nothing; with it, a Sigmascope that is gone is no error.
LINE = (
    'import os, sys; exec("try:\\n'
    " from sigmascope.integrations.autostart.process import start_from_environment as start\\n start()\\n"
    "except Exception as failure:\\n sys.stderr.write(f'Sigmascope: nothing is watched: {failure}\\\\n')"
    "\") if os.environ.get('SIGMASCOPE') == '1' else None\n"
)


def startup_file() -> Path:
    """Where the file lies: beside this environment's packages."""
    return Path(sysconfig.get_path("purelib")) / NAME


def install(path: Path | None = None) -> Path:
    """Put the file there.

    Args:
        path: Where; None: into this environment.

    Raises:
        WriteError: It cannot be written.
    """
    path = path or startup_file()
    with atomic_path(path) as temporary:
        temporary.write_text(LINE, encoding="utf-8")
    return path


def uninstall(path: Path | None = None) -> bool:
    """Take the file away; False if there was none.

    Args:
        path: Where it lies; None: in this environment.

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
