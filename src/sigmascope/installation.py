"""How to install what is missing into the installation at hand.

Sigmascope may lie in a checkout, come from a wheel or a repository, or from an index: `direct_url.json`
(PEP 610) says which. If nothing says it, the packages of an extra are named one by one, which works anywhere.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import url2pathname

_PACKAGE: Final = Path(__file__).parent


def install_packages(*requirements: str) -> str:
    """The command that installs packages of an index for this interpreter."""
    return " ".join((_installer(), *(_quoted(requirement) for requirement in requirements)))


def install_extra(extra: str, *, package: Path = _PACKAGE, distribution: str = "sigmascope") -> str:
    """The command that adds an extra to the installation at hand.

    Args:
        extra: Such as "lbm".
        package: The folder of the code that runs.
        distribution: The name that it is installed under, if it is.
    """
    checkout = package.parent.parent
    if (checkout / "pyproject.toml").is_file() and package.parent.name == "src":
        return f"{_installer()} -e {_quoted(f'{checkout}[{extra}]')}"
    origin = _origin(distribution)
    url = str(origin.get("url", ""))
    if url.startswith("file:"):
        path = Path(url2pathname(urlsplit(url).path))
        if path.exists():
            return f"{_installer()} {_quoted(f'{path}[{extra}]')}"
    elif url:
        version_control = origin.get("vcs_info")
        if version_control is not None:
            url = f"{version_control['vcs']}+{url}@{version_control['commit_id']}"
        return install_packages(f"{distribution}[{extra}] @ {url}")
    return install_packages(*_requirements(distribution, extra) or [f"{distribution}[{extra}]"])


def _installer() -> str:
    found = shutil.which("python")
    is_first = found is not None and Path(found) == Path(sys.executable)
    python = "python" if is_first else _quoted(sys.executable)
    return f"{python} -m pip install" if _has_pip() else f"uv pip install --python {python}"


def _has_pip() -> bool:
    """Whether it is here; `uv venv` makes environments without it.

    Its metadata say so. To look for the module makes setuptools believe that pip runs, and take off its distutils.
    """
    try:
        metadata.version("pip")
    except metadata.PackageNotFoundError:
        return False
    return True


def _quoted(text: str) -> str:
    """For a shell; a path below the home folder as ~/…, which names no user."""
    if os.name == "nt":
        return subprocess.list2cmdline([text])
    home = f"{Path.home()}{os.sep}"
    return f"~/{shlex.quote(text.removeprefix(home))}" if text.startswith(home) else shlex.quote(text)


def _origin(distribution: str) -> dict[str, Any]:
    """What the installer wrote of where the distribution came from; nothing if it came from an index."""
    try:
        return dict(json.loads(metadata.distribution(distribution).read_text("direct_url.json") or "{}"))
    except (metadata.PackageNotFoundError, ValueError, TypeError):
        return {}


def _requirements(distribution: str, extra: str) -> list[str]:
    from packaging.requirements import Requirement

    try:
        written = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return []
    found: dict[str, None] = {}
    for requirement in map(Requirement, written):
        marker = requirement.marker
        if marker is None or not marker.evaluate({"extra": extra}) or marker.evaluate({"extra": ""}):
            continue
        if requirement.name == distribution:
            for contained in sorted(requirement.extras - {extra}):
                found |= dict.fromkeys(_requirements(distribution, contained))
        else:
            found[f"{requirement.name}{requirement.specifier}"] = None
    return list(found)
