import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.comfyui.conftest import Watch
from tests.integrations.comfyui.host import Host, Node
from tests.integrations.comfyui.test_nodes import GRAPH, nodes, states, with_node

import sigmascope
from sigmascope.integrations.comfyui import session as sessions
from sigmascope.integrations.comfyui.instruments import kinds
from sigmascope.integrations.comfyui.one_line import line_of
from sigmascope.integrations.comfyui.session import KEPT, Session
from sigmascope.reports.markdown import to_markdown


def functions(host: Host) -> dict[str, Any]:
    """Everything on the host's modules and on their classes."""
    found: dict[str, Any] = {}
    for name, module in host.modules.items():
        for key, value in vars(module).items():
            found[f"{name}.{key}"] = value
            if isinstance(value, type):
                found |= {f"{name}.{key}.{inner}": thing for inner, thing in vars(value).items()}
    return found


def test_all_instruments_are_on_and_nothing_is_left_after_them(watch: Watch, host: Host) -> None:
    before = functions(host)
    watched = watch()
    assert watched.off() == {}
    assert functions(host) != before
    watched.run(with_node("Expand"))
    watched.session.stop()
    assert functions(host) == before


def test_a_wrapper_around_ours_stays_and_ours_only_passes_on(watch: Watch, host: Host) -> None:
    watched, module = watch(), host.module("comfy.utils")
    ours = module.load_torch_file
    module.load_torch_file = lambda ckpt: ours(ckpt)
    watched.session.stop()
    assert module.load_torch_file("x.safetensors") == {"read": "x.safetensors"}


@pytest.mark.parametrize("name", [kind.name for kind in kinds() if kind.name != "prompts"])
def test_where_a_function_is_gone_its_instrument_alone_stays_off(
    name: str, watch: Watch, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    need = next(kind.needs[0] for kind in kinds() if kind.name == name)
    shared = {
        kind.name for kind in kinds() if need in kind.needs or need.name in {n.name for n in kind.needs}
    }
    owner = need.owner()
    setattr(owner, need.own_name, None)
    with caplog.at_level(logging.WARNING, "sigmascope"):
        watched = watch()
    assert name in watched.off()
    assert watched.off().keys() <= shared
    assert sum(f"{name} is off" in record.message for record in caplog.records) == 1
    if need.name not in ("get_output_data", "execute", "ProgressRegistry.__init__", "PromptQueue.put"):
        assert watched.run(GRAPH).facts["comfyui"]["instruments_off"].keys() == watched.off().keys()


def test_a_parameter_that_is_gone_is_a_reason(watch: Watch, host: Host) -> None:
    host.module("comfy.utils").load_torch_file = lambda path: path
    assert watch().off() == {"files": "comfy.utils.load_torch_file has no parameter ckpt"}


@pytest.mark.parametrize("name", [kind.name for kind in kinds()])
def test_an_instrument_that_fails_takes_itself_off_and_the_prompt_goes_on(
    name: str, watch: Watch, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = watch()
    (broken,) = (one for one in watched.session.instruments if one.name == name)

    def fail(*_: Any) -> Any:
        raise RuntimeError("planted")

    for wrap in broken.wraps:
        monkeypatch.setattr(wrap, "_before", fail)
    done: list[int] = []

    def note(x: Any) -> Any:
        done.append(1)
        return (x,)

    host.nodes["Done"] = Node(("LATENT",), note)
    host.nodes["Tiles"] = Node(("LATENT",), lambda x: (host.module("comfy.sd").VAE().decode_tiled(), (x,))[1])
    host.nodes["Models"] = Node(
        ("LATENT",), lambda x: (host.module("comfy.model_management").load_models_gpu([]), (x,))[1]
    )
    graph = {
        **with_node("Tiles"),
        "5": {"class_type": "Models", "inputs": {"x": ["4", 0]}},
        "6": {"class_type": "Done", "inputs": {"x": ["5", 0]}},
    }
    host.prompt(graph)
    watched.records()
    assert done == [1]
    assert watched.off() == {name: "RuntimeError: planted"}


def test_a_handler_that_fails_takes_itself_off(
    watch: Watch, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = watch()
    monkeypatch.setattr("sigmascope.integrations.comfyui.recording.PromptRecording.started", lambda *_: 1 / 0)
    host.prompt(GRAPH)
    assert watched.off() == {"progress": "ZeroDivisionError: division by zero"}


def test_the_switch_keeps_everything_off(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    before = functions(host)
    monkeypatch.setenv("SIGMASCOPE", "0")
    assert sessions.start() is None
    assert functions(host) == before


def test_a_started_session_is_one_and_ends(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIGMASCOPE_COMFYUI_RECORDS", str(tmp_path / "records"))
    before = functions(host)
    first = sessions.start()
    assert first is not None
    assert sessions.start() is first
    status = json.loads((tmp_path / "records" / "status.json").read_text())
    assert {part["state"] for part in status["instruments"]} == {"on"}
    sessions.stop()
    assert functions(host) == before


@pytest.mark.parametrize("privacy", ["full", "hash", "none"])
def test_prompts_are_kept_as_privacy_says(privacy: str, watch: Watch, host: Host, tmp_path: Path) -> None:
    host.nodes["Text"] = Node(("LATENT",), lambda text, x: (x,))
    graph = {**with_node("Fail"), "3b": {"class_type": "Text", "inputs": {"text": "a cat", "x": ["2", 0]}}}
    watched = watch(privacy)
    watched.run(graph)
    other = {**graph, "3b": {"class_type": "Text", "inputs": {"text": "a cat on a mat", "x": ["2", 0]}}}
    run = watched.run(other, "prompt-2")
    kept = "".join(path.read_text() for path in tmp_path.glob("sigmascope-prompt-*.json"))
    assert ("a cat" in kept) is (privacy == "full")
    assert ("prompts" in run.stages[0].facts) is (privacy != "none")


def test_the_last_records_stay_and_can_be_read(watch: Watch, tmp_path: Path) -> None:
    for number in range(KEPT + 3):
        (tmp_path / f"sigmascope-prompt-2000-{number:03}.json").write_text("{}")
    run = watch().run(GRAPH)
    files = sorted(tmp_path.glob("sigmascope-prompt-*.json"))
    assert len(files) == KEPT
    assert sigmascope.load_run(files[-1]).id == run.id


def test_a_record_stays_where_the_clock_was_put_back(watch: Watch, tmp_path: Path) -> None:
    for number in range(KEPT):
        (tmp_path / f"sigmascope-prompt-29990101-000000-{number:06}-x.json").write_text("{}")
    run = watch().run(GRAPH)
    (record,) = (file for file in tmp_path.glob("sigmascope-prompt-*.json") if "-2999" not in file.name)
    assert sigmascope.load_run(record).id == run.id


def test_one_line_says_what_a_prompt_took(watch: Watch, host: Host) -> None:
    host.nodes["Spoil"] = Node(("LATENT",), lambda x: ({"samples": x["samples"] * float("nan")},))
    watched = watch()
    watched.run(GRAPH)
    line = line_of(watched.run(with_node("Spoil"), "prompt-2"))
    assert "3 of 4 nodes cached" in line
    assert "NaN first in Spoil (node 4)" in line
    assert "failed in Fail (node 4)" in line_of(watched.run(with_node("Fail"), "prompt-3"))


def test_a_record_prints_and_becomes_a_page(
    watch: Watch, host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = host.nodes["Sampler"].run

    def sample_for_a_while(**inputs: Any) -> Any:
        time.sleep(0.05)  # long enough for a row of the report
        return sample(**inputs)

    host.nodes["Sampler"].run = sample_for_a_while
    run = watch().run(with_node("Expand"))
    run.print(full=True)
    assert "Sampler" in capsys.readouterr().out
    run.to_html(tmp_path / "page.html")
    assert "Sampler" in (tmp_path / "page.html").read_text()
    assert "Sampler" in to_markdown(run)
    assert states(run)["4"] == "run"
    assert nodes(run)["4"].name == "Expand"


def test_two_wraps_of_one_function_leave_it_as_it_was_in_any_order(host: Host) -> None:
    before = functions(host)
    first, second = Session(None), Session(None)
    first.start()
    second.start()
    first.stop()  # its wrappers lie inside those of the other
    assert functions(host) != before
    second.stop()
    assert functions(host) == before
