"""Names of files in records tell of no user and no machine."""

import os
import sys
from pathlib import Path

import pytest

from sigmascope.files import short_path, without_home

pytestmark = pytest.mark.skipif(os.name == "nt", reason="POSIX paths")


@pytest.fixture(autouse=True)
def _places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home" / "ada" / "work").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "ada"))
    monkeypatch.chdir(tmp_path / "home" / "ada" / "work")


@pytest.mark.parametrize(
    ("path", "short"),
    [
        ("/usr/lib/python3.12/site-packages/diffusers/loaders/lora.py", "diffusers/loaders/lora.py"),
        ("/usr/lib/python3/dist-packages/numpy/core.py", "numpy/core.py"),
        ("/data/hub/models--a--flux-schnell/snapshots/74/vae", "models--a--flux-schnell/snapshots/74/vae"),
        ("/usr/lib/python3.12/asyncio/events.py", "asyncio/events.py"),
        ("/models/base.safetensors", "models/base.safetensors"),
        ("/base.safetensors", "base.safetensors"),
        ("/", "/"),
        ("stabilityai/sdxl", "stabilityai/sdxl"),
        ("<stdin>", "<stdin>"),
        ("", ""),
    ],
)
def test_a_path_outside_of_the_user_s_folders(path: str, short: str) -> None:
    assert short_path(path) == short


def test_a_file_of_the_working_folder_is_named_from_it() -> None:
    assert short_path(Path.cwd() / "out" / "run.json") == "out/run.json"


def test_a_file_of_the_user_is_named_from_home() -> None:
    assert short_path(Path.home() / "models" / "a.safetensors") == "~/models/a.safetensors"


def test_home_is_not_named_from_a_working_folder_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert short_path(tmp_path / "home" / "ada" / "a.py") == "~/a.py"


def test_a_root_as_working_folder_or_home_shortens_nothing_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir("/")
    monkeypatch.setenv("HOME", "/")
    assert short_path("/srv/team/models/a.py") == "models/a.py"
    assert without_home("/srv/team") == "/srv/team"


def test_a_working_folder_that_is_gone_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: (_ for _ in ()).throw(FileNotFoundError()))
    assert short_path("/srv/team/models/a.py") == "models/a.py"


def test_home_is_taken_out_of_a_text_where_it_is_a_path_of_its_own() -> None:
    home = str(Path.home())
    text = f"'{home}/a.py', {home}: /mnt{home}/b, {home}-old/c"
    assert without_home(text) == f"'~/a.py', ~: /mnt{home}/b, {home}-old/c"


def test_this_python_s_packages_are_named_by_package() -> None:
    assert short_path(str(sys.modules["pytest"].__file__)) == "pytest/__init__.py"
