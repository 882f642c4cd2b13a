"""What of the values in a graph is somebody's words, by what the nodes' classes declare."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.integrations.comfyui.conftest import Watch
from tests.integrations.comfyui.host import Host, Node

from sigmascope.records.run import Run
from sigmascope.reports.html import to_html
from sigmascope.reports.markdown import to_markdown

WORD = "Xylophonist"


class Declared(Node):
    """A node that says what its inputs are."""

    asked = 0

    def __init__(self, **inputs: Any) -> None:
        super().__init__(("LATENT",), lambda x=None, **_: (x,))
        self.inputs = inputs

    def INPUT_TYPES(self) -> dict[str, Any]:
        self.asked += 1
        if self.inputs.get("fails"):
            raise RuntimeError("planted")
        return {"required": self.inputs, "optional": {}}


@pytest.fixture
def classes(host: Host, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """ComfyUI's module `nodes`, which has the classes of this host."""
    module: Any = ModuleType("nodes")
    module.NODE_CLASS_MAPPINGS = host.nodes
    monkeypatch.setitem(sys.modules, "nodes", module)
    return host.nodes


def graph(value: object) -> dict[str, Any]:
    return {"1": {"class_type": "Mine", "inputs": {"mine": value}}}


def kept(run: Run) -> Any:
    ((_, _, value),) = run.facts["comfyui"]["graph"]["values"]
    return value


@pytest.mark.parametrize("privacy", ["full", "hash", "none"])
@pytest.mark.parametrize(
    ("declared", "is_kept"),
    [
        pytest.param(("STRING",), False, id="a text"),
        pytest.param(("STRING", {"multiline": True}), False, id="a text of lines"),
        pytest.param(("*", {}), False, id="anything"),
        pytest.param(([WORD, "other"],), True, id="a choice"),
        pytest.param(("COMBO", {"options": [WORD, "other"]}), True, id="a choice of newer nodes"),
        pytest.param((["other"],), False, id="not one of the choices"),
        pytest.param(("COMBO", {"remote": {"route": "/x"}}), False, id="choices that are elsewhere"),
    ],
)
def test_a_word_is_kept_where_the_node_offers_it(
    watch: Watch, classes: dict[str, Any], tmp_path: Path, declared: Any, is_kept: bool, privacy: str
) -> None:
    classes["Mine"] = Declared(mine=declared)
    run = watch(privacy).run(graph(WORD))
    assert (kept(run) == WORD) is is_kept
    if not is_kept:
        assert WORD not in to_html(run)
        assert WORD not in to_markdown(run)
        (saved,) = tmp_path.glob("sigmascope-prompt-*.json")
        is_prompt = "multiline" in str(declared)
        assert (WORD in saved.read_text()) is (is_prompt and privacy == "full")


def test_a_prompt_that_ends_like_a_file_is_none(watch: Watch, classes: dict[str, Any]) -> None:
    classes["Mine"] = Declared(mine=("STRING", {"multiline": True}))
    assert WORD not in str(watch("none").run(graph(f"{WORD} in a recycle.bin")).facts)


@pytest.mark.parametrize("value", [[WORD], {WORD: 1}, [[WORD, WORD]]])
def test_words_within_a_value_are_not_kept(watch: Watch, classes: dict[str, Any], value: Any) -> None:
    classes["Mine"] = Declared(mine=("STRING",))
    assert WORD not in str(watch().run(graph(value)).facts)


def test_of_a_class_that_is_unknown_or_fails_no_word_is_kept(watch: Watch, host: Host) -> None:
    host.nodes["Mine"] = Node(("LATENT",), lambda **_: (1,))
    assert WORD not in str(watch().run(graph(WORD)).facts)


def test_a_class_that_fails_takes_nothing_off(watch: Watch, classes: dict[str, Any]) -> None:
    classes["Mine"] = Declared(mine=([WORD],), fails=("INT",))
    watched = watch()
    assert WORD not in str(watched.run(graph(WORD)).facts)
    assert watched.off() == {}


def test_a_class_is_asked_once_and_again_for_a_file_that_came_later(
    watch: Watch, classes: dict[str, Any]
) -> None:
    mine = classes["Mine"] = Declared(mine=(["a.safetensors"],))
    watched = watch()
    for number in range(3):
        watched.run(graph("a.safetensors"), f"prompt-{number}")
    assert mine.asked == 1
    mine.inputs = {"mine": (["a.safetensors", "b.safetensors"],)}
    assert kept(watched.run(graph("b.safetensors"), "prompt-3")) == "b.safetensors"
    assert mine.asked == 2


def test_a_choice_that_changed_is_named(watch: Watch, classes: dict[str, Any]) -> None:
    classes["Mine"] = Declared(mine=(["euler", "heun"],))
    watched = watch("hash")
    watched.run(graph("euler"))
    changed = watched.run(graph("heun"), "prompt-2").facts["comfyui"]["changed"]
    assert changed["settings"] == [{"node": "1", "input": "mine", "was": "euler", "now": "heun"}]
