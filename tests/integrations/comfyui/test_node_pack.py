import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from sigmascope.cli.root import app
from sigmascope.errors import ConfigError
from sigmascope.integrations.autostart import is_comfyui
from sigmascope.integrations.comfyui import node_pack


@pytest.fixture
def comfyui(tmp_path: Path) -> Path:
    """A folder that looks like ComfyUI's, of which one function is as an instrument knows it."""
    for folder in ("comfy", "comfy_execution", "custom_nodes"):
        (tmp_path / folder).mkdir()
    (tmp_path / "main.py").write_text("")
    (tmp_path / "comfyui_version.py").write_text('__version__ = "0.99.1"\n')
    (tmp_path / "comfy" / "utils.py").write_text("def load_torch_file(ckpt, further=None): ...\n")
    (tmp_path / "comfy" / "lora.py").write_text("def load_lora(file): ...\n")
    return tmp_path


def run(*words: str) -> str:
    done = CliRunner().invoke(app, ["comfyui", *words])
    assert done.exit_code == 0, done.output
    return done.output


def test_it_is_installed_seen_and_taken_away(comfyui: Path) -> None:
    before = sorted(comfyui.rglob("*"))
    run("install", str(comfyui))
    run("install", str(comfyui))
    (pack,) = (comfyui / "custom_nodes").iterdir()
    assert {file.name for file in pack.iterdir()} == {"__init__.py", "pyproject.toml", "requirements.txt"}
    (pack / "__pycache__").mkdir()
    known = json.loads(run("status", str(comfyui), "--json"))
    assert (known["installed"], known["comfyui"], known["records"]) == (True, "0.99.1", [])
    run("uninstall", str(comfyui))
    assert sorted(comfyui.rglob("*")) == before
    assert "Nothing was installed" in run("uninstall", str(comfyui))


def test_of_a_folder_that_is_a_link_the_link_is_taken_away(comfyui: Path, tmp_path: Path) -> None:
    pack, elsewhere = node_pack.install(comfyui), tmp_path / "elsewhere"
    pack.rename(elsewhere)
    pack.symlink_to(elsewhere)
    assert "Removed" in run("uninstall", str(comfyui))
    assert not pack.is_symlink()
    assert (elsewhere / "__init__.py").exists()


def test_a_link_that_leads_nowhere_is_named(comfyui: Path) -> None:
    (comfyui / "custom_nodes" / "sigmascope").symlink_to(comfyui / "nowhere")
    with pytest.raises(ConfigError, match="leads nowhere"):
        node_pack.install(comfyui)


def test_a_folder_of_ours_under_another_name_is_ours(comfyui: Path) -> None:
    """As where it was cloned, or copied by hand: two of them would be two loaders."""
    packs = comfyui / "custom_nodes"
    other = packs / "ComfyUI-Sigmascope"
    node_pack.install(comfyui).rename(other)
    (other / "requirements.txt").unlink()
    assert json.loads(run("status", str(comfyui), "--json"))["installed"]
    assert node_pack.install(comfyui) == other
    assert (other / "requirements.txt").exists()
    (packs / "sigmascope").mkdir()
    (packs / "sigmascope" / "__init__.py").write_bytes((other / "__init__.py").read_bytes())
    assert "Removed" in run("uninstall", str(comfyui))
    assert list(packs.iterdir()) == []


def test_a_folder_that_is_switched_off_is_not_installed(comfyui: Path) -> None:
    node_pack.install(comfyui).rename(comfyui / "custom_nodes" / "sigmascope.disabled")
    assert not node_pack.status(comfyui)["installed"]


def test_status_says_which_functions_do_not_fit(comfyui: Path) -> None:
    why_not = {part["name"]: part["why_not"] for part in node_pack.status(comfyui)["instruments"]}
    assert why_not["files"] is None
    assert why_not["lora"] == "comfy.lora.load_lora has no parameter lora, to_load"
    assert why_not["prompts"] == "execution.py cannot be read (FileNotFoundError)"


def test_status_says_what_the_last_start_found(comfyui: Path) -> None:
    folder = comfyui / "user" / "sigmascope"
    folder.mkdir(parents=True)
    off = {"name": "files", "gives": "", "state": "off", "reason": "planted"}
    (folder / "status.json").write_text(json.dumps({"instruments": [off]}))
    (files,) = (part for part in node_pack.status(comfyui)["instruments"] if part["name"] == "files")
    assert files["last_start"] == "off: planted"
    assert "at the last start off: planted" in run("status", str(comfyui))


@pytest.mark.parametrize("text", ["", "[1]", '{"instruments": 3}', '{"instruments": ["files", {}]}', "{}"])
def test_a_damaged_status_of_the_last_start_is_none(comfyui: Path, text: str) -> None:
    folder = comfyui / "user" / "sigmascope"
    folder.mkdir(parents=True)
    (folder / "status.json").write_text(text)
    known = node_pack.status(comfyui)
    assert known["last_start"] is None
    assert {part["last_start"] for part in known["instruments"]} == {None}


@pytest.mark.parametrize("file", ["__init__.py", "nodes.py"])
def test_what_others_put_there_is_left_alone(comfyui: Path, file: str) -> None:
    if file == "nodes.py":
        node_pack.install(comfyui)
    pack = comfyui / "custom_nodes" / "sigmascope"
    pack.mkdir(exist_ok=True)
    (pack / file).write_text("theirs = 1\n")
    with pytest.raises(ConfigError):
        node_pack.uninstall(comfyui)
    assert (pack / file).read_text() == "theirs = 1\n"


def test_a_folder_that_is_no_comfyui_is_refused(tmp_path: Path) -> None:
    for act in (node_pack.install, node_pack.uninstall, node_pack.status):
        with pytest.raises(ConfigError, match=r"no main\.py"):
            act(tmp_path)


def test_a_base_directory_takes_the_loader_and_its_last_start_alone_says_what_is_on(tmp_path: Path) -> None:
    for folder in ("custom_nodes", "models", "user/sigmascope"):
        (tmp_path / folder).mkdir(parents=True)
    on = {"name": "files", "gives": "", "state": "on", "reason": None}
    (tmp_path / "user" / "sigmascope" / "status.json").write_text(json.dumps({"instruments": [on]}))
    run("install", str(tmp_path))
    known = node_pack.status(tmp_path)
    assert (known["installed"], known["comfyui"]) == (True, None)
    assert {part["fits"] for part in known["instruments"]} == {None}
    assert {part["name"]: part["last_start"] for part in known["instruments"]}["files"] == "on"
    assert "off" not in run("status", str(tmp_path))
    run("uninstall", str(tmp_path))
    assert not list((tmp_path / "custom_nodes").iterdir())


def test_records_are_counted_where_the_environment_says_that_they_are(
    comfyui: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "sigmascope-prompt-1.json").write_text("{}")
    monkeypatch.setenv("SIGMASCOPE_COMFYUI_RECORDS", str(elsewhere))
    assert node_pack.status(comfyui)["records"] == [str(elsewhere / "sigmascope-prompt-1.json")]


def test_the_loader_never_stops_comfyui(comfyui: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ModuleType("sigmascope.integrations.comfyui.loader")  # without what the loader asks of it
    monkeypatch.setitem(sys.modules, broken.__name__, broken)
    names: dict[str, object] = {}
    exec((node_pack.install(comfyui) / "__init__.py").read_text(), names)
    assert names["NODE_CLASS_MAPPINGS"] == {}


def test_comfyui_is_known_by_what_lies_beside_its_main(comfyui: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    assert is_comfyui(["python", str(comfyui / "main.py"), "--cpu"])
    assert not is_comfyui(["python", str(other / "main.py")])
    assert not is_comfyui(["python", str(comfyui / "script.py")])
