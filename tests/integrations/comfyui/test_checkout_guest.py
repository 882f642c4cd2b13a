"""A real ComfyUI with faults in our instruments, and with other packs of nodes that watch it too."""

import re
from pathlib import Path

import pytest
from tests.integrations.comfyui.graphs import graph
from tests.integrations.comfyui.server import Server, add_nodes, add_packs, node, packs, serving, states

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


@pytest.mark.parametrize("ours", ["0-sigmascope", "zz-sigmascope"])
def test_beside_other_packs_of_nodes_the_watch_works_and_so_do_they(
    ours: str, base: Path, tmp_path: Path
) -> None:
    packs()
    add_nodes(tmp_path, ours)
    add_packs(tmp_path, "ComfyUI-Crystools", "ComfyUI-KJNodes")
    (tmp_path / "models").symlink_to(base / "models")
    for folder in ("input", "output"):
        (tmp_path / folder).mkdir()
    with serving(tmp_path) as server:
        run = server.run(graph(seed=3))
        kinds = server.ask("/object_info")
    log = next(tmp_path.glob("server-*.log")).read_text()
    assert not re.search(r"IMPORT FAILED.*custom_nodes", log)
    assert "ImageResizeKJ" in kinds
    assert any("Crystools" in (kind.get("python_module") or "") for kind in kinds.values())
    assert run.facts["comfyui"]["instruments_off"] == {}
    assert states(run)["8"] == "run"
    assert len(node(run, "6").steps) == 2
