"""Other packs of nodes that put functions of their own around those that ours watch, before us and after us."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.comfyui.conftest import Watch
from tests.integrations.comfyui.host import Host
from tests.integrations.comfyui.test_nodes import GRAPH, nodes, states, with_node

from sigmascope.integrations.comfyui.instruments import kinds
from sigmascope.integrations.comfyui.needs import Need

NEEDS = tuple(dict.fromkeys(need._replace(parameters=()) for kind in kinds() for need in kind.needs))


def passes_on(function: Any) -> Any:
    """As many packs do it: nothing tells what it takes."""
    return lambda *arguments, **named: function(*arguments, **named)


def passes_on_awaiting(function: Any) -> Any:
    async def wrapper(self: Any, *arguments: Any, **named: Any) -> Any:
        return await function(self, *arguments, **named)

    return wrapper if inspect.iscoroutinefunction(function) else passes_on(function)


def passes_on_and_says_so(function: Any) -> Any:
    return functools.wraps(function)(passes_on(function))


def write_source(host: Host, folder: Path) -> None:
    """Give the stand-in's modules files, in which the functions lie that ours need, with what they take."""
    for name, module in host.modules.items():
        lines = []
        for need in NEEDS:
            if need.module == name and need.owner() is not None:
                function = vars(need.owner())[need.own_name]
                words = ", ".join(inspect.signature(function).parameters)
                head = "async def" if inspect.iscoroutinefunction(function) else "def"
                kind, _, own = need.name.rpartition(".")
                indent = "    " if kind else ""
                lines += [f"class {kind}:"] if kind and f"class {kind}:" not in lines else []
                lines.insert(
                    lines.index(f"class {kind}:") + 1 if kind else len(lines),
                    f"{indent}{head} {own}({words}): ...",
                )
        file = folder / f"{name}.py"
        file.write_text("\n".join(lines))
        module.__file__ = str(file)


def wrap_all(how: Callable[[Any], Any]) -> dict[Need, Any]:
    put: dict[Need, Any] = {}
    for need in NEEDS:
        put[need] = how(vars(need.owner())[need.own_name])
        setattr(need.owner(), need.own_name, put[need])
    return put


WAYS = pytest.mark.parametrize("how", [passes_on, passes_on_awaiting, passes_on_and_says_so])


@WAYS
def test_those_that_came_before_take_no_instrument_off(
    watch: Watch, host: Host, tmp_path: Path, how: Callable[[Any], Any]
) -> None:
    write_source(host, tmp_path)
    theirs = wrap_all(how)
    watched = watch()
    assert watched.off() == {}
    run = watched.run(with_node("Expand"))
    assert set(states(run).values()) == {"run"}
    assert (len(nodes(run)["3"].steps), nodes(run)["1"].facts["files"][0]["file"]) == (3, "model.safetensors")
    assert run.facts["comfyui"]["seconds_before"]["validation"] is not None
    watched.session.stop()
    assert all(vars(need.owner())[need.own_name] is function for need, function in theirs.items())


@WAYS
def test_those_that_come_after_lie_around_ours(watch: Watch, host: Host, how: Callable[[Any], Any]) -> None:
    watched = watch()
    theirs = wrap_all(how)
    run = watched.run(with_node("Expand"))
    assert set(states(run).values()) == {"run"}
    assert len(nodes(run)["3"].steps) == 3
    watched.session.stop()
    assert all(vars(need.owner())[need.own_name] is function for need, function in theirs.items())
    host.prompt(GRAPH, "prompt-2")
    assert watched.session.prompts == 1


def test_without_a_source_what_takes_anything_is_not_relied_on(watch: Watch, host: Host) -> None:
    files = next(kind for kind in kinds() if kind.name == "files")
    (need,) = files.needs
    setattr(need.owner(), need.own_name, passes_on(vars(need.owner())[need.own_name]))
    assert watch().off() == {"files": "comfy.utils.load_torch_file has no parameter ckpt"}
