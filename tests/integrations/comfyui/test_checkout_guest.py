"""A real ComfyUI with faults in our instruments, and with other packs of nodes that watch it too."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from tests.comfy_shapes.checkout import VARIABLE
from tests.integrations.comfyui.graphs import graph
from tests.integrations.comfyui.server import (
    Server,
    add_beside,
    node,
    packs,
    python,
    serving,
    states,
)

from sigmascope.__about__ import __version__
from sigmascope.integrations.comfyui import node_pack

pytestmark = [pytest.mark.comfyui, pytest.mark.slow]


def test_with_faults_at_random_a_real_server_s_prompts_finish_alike(server: Server) -> None:
    try:
        server.watch("end")
        expected = server.pictures(server.prompt(graph(seed=31)))
        for seed in range(1, 9):
            server.ask("/free", {"free_memory": True})
            server.watch("begin", seed)
            assert server.pictures(server.prompt(graph(seed=31))) == expected, seed
            server.prompt(graph("PlantedOutOfMemory", seed=31))
            known = server.watch("look")
            off = {
                one["name"]: one["reason"] for one in known["status"]["instruments"] if one["state"] == "off"
            }
            for name, reason in known["expected"].items():
                assert (name in off) is (reason is not None), (seed, name, off.get(name))
                assert (off.get(name) or "").startswith(reason or "")
    finally:
        server.watch("begin")


@pytest.mark.parametrize("ours_first", [True, False])
def test_beside_other_packs_of_nodes_the_watch_works_and_so_do_they(
    ours_first: bool, base: Path, tmp_path: Path
) -> None:
    options = add_beside(
        base, tmp_path, "ComfyUI-Crystools", "ComfyUI-KJNodes", "ComfyUI-Manager", ours_first=ours_first
    )
    with serving(tmp_path, options=options) as server:
        run = server.run(graph(seed=3))
        kinds = server.ask("/object_info")
        packs_of_manager = server.ask("/customnode/installed")
    log = next(tmp_path.glob("server-*.log")).read_text()
    assert not re.search(r"IMPORT FAILED.*custom_nodes", log)
    assert "ImageResizeKJ" in kinds
    assert any("Crystools" in (kind.get("python_module") or "") for kind in kinds.values())
    assert isinstance(packs_of_manager, dict)
    ours = log.index(": watching prompts")
    assert {ours < log.index(word) for word in ("Crystools version", "### Loading: ComfyUI-Manager")} == {
        ours_first
    }
    assert run.facts["comfyui"]["instruments_off"] == {}
    assert states(run)["8"] == "run"
    assert len(node(run, "6").steps) == 2


def test_comfyui_manager_reads_what_our_folder_says(base: Path, tmp_path: Path) -> None:
    (tmp_path / "custom_nodes").mkdir()
    (tmp_path / "models").mkdir()
    pack = node_pack.install(tmp_path)
    (pack / ".tracking").write_text("")  # as of a pack that it has installed
    asks = """
import json, sys
from importlib import import_module
sys.path[:0] = sys.argv[1:3]
arguments, sys.argv = sys.argv, ["main.py", "--cpu", "--base-directory", sys.argv[4]]
import_module("comfy.options").enable_args_parsing()
core, cnr = import_module("manager_core"), import_module("cnr_utils")
import_module("cm_global").pip_overrides = {}
wanted = []
core.try_install_script = lambda url, path, command, *more, **named: wanted.append(command[-1]) or True
core.manager_util.PIPFixer = lambda *arguments: type("No", (), {"fix_broken": lambda self: None})()
core.unified_manager.execute_install_script("", arguments[3])
print(json.dumps([cnr.read_cnr_info(arguments[3]), wanted]))
"""
    manager = packs() / "ComfyUI-Manager" / "glob"
    words = [python(), "-c", asks, os.environ[VARIABLE], str(manager), str(pack), str(tmp_path)]
    site = os.pathsep.join([str(packs() / "site"), os.environ.get("PYTHONPATH", "")])
    told = subprocess.run(
        words,
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": site},
    )
    known, installed = json.loads(told.stdout.splitlines()[-1])
    assert known == {"id": "sigmascope", "version": __version__, "url": None}
    assert installed == ["sigmascope"]
