"""The commands that add what is missing, for each way in which the package can be installed."""

import json
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import sigmascope
from sigmascope.installation import install_extra, install_packages

ROOT = Path(__file__).parents[1]
METADATA = """Metadata-Version: 2.4
Name: tried
Version: 1.0
Provides-Extra: small
Provides-Extra: large
Requires-Dist: numpy>=1
Requires-Dist: torch>=2; extra == "small"
Requires-Dist: tried[small]; extra == "large"
Requires-Dist: nvidia-ml-py<14,>=12; extra == "large"
Requires-Dist: never; sys_platform == "nowhere" and extra == "large"
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The metadata of a distribution `tried`, on the path; without `direct_url.json`, as from an index."""
    folder = tmp_path / "tried-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(METADATA)
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def words_of(installed: Path, extra: str) -> list[str]:
    command = shlex.split(install_extra(extra, package=installed.parent / "tried", distribution="tried"))
    assert command[1:4] == ["-m", "pip", "install"]
    return command[4:]


def test_a_checkout_is_named_with_its_folder_and_this_interpreter() -> None:
    command = shlex.split(install_extra("lbm"))
    assert (
        Path(command[0].replace("~", str(Path.home()), 1)).samefile(sys.executable) or command[0] == "python"
    )
    assert command[1:-1] == ["-m", "pip", "install", "-e"]
    folder, extra = re.fullmatch(r"(.+)\[(\w+)\]", command[-1]).groups()  # type: ignore[union-attr]  # else it fails here
    assert Path(folder).expanduser() == Path(sigmascope.__file__).parents[2]
    assert extra == "lbm"


def test_a_wheel_is_named_while_it_is_there(installed: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "my wheels" / "tried-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.touch()
    (installed / "direct_url.json").write_text(json.dumps({"url": wheel.as_uri(), "archive_info": {}}))
    assert words_of(installed, "small") == [f"{wheel}[small]"]
    wheel.unlink()
    assert words_of(installed, "small") == ["torch>=2"]


@pytest.mark.parametrize(("origin", "requirement"), [
    ({"url": "https://example.org/tried-1.0.whl", "archive_info": {}},
     "tried[small] @ https://example.org/tried-1.0.whl"),
    ({"url": "https://example.org/tried.git", "vcs_info": {"vcs": "git", "commit_id": "abc123"}},
     "tried[small] @ git+https://example.org/tried.git@abc123"),
])  # fmt: skip
def test_what_came_from_elsewhere_is_named_by_its_address(
    origin: dict[str, object], requirement: str, installed: Path
) -> None:
    (installed / "direct_url.json").write_text(json.dumps(origin))
    assert words_of(installed, "small") == [requirement]


@pytest.mark.parametrize("damaged", ["", "{", "[1]", "null"])
def test_without_an_origin_the_packages_themselves_are_named(damaged: str, installed: Path) -> None:
    if damaged:
        (installed / "direct_url.json").write_text(damaged)
    assert words_of(installed, "large") == ["torch>=2", "nvidia-ml-py<14,>=12"]


def test_an_environment_without_pip_is_told_uvs_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    assert install_packages("lpips").startswith("uv pip install --python ")


def test_to_name_a_command_changes_no_import_of_the_hosts() -> None:
    """Setuptools' finder gives its own distutils until somebody looks for pip."""
    script = (
        "import importlib.util, sigmascope.installation\n"
        "before = importlib.util.find_spec('distutils')\n"
        "sigmascope.installation.install_packages('lpips')\n"
        "after = importlib.util.find_spec('distutils')\n"
        "assert type(before and before.loader) is type(after and after.loader), (before, after)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_folder_below_home_names_no_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    (tmp_path / "my code" / "src").mkdir(parents=True)
    (tmp_path / "my code" / "pyproject.toml").touch()
    command = install_extra("ui", package=tmp_path / "my code" / "src" / "sigmascope")
    assert command.endswith(" -e ~/'my code[ui]'")
    assert shlex.split(command)[-1] == "~/my code[ui]"


def test_no_message_and_no_page_names_the_package_as_if_an_index_had_it() -> None:
    files = [*ROOT.glob("src/**/*.py"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*"), ROOT / "README.md"]
    named = re.compile(r"pip install [^\n`]*sigmascope\[")
    wrong = [str(file) for file in files if file.is_file() and named.search(file.read_text(encoding="utf-8"))]
    assert wrong == []


def test_messages_leave_the_command_to_one_module() -> None:
    files = (Path(sigmascope.__file__).parent).rglob("*.py")
    wrong = [file.name for file in files if "pip install" in file.read_text(encoding="utf-8")]
    assert wrong == ["installation.py"]
