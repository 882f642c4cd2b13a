"""The three nodes on stand-ins: what goes through them stays as it is, and nothing of theirs fails a prompt."""

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.comfy_shapes.adapters import lora_adapter
from tests.comfy_shapes.modules import BaseModel, Q
from tests.comfy_shapes.patchers import ModelPatcher
from tests.integrations.comfyui.conftest import Watch
from tests.integrations.comfyui.host import Host, Node, latent
from tests.integrations.comfyui.test_nodes import GRAPH, nodes, states

import sigmascope
from sigmascope.integrations.comfyui import session
from sigmascope.integrations.comfyui.nodes import (
    LoraVerdictNode,
    ReportNode,
    TensorDumpNode,
    write_wanted_reports,
)

LOADER = {"1": {"class_type": "LoraLoader", "inputs": {"lora_name": "style.safetensors", "model": ["0", 0]}}}


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """ComfyUI's output folder, with the function of its own that names files in it."""
    folder = tmp_path / "output"
    module = ModuleType("folder_paths")

    def get_save_image_path(prefix: str, output: str) -> tuple[str, str, int, str, str]:
        whole = Path(os.path.normpath(Path(output, prefix)))
        if not whole.is_relative_to(output):
            raise ValueError("outside the output folder")
        whole.parent.mkdir(parents=True, exist_ok=True)
        return str(whole.parent), whole.name, 1 + len(list(whole.parent.iterdir())), "", prefix

    vars(module).update(
        get_output_directory=lambda: str(folder),
        get_save_image_path=get_save_image_path,
        get_full_path=lambda *_: None,
        get_user_directory=lambda: str(tmp_path / "user"),
    )
    monkeypatch.setitem(sys.modules, "folder_paths", module)
    return folder


@pytest.fixture
def watched(watch: Watch, host: Host, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A session that the nodes find, on a host that has them; `results` has what each gave."""
    found: Any = watch()
    found.session.listeners.append(write_wanted_reports)
    monkeypatch.setattr(session, "_session", found.session)
    results: dict[str, Any] = {}

    def run(kind: type, name: str) -> Any:
        def call(**inputs: Any) -> Any:
            made = getattr(kind(), kind.FUNCTION)(**inputs)  # type: ignore[attr-defined]
            results[name] = made
            return made["result"] if isinstance(made, dict) and "result" in made else ((),)

        return call

    for name, kind in (("Dump", TensorDumpNode), ("Report", ReportNode)):
        host.nodes[name] = Node(getattr(kind, "RETURN_TYPES", ()), run(kind, name))
    found.results = results
    return found


def dump(keep: str) -> dict[str, Any]:
    inputs = {"latent": ["3", 0], "keep": keep, "name": "first", "node": "4"}
    return {**GRAPH, "4": {"class_type": "Dump", "inputs": inputs}}


def test_a_dump_has_the_tensor_and_the_record_its_statistics(watched: Any, host: Host) -> None:
    samples = torch.arange(8.0).reshape(1, 2, 2, 2)
    host.nodes["Sampler"] = Node(("LATENT",), lambda **_: ({"samples": samples},))
    run = watched.run(dump("statistics and file"))
    facts = nodes(run)["4"].tensors["latent.samples"]
    assert (facts.shape, facts.min, facts.max, facts.mean) == ((1, 2, 2, 2), 0.0, 7.0, 3.5)
    (file,) = (watched.session.folder / "dumps").glob("*.safetensors")
    kept = sigmascope.load_tensors(file)
    assert torch.equal(kept["latent.samples"], samples)
    through, _, _, text = watched.results["Dump"]["result"]
    assert through["samples"] is samples
    assert text.splitlines() == [
        "latent.samples: 1×2×2×2 float32, min 0, max 7, mean 3.5, std 2.45",
        f"kept in {file.name}",
    ]


@pytest.mark.parametrize(("keep", "in_record", "files"), [("statistics", True, 0), ("file", False, 1)])
def test_either_alone_is_kept(watched: Any, keep: str, in_record: bool, files: int) -> None:
    run = watched.run(dump(keep))
    assert bool(nodes(run)["4"].tensors) is in_record
    assert len(list(watched.session.folder.glob("dumps/*.safetensors"))) == files


def test_texts_of_a_conditioning_stay_out_of_a_dump_where_prompts_are_private(
    watched: Any, host: Host
) -> None:
    watched.session.privacy = "hash"
    cond = [[torch.ones(1, 77, 8), {"pooled_output": torch.zeros(1, 8), "prompt": "a secret cat"}]]
    TensorDumpNode().dump("file", "secret", conditioning=cond)
    (file,) = (watched.session.folder / "dumps").glob("*.safetensors")
    assert b"secret cat" not in file.read_bytes()
    assert set(sigmascope.load_tensors(file)) == {"conditioning.0.cond", "conditioning.0.pooled_output"}


@pytest.mark.parametrize("keep", ["statistics and file", "statistics", "file"])
def test_what_cannot_be_dumped_goes_through_with_the_reason(watched: Any, keep: str) -> None:
    odd = {"samples": "no tensor"}
    made = TensorDumpNode().dump(keep, "odd", latent=odd)
    assert made["result"][0] is odd
    assert made["ui"]["text"][0].startswith("unknown (")
    assert TensorDumpNode().dump(keep, "odd")["ui"]["text"] == ("nothing is connected",)


def test_a_dump_without_a_watch_lies_in_the_user_s_folder(
    outputs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(session, "_session", None)
    monkeypatch.delenv("SIGMASCOPE_COMFYUI_RECORDS", raising=False)
    TensorDumpNode().dump("statistics and file", "alone", latent=latent())
    assert len(list((tmp_path / "user" / "sigmascope" / "dumps").glob("*.safetensors"))) == 1


def report(name: str) -> dict[str, Any]:
    return {**GRAPH, "4": {"class_type": "Report", "inputs": {"name": name}}}


def test_each_prompt_s_report_is_written_when_it_is_over(watched: Any, outputs: Path) -> None:
    run = watched.run(report("mine/run"))
    (file,) = outputs.rglob("*.html")
    assert file.relative_to(outputs) == Path("mine/run_00001_.html")
    assert run.id in file.read_text(encoding="utf-8")


def test_a_report_is_written_where_records_cannot_be(
    watched: Any, outputs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The user folder is read-only, say, and the output folder is not."""
    watched.session.folder = tmp_path / "a file" / "records"
    watched.session.folder.parent.write_text("where a folder is wanted")
    report = {"class_type": "Report", "inputs": {"name": "first"}}
    watched.run({**GRAPH, "4": report})
    assert [file.name for file in outputs.iterdir()] == ["first_00001_.html"]
    assert "a record was not written" in caplog.text


def test_a_name_outside_of_the_output_folder_writes_nothing_and_fails_nothing(
    watched: Any, outputs: Path, tmp_path: Path
) -> None:
    run = watched.run(report("../../elsewhere"))
    assert states(run)["4"] == "run"
    assert list(tmp_path.rglob("*.html")) == []
    assert len(list(watched.session.folder.glob("sigmascope-prompt-*.json"))) == 1


def test_a_report_is_no_number_that_equals_itself_so_that_its_node_runs_each_time() -> None:
    changed = ReportNode.IS_CHANGED(name="x")
    assert changed != changed


def test_without_a_watch_a_report_says_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_session", None)
    assert ReportNode().want("x")["ui"]["text"] == ("no report: prompts are not watched",)


def verdict(model: Any, graph: Any = LOADER) -> str:
    through, text, _ = LoraVerdictNode().judge(
        model, None, {**graph, "9": {"inputs": {"model": ["1", 0]}}}, "9"
    )
    assert through is model
    return text


def test_a_lora_on_the_model_acts_and_one_that_is_not_does_nothing(outputs: Path) -> None:
    bare, with_lora = ModelPatcher(BaseModel()), ModelPatcher(BaseModel())
    with_lora.add_patches({Q: lora_adapter()})
    assert verdict(with_lora).startswith("style.safetensors: it acts")
    assert "it acts" not in verdict(bare)


@pytest.mark.parametrize("loaded", [False, True])
def test_judging_leaves_the_model_as_it_was(outputs: Path, loaded: bool) -> None:
    model = ModelPatcher(BaseModel())
    model.add_patches({Q: lora_adapter()})
    if loaded:
        model.load()
    before = (
        {name: tensor.clone() for name, tensor in model.model.state_dict().items()},
        dict(model.patches),
        model.patches_uuid,
        dict(model.backup),
    )
    verdict(model)
    weights, patches, uuid, backup = before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.model.state_dict().items())
    assert (model.patches, model.patches_uuid, model.backup.keys()) == (patches, uuid, backup.keys())


def test_every_lora_on_the_way_is_named_in_its_order(outputs: Path) -> None:
    graph = {
        "0": {"class_type": "LoraLoader", "inputs": {"lora_name": "first.safetensors", "model": ["7", 0]}},
        "1": {"class_type": "LoraLoader", "inputs": {"lora_name": "second.safetensors", "model": ["0", 0]}},
        "5": {"class_type": "LoraLoader", "inputs": {"lora_name": "beside.safetensors", "model": ["7", 0]}},
    }
    model = ModelPatcher(BaseModel())
    model.add_patches({Q: lora_adapter()})
    names = [line.partition(":")[0] for line in verdict(model, graph).splitlines()]
    assert names == ["first.safetensors", "second.safetensors"]


@pytest.mark.parametrize("model", [None, object(), 3])
def test_a_model_of_another_kind_goes_through_with_the_reason(model: Any) -> None:
    assert verdict(model, {}).startswith("unknown (")


def test_a_graph_in_a_circle_ends(outputs: Path) -> None:
    circle = {"1": {"inputs": {"model": ["9", 0]}}}
    assert verdict(ModelPatcher(BaseModel()), circle).startswith("LoRAs of unknown name")
