"""Results alone are on stdout, whatever libraries print."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sigmascope.cli.console import needs_extra, stdout_for_results

NOISY = "import os; print('I am here'); os.write(1, b'compiled\\n'); os.system('echo linked')"


@pytest.fixture
def noisy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package that speaks as it is imported: from Python, past it, and from a process that it starts."""
    (tmp_path / "noisy_package.py").write_text(NOISY, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "noisy_package", raising=False)
    return "noisy_package"


def test_what_a_package_prints_while_it_is_imported_goes_to_stderr(
    noisy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    print("before")  # noqa: T201 - to be seen on stdout
    with needs_extra("lbm"):
        __import__(noisy)
    print("after")  # noqa: T201
    captured = capfd.readouterr()
    assert captured.out == "before\nafter\n"
    assert sorted(captured.err.splitlines()) == ["I am here", "compiled", "linked"]


def test_an_error_in_the_block_gives_stdout_back(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError), stdout_for_results():
        raise RuntimeError
    os.write(1, b"result\n")
    assert capfd.readouterr().out == "result\n"


@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")
@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "1>&- 2>&-"])
def test_closed_streams_are_no_error(closed: str) -> None:
    """As a service may be started, without them."""
    code = (
        "from sigmascope.cli.console import stdout_for_results\n"
        "with stdout_for_results(): pass\n"
        "raise SystemExit(7)"
    )
    done = subprocess.run(["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code], check=False)
    assert done.returncode == 7
