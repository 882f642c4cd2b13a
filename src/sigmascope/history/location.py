"""Where runs are kept, and whether: what the environment says. No SQL here, since each watched process asks."""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import platformdirs

STORE: Final = "SIGMASCOPE_STORE"
"""The environment variable that names another store: an SQLAlchemy URL, or the path of an SQLite file."""
KEEP: Final = "SIGMASCOPE_KEEP"
"""The environment variable that is "0" where no run is to be kept."""
SQLITE: Final = "sqlite:///"
IN_MEMORY: Final = ":memory:"
"""SQLite's name of a database that ends with the process."""
_FILE: Final = "runs.db"
_MISTYPED: Final = re.compile(r"(?:postgres|postgresql|sqlite)(?:\+\w+)?:(?!//)")
"""How a URL begins that lacks a slash: it may hold a password, and is no path."""


def is_kept(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether runs are kept where nobody said otherwise."""
    return environment.get(KEEP) != "0"


def store_url(environment: Mapping[str, str] = os.environ) -> str:
    """The URL of the store, as SQLAlchemy has it. The path of an SQLite file is whole in it, whatever folder comes next."""
    named = environment.get(STORE, "").strip()
    if not named:
        return url_of_file(data_folder() / _FILE)
    if "://" not in named and _MISTYPED.match(named) is None:
        return f"{SQLITE}{IN_MEMORY}" if named == IN_MEMORY else url_of_file(_whole(named))
    file = file_of(named)
    scheme, separator, path = named.partition(":///")
    is_plain = file is not None and "?" not in path
    return f"{scheme}{separator}{_quoted(_whole(str(file)))}" if is_plain else named


def url_of_file(file: str | Path) -> str:
    """The URL of an SQLite file, whatever is in its name."""
    return f"{SQLITE}{_quoted(str(file))}"


def _quoted(path: str) -> str:
    """A path in a URL, in which ? would begin a query and % a code. `file_of` has it back."""
    return path.replace("%", "%25").replace("?", "%3F")


def _whole(path: str) -> str:
    """From the root on. Where neither the home nor the working folder is known, opening the file tells."""
    expanded = os.path.expanduser(path)  # noqa: PTH111 - leaves ~ where there is no home, where `Path` raises
    with suppress(OSError):
        return os.path.abspath(expanded)  # noqa: PTH100 - as above
    return expanded


def data_folder() -> Path:
    """The user's own folder for what Sigmascope keeps; it need not be there."""
    return platformdirs.user_data_path("sigmascope", appauthor=False)


def file_of(url: str) -> Path | None:
    """The file of an SQLite store; None: it is no file."""
    scheme, _, rest = url.partition(":///")
    path = rest.partition("?")[0]
    is_file = scheme.partition("+")[0] == "sqlite" and path not in ("", IN_MEMORY)
    return Path(unquote(path)) if is_file else None


def is_there(file: Path) -> bool:
    """Whether there is something of that name. Also where a folder is closed and nobody can say: opening it tells."""
    try:
        os.stat(file)  # noqa: PTH116 - a name that is no path raises here, too
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True
    return True


def unkept_folder(url: str) -> Path:
    """Where runs go that the store did not take: beside it, or in the user's own folder."""
    return _beside(url, ".unkept")


def live_folder(url: str) -> Path:
    """Where runs that go on say how far they are: beside the store, or in the user's own folder."""
    return _beside(url, ".live")


def _beside(url: str, ending: str) -> Path:
    file = file_of(url)
    is_device = file is not None and os.path.exists(file) and not (file.is_file() or file.is_dir())  # noqa: PTH110 - False where a folder is closed, where `Path` raises
    return data_folder() / f"runs{ending}" if file is None or is_device else file.with_suffix(ending)
