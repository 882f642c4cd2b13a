import subprocess
import sys
from pathlib import Path

import pytest

import sigmascope

HEAVY = ("torch", "diffusers", "transformers", "peft", "numpy")


def loaded_after(code: str) -> set[str]:
    """Names of heavy packages that a fresh interpreter has loaded after running `code`."""
    probe = f"import sys\n{code}\nprint(' '.join(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split()) if done.stdout.strip() else set()


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_after("import sigmascope") == set()


def test_help_loads_nothing_heavy() -> None:
    code = (
        "sys.argv = ['sigmascope', '--help']\n"
        "from sigmascope.cli import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code"
    )
    assert loaded_after(code) == set()


def test_help_of_every_command_loads_no_torch() -> None:
    commands = ("lora extract", "lora validate", "lbm infer", "demo", "bench", "check", "compare")
    code = (
        "from sigmascope.cli import main\n"
        f"for command in {commands!r}:\n"
        "    sys.argv = ['sigmascope', *command.split(), '--help']\n"
        "    try:\n        main()\n    except SystemExit as stop:\n        assert not stop.code"
    )
    assert "torch" not in loaded_after(code)


def test_starting_a_watch_loads_nothing_heavy(tmp_path: Path) -> None:
    """The program that the command becomes loads what it needs itself, a second time."""
    files = ["--output", str(tmp_path / "run.json"), "--trace", str(tmp_path / "trace.json")]
    code = (
        "from sigmascope.cli import main\n"
        "from sigmascope.integrations import launch\n"
        "launch.launch = lambda *_: print('launched')\n"
        f"sys.argv = {['sigmascope', 'watch', *files, '-c', 'pass']!r}\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code"
    )
    assert loaded_after(code) == set()


def test_describing_a_model_loads_nothing_heavy() -> None:
    assert loaded_after("import sigmascope.lbm.config") == set()


@pytest.mark.slow
def test_reading_the_settings_of_a_training_loads_no_diffusers() -> None:
    assert loaded_after("import sigmascope.lbm.training.settings") <= {"torch", "numpy"}


@pytest.mark.parametrize("name", sigmascope.__all__)
def test_every_public_name_can_be_had(name: str) -> None:
    assert getattr(sigmascope, name) is not None


def test_names_with_an_underscore_work_and_are_not_offered() -> None:
    assert callable(sigmascope._analyze_latent_output)
    assert [name for name in sigmascope.__all__ if name.startswith("_")] == ["__version__"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"attribute.*nonsense"):
        _ = sigmascope.nonsense  # type: ignore[attr-defined]


def test_rooms_import_only_whom_they_may() -> None:
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--config", root / ".importlinter", "--no-cache"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
