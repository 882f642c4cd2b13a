"""The instrument that hears which model files are read, and names those that a node kept from before.

Nearly all nodes read by `comfy.utils.load_torch_file`; those for GGUF use the package gguf, which is watched once a node
has imported it. Of a file that a node names and that neither has read, nothing is known.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from sigmascope.integrations.comfyui.instruments import Instrument
from sigmascope.integrations.comfyui.needs import Need
from sigmascope.integrations.comfyui.recording import PromptRecording
from sigmascope.integrations.comfyui.texts import is_prompt
from sigmascope.integrations.comfyui.wraps import Call, Wrap

FILES: Final = "files"
"""The fact of a node's stage that lists them."""
_GGUF: Final = Need("gguf", "GGUFReader.__init__", ("path",), False)
_SUFFIXES: Final = frozenset({".safetensors", ".sft", ".ckpt", ".pt", ".pth", ".bin", ".gguf"})


class Files(Instrument):
    """Wraps `comfy.utils.load_torch_file`."""

    name = "files"
    gives = "which model files were read from disk, and how much of them"
    needs = (Need("comfy.utils", "load_torch_file", ("ckpt",), False),)

    def put_on(self) -> None:
        """See `Instrument`."""
        self._was_read: set[str] = set()
        self.wraps.append(Wrap(self.needs[0], self, before=_moment, after=partial(self._read, "ckpt")))

    def at_the_beginning(self) -> None:
        """Watch the reader of GGUF, which a node's package may have imported after this one."""
        watched = any(wrap.name == _GGUF.own_name for wrap in self.wraps)
        if not watched and "gguf" in sys.modules and _GGUF.fault() is None:
            self.wraps.append(Wrap(_GGUF, self, before=_moment, after=partial(self._read, "path")))

    def _read(
        self, parameter: str, call: Call, began: float, _result: object, error: BaseException | None
    ) -> None:
        took = time.perf_counter() - began
        prompt, node, path = self.prompt_here(), self.node_here(), Path(str(call.get(parameter)))
        self._was_read.add(path.name)
        if prompt is None:
            return
        known = {
            "file": path.name,
            "from": "disk",
            "bytes": _size(path),
            "seconds": took,
            "error": _name_of(error),
        }
        (prompt.facts if node is None else node.facts).setdefault(FILES, []).append(known)

    def at_the_end(self, prompt: PromptRecording) -> None:
        """Name the files that nodes of the graph stand for and that were not read: they were kept, if they ever were read."""
        read = {file["file"] for node in prompt.nodes.values() for file in node.facts.get(FILES, ())} | {
            file["file"] for file in prompt.facts.get(FILES, ())
        }
        kept = [
            {"file": Path(value).name, "from": self._source(prompt, node_id, value), "node": node_id}
            for node_id, value in _named_files(prompt.graph)
            if Path(value).name not in read and (node_id in prompt.cached or node_id in prompt.nodes)
        ]
        if kept:
            prompt.facts["files_kept"] = kept

    def _source(self, prompt: PromptRecording, node_id: str, value: str) -> str:
        """Whether a file that was not read is kept: by ComfyUI's cache, or by the node, which read it earlier."""
        return "kept" if node_id in prompt.cached or Path(value).name in self._was_read else "unknown"


def _moment(_call: Call) -> float:
    return time.perf_counter()


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _name_of(error: BaseException | None) -> str | None:
    return None if error is None else type(error).__name__


def _named_files(graph: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The values of nodes that name model files; a prompt may end like one."""
    for node_id, node in graph.items():
        for name, value in (node.get("inputs") or {}).items():
            is_file = isinstance(value, str) and Path(value).suffix.lower() in _SUFFIXES
            if is_file and not is_prompt(str(node.get("class_type")), name):
                yield str(node_id), value


INSTRUMENT = Files
