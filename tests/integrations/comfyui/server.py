"""A ComfyUI that is started as a process, with tiny models in its folders: graphs are posted over HTTP.

`SIGMASCOPE_COMFYUI` names the checkout, `SIGMASCOPE_COMFYUI_PYTHON` a Python with its requirements (else this one), and
`SIGMASCOPE_COMFYUI_NODES` a folder with checkouts of packs of nodes, and with what these need in its folder `site`.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.comfy_shapes.checkout import VARIABLE

import sigmascope
from sigmascope.integrations.comfyui.node_pack import _LOADER
from sigmascope.records.run import Run, Stage

HERE = Path(__file__).parent
FOUND_IN = Path(sigmascope.__file__).parents[1]
Graph = dict[str, dict[str, Any]]


class Server:
    """A ComfyUI that answers."""

    def __init__(self, port: int, base: Path, records: Path, process_id: int = 0) -> None:
        self.port, self.base, self.records, self.process_id = port, base, records, process_id

    def ask(self, path: str, data: Any = None) -> Any:
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or b"null")

    def post(self, graph: Graph, **options: Any) -> str:
        """Queue a graph, with options of ComfyUI's such as `client_id`, and give its id."""
        prompt_id: str = self.ask("/prompt", {"prompt": graph, **options})["prompt_id"]
        return prompt_id

    def prompt(self, graph: Graph) -> str:
        """Post a graph, wait for its end, and give its id."""
        prompt_id = self.post(graph)
        self.wait_for(prompt_id)
        return prompt_id

    def wait_for(self, prompt_id: str) -> dict[str, Any]:
        """What ComfyUI's history has of a prompt, once it is there."""
        for _ in range(12000):
            history = self.ask(f"/history/{prompt_id}")
            if prompt_id in history:
                known: dict[str, Any] = history[prompt_id]
                return known
            time.sleep(0.01)
        raise TimeoutError(prompt_id)

    def pictures(self, prompt_id: str) -> list[bytes]:
        """The files that a prompt saved, in the order of their names."""
        outputs = self.wait_for(prompt_id)["outputs"].values()
        names = sorted(image["filename"] for output in outputs for image in output.get("images", ()))
        return [(self.base / "output" / name).read_bytes() for name in names]

    def record(self, prompt_id: str) -> Run:
        """The record of a prompt that has ended."""
        for _ in range(1000):
            if found := list(self.records.glob(f"*-{prompt_id[:8]}.json")):
                return sigmascope.load_run(found[0])
            time.sleep(0.02)
        raise TimeoutError(f"no record of {prompt_id}")

    def log(self, pattern: str) -> str:
        """What ComfyUI's log has last of a pattern's group."""
        found: list[str] = re.findall(pattern, (self.base / f"server-{self.port}.log").read_text())
        return found[-1]

    def wait_for_log(self, pattern: str) -> None:
        """Wait until ComfyUI's log has a pattern."""
        for _ in range(1000):
            if re.search(pattern, (self.base / f"server-{self.port}.log").read_text()):
                return
            time.sleep(0.02)
        raise TimeoutError(pattern)

    def texts(self, prompt_id: str) -> list[str]:
        """The texts that a prompt's nodes gave."""
        outputs = self.wait_for(prompt_id)["outputs"].values()
        return [text for output in outputs for text in output.get("text", ())]

    def watch(self, act: str, faults: int = 0) -> Any:
        """End the watch of the server ("end"), begin it anew ("begin") or only "look"; what is known of it then."""
        inputs = {"act": act, "faults": faults}
        (text,) = self.texts(self.prompt({"1": {"class_type": "PlantedWatch", "inputs": inputs}}))
        return json.loads(text)

    def free(self) -> None:
        """Let ComfyUI unload all models and forget all outputs, which it does between two prompts: before that one, or after it."""
        self.ask("/free", {"unload_models": True, "free_memory": True})
        self.watch("look")

    def run(self, graph: Graph) -> Run:
        """The record of a graph that is posted now."""
        return self.record(self.prompt(graph))


def python() -> str:
    return os.environ.get(f"{VARIABLE}_PYTHON", sys.executable)


def packs() -> Path:
    """The folder with packs of nodes."""
    folder = os.environ.get(f"{VARIABLE}_NODES")
    if not folder:
        pytest.skip(f"{VARIABLE}_NODES names no folder with packs of nodes")
    return Path(folder)


def make_base(base: Path) -> None:
    """Fill ComfyUI's base folder: tiny models, nodes that plant faults, our loader, and the nodes for GGUF if they are there."""
    words = [python(), str(HERE / "tiny_models.py"), os.environ[VARIABLE], str(base)]
    subprocess.run(words, check=True, capture_output=True)
    add_nodes(base, "sigmascope")
    if os.environ.get(f"{VARIABLE}_NODES"):
        add_packs(base, "ComfyUI-GGUF")


def add_nodes(base: Path, ours: str) -> None:
    """Put the nodes that plant faults there, and our loader under this name."""
    planted, loader = base / "custom_nodes" / "planted", base / "custom_nodes" / ours
    for folder in (planted, loader):
        folder.mkdir(parents=True)
    shutil.copy(HERE / "planted_nodes.py", planted / "__init__.py")
    shutil.copy(HERE / "faults.py", planted / "faults.py")
    (loader / "__init__.py").write_text(_LOADER)


def add_odd_nodes(base: Path, pack: str) -> None:
    """Put nodes there that do what ComfyUI's own do not, as a pack of this name."""
    folder = base / "custom_nodes" / pack
    folder.mkdir(parents=True)
    shutil.copy(HERE / "odd_nodes.py", folder / "__init__.py")


def add_packs(base: Path, *names: str) -> None:
    """Put other packs of nodes there."""
    for name in names:
        shutil.copytree(packs() / name, base / "custom_nodes" / name)


def add_beside(base: Path, folder: Path, *names: str, ours_first: bool) -> list[str]:
    """Fill a base folder with our loader, and other packs that ComfyUI loads after it or before it.

    ComfyUI reads a folder's packs in the order that the file system gives, and folders in the order of its settings.

    Args:
        base: Whose models it uses.
        folder: The new one.
        names: Of the packs.
        ours_first: Whether our loader is loaded before them.

    Returns:
        Options for ComfyUI's command line.
    """
    (folder / "models").symlink_to(base / "models")
    for name in ("input", "output"):
        (folder / name).mkdir()
    more = folder / "more"
    add_nodes(folder if ours_first else more, "sigmascope")
    add_packs(more if ours_first else folder, *names)
    settings = folder / "more.yaml"
    settings.write_text(f"more:\n  custom_nodes: {more / 'custom_nodes'}\n")
    for place in ("__manager", "default/ComfyUI-Manager"):  # of its newer and older settings
        (folder / "user" / place).mkdir(parents=True)
        (folder / "user" / place / "config.ini").write_text("[default]\nnetwork_mode = offline\n")
    return ["--extra-model-paths-config", str(settings)]


@contextmanager
def serving(
    base: Path,
    pages: Path | None = None,
    options: Sequence[str] = (),
    launcher: Sequence[str] = (),
    **variables: str,
) -> Iterator[Server]:
    """Start the checkout's server, with the pages of a frontend if one is given, and end it.

    Args:
        base: ComfyUI's base folder.
        pages: The frontend's.
        options: Of ComfyUI's command line.
        launcher: What Python runs `main.py` by.
        variables: Of its environment.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    records = base / f"records-{port}"
    if pages is None:
        pages = base / "pages"
        pages.mkdir(exist_ok=True)
    words = [python(), *launcher, str(Path(os.environ[VARIABLE]) / "main.py"), "--cpu", "--port", str(port)]
    words += ["--disable-api-nodes", "--base-directory", str(base), "--front-end-root", str(pages)]
    words += ["--database-url", "sqlite:///:memory:", *options]
    site = os.environ.get(f"{VARIABLE}_NODES")
    told: Mapping[str, str] = {
        "SIGMASCOPE_COMFYUI_RECORDS": str(records),
        "HF_HUB_OFFLINE": "1",
        "PIP_NO_INDEX": "1",  # ComfyUI-Manager would install what it misses into this Python
        "UV_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(FOUND_IN), *([str(Path(site, "site"))] if site else [])]),
        **variables,
    }
    with (base / f"server-{port}.log").open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, cwd=base, env={**os.environ, **told})
        server = Server(port, base, records, process.pid)
        try:
            for _ in range(3000):
                assert process.poll() is None, Path(log.name).read_text()[-2000:]
                try:
                    server.ask("/system_stats")
                    break
                except OSError:
                    time.sleep(0.1)
            yield server
        finally:
            process.terminate()
            process.wait(20)


def node(run: Run, node_id: str) -> Stage:
    """The stage of a node that ran."""
    return next(stage for stage in run.walk() if stage.facts.get("node", {}).get("id") == node_id)


def states(run: Run) -> dict[str, str]:
    """What became of each node."""
    return {one["id"]: one["state"] for one in run.facts["comfyui"]["nodes"]}
