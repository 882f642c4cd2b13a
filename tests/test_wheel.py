"""The wheel, installed where the repository is not: what a user of the package gets."""

import json
import os
import shlex
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = """
import torch
from sigmascope.monitor import stage, step

with stage("denoising"):
    for _ in range(3):
        with step():
            torch.ones(8, 8).sum()
"""


def run(*command: str | Path, folder: Path) -> str:
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SIGMASCOPE"))
    }
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=clean, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the wheel, and everything else from this one."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--quiet", "--disable-pip-version-check", "--no-deps")
    run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", folder, ROOT, folder=folder)
    (wheel,) = folder.glob("sigmascope-*.whl")
    venv.create(folder / "env", with_pip=False)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "env"), "platbase": ""}))
    # A plain path: what is installed there as an editable checkout, this repository, is not found through it.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    programs = folder / "env" / "bin"
    run(
        sys.executable, "-m", "pip", "--python", programs / "python", "install", *options, "--no-index", wheel,
        folder=folder,
    )  # fmt: skip
    return programs


@pytest.mark.slow
def test_it_has_all_that_the_commands_need(installed: Path, tmp_path: Path) -> None:
    where = run(installed / "python", "-c", "import sigmascope; print(sigmascope.__file__)", folder=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)
    report = json.loads(run(installed / "sigmascope", "doctor", "--json", folder=tmp_path))
    assert (
        report["host"]["libraries"]["sigmascope"]
        == run(installed / "sigmascope", "--version", folder=tmp_path).strip()
    )
    (tmp_path / "script.py").write_text(SCRIPT)
    run(installed / "sigmascope", "watch", "--output", "run.json", "script.py", folder=tmp_path)
    read = "from sigmascope.records.serialization import load_run; print(len(load_run('run.json').stage('denoising').steps))"
    assert run(installed / "python", "-c", read, folder=tmp_path).strip() == "3"
    run(installed / "sigmascope", "show", "run.json", "--html", "report.html", folder=tmp_path)
    assert "3 steps" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "| imports" in run(installed / "sigmascope", "show", "run.json", "--markdown", folder=tmp_path)
    run(installed / "sigmascope", "demo", folder=tmp_path)
    assert (tmp_path / "sigmascope-demo").is_dir()


@pytest.mark.slow
def test_the_command_that_adds_an_extra_works_there(installed: Path, tmp_path: Path) -> None:
    ask = "from sigmascope.installation import install_extra; print(install_extra('nvidia'))"
    command = shlex.split(run(installed / "python", "-c", ask, folder=tmp_path))
    assert command[-1].endswith(".whl[nvidia]")
    found = run(*command, "--dry-run", "--no-deps", "--no-index", "--force-reinstall", folder=tmp_path)
    assert "Would install sigmascope-" in found
