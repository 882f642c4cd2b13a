"""Names of files in records tell of no user and no machine."""

import os
import sys
from pathlib import Path

import pytest

from sigmascope.files import short_path, short_paths, without_home

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
        ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap>"),
        ("<a zebracorn ostrichia>", "<code>"),
        ("", ""),
        (r"C:\Users\ada\a.py", "a.py"),
        (r"\\server\team\models\flux\a.py", "flux/a.py"),
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


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("/srv/team/models/a.safetensors: is truncated", "models/a.safetensors: is truncated"),
        ("no '/srv/Jane Doe/new models/a.st' here", "no 'new models/a.st' here"),
        ('"/srv/O\'Brien/x/a.st"', '"x/a.st"'),
        ("/srv/team/x/a.st and /srv/team/y/b.st.", "x/a.st and y/b.st."),
        ("PATH=/srv/team/x:/srv/team/y", "PATH=team/x:team/y"),
        ("(file:///srv/team/x/a.st, line 3)", "(x/a.st, line 3)"),
        (r"C:\Users\ada\x\a.st: is truncated", "x/a.st: is truncated"),
        (repr(r"C:\Users\ada\x\a.st"), "'x/a.st'"),
        (r"in \\server\team\x\a.st", "in x/a.st"),
        ("https://huggingface.co/a/b and a/b/c, ~/a/b, 3 / 4, and/or, /it", None),
        (r"^\\d+\w/[a-z]", None),
    ],
)
def test_paths_within_a_text(text: str, short: str | None) -> None:
    assert short_paths(text) == (text if short is None else short)


def test_a_long_text_of_slashes_takes_no_time() -> None:
    assert len(short_paths("/a b " * 20_000)) == 100_000


@pytest.mark.parametrize(
    ("path", "short"),
    [
        ("/tmp/ipykernel_4711/2205841813.py", "<cell>"),
        (r"C:\Users\Jane Doe\AppData\Local\Temp\ipykernel_9128\361413445.py", "<cell>"),
        ("/srv/ipykernel_4711/preview.py", "ipykernel_4711/preview.py"),
    ],
)
def test_a_cell_of_a_notebook_is_not_named_by_its_hash(path: str, short: str) -> None:
    assert short_path(path) == short
