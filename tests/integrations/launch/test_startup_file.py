import subprocess
import sys
from pathlib import Path

import pytest
from tests.integrations.programs import Ended, ended, environment

from sigmascope.errors import WriteError
from sigmascope.integrations.launch import NAME, install, startup_file, uninstall

STAGED = "import sigmascope\nwith sigmascope.stage('denoising'):\n    pass\nprint('done')"


def under_startup_file(folder: Path, code: str, **more: str) -> Ended:
    """A Python process whose packages include the folder, as they include site-packages."""
    install(folder / NAME)
    as_site = f"import site; site.addsitedir({str(folder)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", as_site + code],
        cwd=folder,
        env=environment(**more),
        capture_output=True,
        text=True,
        check=False,
    )
    return ended(done)


def test_without_the_variable_nothing_of_ours_is_loaded(tmp_path: Path) -> None:
    code = "import sys; print([name for name in sys.modules if name.startswith('sigmascope')])"
    assert under_startup_file(tmp_path, code).out == "[]\n"


@pytest.mark.parametrize("value", ["", "0", "no"])
def test_only_1_switches_it_on(value: str, tmp_path: Path) -> None:
    code = "import sys; print('sigmascope' in sys.modules)"
    assert under_startup_file(tmp_path, code, SIGMASCOPE=value).out == "False\n"


@pytest.mark.slow
def test_with_the_variable_stages_are_recorded(tmp_path: Path) -> None:
    done = under_startup_file(tmp_path, STAGED, SIGMASCOPE="1", SIGMASCOPE_QUIET="1")
    assert (done.code, done.out, done.err) == (0, "done\n", "")
    assert len(list(tmp_path.glob("sigmascope-python-*.json"))) == 1


def test_a_process_without_anything_to_watch_says_nothing(tmp_path: Path) -> None:
    done = under_startup_file(tmp_path, "print('done')", SIGMASCOPE="1")
    assert (done.code, done.out, done.err, done.told) == (0, "done\n", "", "")


def test_a_package_that_is_gone_is_one_line(tmp_path: Path) -> None:
    code = "print('done')"
    hide = f"import sys; sys.modules['sigmascope'] = None; import site; site.addsitedir({str(tmp_path)!r})\n"
    install(tmp_path / NAME)
    done = subprocess.run(
        [sys.executable, "-c", hide + code],
        env=environment(SIGMASCOPE="1"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "done\n"
    assert done.stderr.count("\n") == 1
    assert "nothing is watched" in done.stderr


def test_it_lies_beside_the_packages() -> None:
    assert startup_file().parent.name == "site-packages"


def test_what_was_installed_is_taken_away(tmp_path: Path) -> None:
    assert install(tmp_path / NAME).is_file()
    assert uninstall(tmp_path / NAME)
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_was_installed_nothing_is_taken_away(tmp_path: Path) -> None:
    assert not uninstall(tmp_path / NAME)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(WriteError, match="taken"):
        install(tmp_path / "taken" / NAME)
