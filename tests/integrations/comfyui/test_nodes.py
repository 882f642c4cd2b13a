import asyncio
import json
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.comfy_shapes.adapters import lora_adapter
from tests.comfy_shapes.modules import BaseModel, Q
from tests.comfy_shapes.patchers import ModelPatcher
from tests.integrations.comfyui.conftest import Watch
from tests.integrations.comfyui.host import SUCCESS, Blocker, Host, Interrupted, Node, latent

from sigmascope.history.row import row_of
from sigmascope.integrations.comfyui import lora as lora_instrument
from sigmascope.integrations.comfyui.lora import judge, use_of
from sigmascope.integrations.comfyui.one_line import line_of
from sigmascope.integrations.comfyui.recording import PromptRecording
from sigmascope.records.run import Run, Stage

SETTINGS = {"sampler_name": "euler", "scheduler": "normal", "steps": 3, "cfg": 5.0, "seed": 7, "denoise": 0.5}
GRAPH: dict[str, Any] = {
    "1": {"class_type": "Load", "inputs": {"ckpt_name": "model.safetensors"}},
    "2": {"class_type": "Empty", "inputs": {}},
    "3": {"class_type": "Sampler", "inputs": {"latent_image": ["2", 0], "model": ["1", 0], **SETTINGS}},
}


def with_node(kind: str) -> dict[str, Any]:
    return {**GRAPH, "4": {"class_type": kind, "inputs": {"x": ["3", 0]}}}


def nodes(run: Run) -> dict[str, Stage]:
    return {stage.facts["node"]["id"]: stage for stage in run.walk() if "node" in stage.facts}


def states(run: Run) -> dict[str, str]:
    return {node["id"]: node["state"] for node in run.facts["comfyui"]["nodes"]}


def test_each_node_that_runs_is_a_stage_of_the_prompt(watch: Watch) -> None:
    run = watch().run(GRAPH)
    (generation,) = run.stages
    assert [stage.name for stage in generation.children] == ["Load", "Empty", "Sampler"]
    assert run.facts["comfyui"]["success"]
    assert all(stage.memory is not None and stage.peak is not None for stage in generation.children)


def test_sampling_steps_and_settings_are_recorded(watch: Watch) -> None:
    sampler = nodes(watch().run(GRAPH))["3"]
    assert len(sampler.steps) == 3
    told = {"sampler": "euler", "scheduler": "normal", "steps": 3, "cfg": 5.0, "seed": 7, "denoise": 0.5}
    assert sampler.facts["sampling"] == {**told, "latent": [1, 4, 8, 8], "unavailable": {}}


def moved(host: Host, watch: Watch, bar: tuple[int | str, ...]) -> Run:
    """The record of a sampler that moves its bar of three steps so, and loads its model where that is said."""

    def decode(_vae: Any) -> str:
        host.step_through(4)  # tiles, of which its own bar tells
        return "tiles"

    host.module("comfy.sd").VAE.decode_tiled_ = decode

    def sample(latent_image: Any, **_: Any) -> Any:
        moves = host.module("comfy.utils").ProgressBar(3)
        for value in bar:
            if value == "load":
                host.module("comfy.model_management").load_models_gpu([])
            elif value == "tiles":
                host.module("comfy.sd").VAE().decode_tiled()
            else:
                moves.update_absolute(value, 3)
        return (latent(),)

    host.nodes["Sampler"] = Node(("LATENT",), sample)
    return watch().run(GRAPH)


@pytest.mark.parametrize(
    ("bar", "counted"),
    [
        ((1, 2, 3, "load", 1, 2, 3), 6),  # a list of two latents, each sampled for itself
        ((0, 1, 2, 3), 3),  # the bar is put at its beginning first
        ((1, 1, 2, 2, 3, 3), 3),  # each place is told twice, as for a picture that comes after it
        (("load", 1, 2, 3, 0, 1, 2, 3), 6),
        (("load", 1, 2, 3, "load", "tiles", "load", 1, 2, 3), 6),  # decoded in between, as for details
        (("load", 1, 2, 3, 4, 5), 5),  # a sampler that finds its steps itself goes on at the bar's end
        (("load", 1, 2, 3, 4, 5, "load", 1, 2, 3), 8),
    ],
)
def test_each_step_is_counted_once_however_the_bar_is_moved(
    host: Host, watch: Watch, bar: tuple[int | str, ...], counted: int
) -> None:
    sampler = nodes(moved(host, watch, bar))["3"]
    assert len(sampler.steps) == counted
    assert "steps" not in sampler.unavailable


def test_a_step_whose_beginning_was_not_seen_is_left_out_with_the_reason(host: Host, watch: Watch) -> None:
    sampler = nodes(moved(host, watch, (1, 2, 3, 1, 2, 3)))["3"]
    assert len(sampler.steps) == 5
    assert "began was not seen" in sampler.unavailable["steps"]


def test_the_bar_s_end_is_no_beginning_of_another_bar_s_step(host: Host, watch: Watch) -> None:
    sampler = nodes(moved(host, watch, ("load", 1, 2, 3, 4, 1, 2, 3)))["3"]
    assert len(sampler.steps) == 6
    assert "began was not seen" in sampler.unavailable["steps"]


def test_a_node_whose_output_another_one_gave_in_the_same_prompt_is_cached(watch: Watch, host: Host) -> None:
    """ComfyUI runs one of several nodes with the same inputs, and tells of the others as of one that ran."""
    execute = host.execute

    async def shared(dynprompt: Any, node_id: str, prompt_id: str) -> Any:
        if node_id != "4":
            return await execute(dynprompt, node_id, prompt_id)
        dynprompt.outputs["4"] = dynprompt.outputs["2"]
        return SUCCESS, (), None

    host.execute = shared  # type: ignore[method-assign]
    run = watch().run({**GRAPH, "4": GRAPH["2"]})
    assert states(run) == {"1": "run", "2": "run", "3": "run", "4": "cached"}


def test_steps_that_comfyui_leaves_out_are_missing_with_a_reason_where_bars_are_not_heard(
    watch: Watch, host: Host
) -> None:
    bar = host.module("comfy.utils").ProgressBar
    move = bar.update_absolute
    bar.update_absolute = lambda *arguments: move(*arguments)
    sampler = nodes(watch().run(GRAPH))["3"]
    assert len(sampler.steps) == 2
    assert "several" in sampler.unavailable["steps"]


def test_the_second_prompt_says_what_was_cached_and_what_changed(watch: Watch) -> None:
    watched = watch()
    watched.run(GRAPH)
    again = {**GRAPH, "3": {**GRAPH["3"], "inputs": {**GRAPH["3"]["inputs"], "seed": 8}}}
    run = watched.run(again, "prompt-2")
    assert states(run) == {"3": "run", "1": "cached", "2": "cached"}
    changed = run.facts["comfyui"]["changed"]
    assert changed["settings"] == [{"node": "3", "input": "seed", "was": 7, "now": 8}]
    assert (changed["files_read_then"], changed["files_read_now"]) == (True, False)
    assert run.facts["comfyui"]["files_kept"] == [{"file": "model.safetensors", "from": "kept", "node": "1"}]


@pytest.mark.parametrize(("privacy", "was"), [("full", "<text>"), ("hash", "<text>"), ("none", None)])
def test_the_first_prompt_of_a_new_process_is_compared_with_the_last_record(
    watch: Watch, host: Host, privacy: str, was: str | None
) -> None:
    host.nodes["Text"] = Node(("LATENT",), lambda text, x: (x,))

    def says(text: str) -> dict[str, Any]:
        return {**GRAPH, "4": {"class_type": "Text", "inputs": {"text": text, "x": ["3", 0]}}}

    first = watch(privacy).run(says("a cat"))
    again = watch(privacy)
    again.records()  # what is there from before has been read
    run = again.run(says("a dog"), "prompt-2")
    changed = run.facts["comfyui"]["changed"]
    assert changed["since_prompt"] == first.facts["comfyui"]["prompt_id"] == "prompt-1"
    assert [time["node"] for time in changed["times"]] == ["4"]  # the others were cached
    assert [setting["was"] for setting in changed["settings"]] == ([] if was is None else [was])
    assert "cat" not in json.dumps(changed)


def test_expanded_nodes_lie_in_the_one_that_they_came_from(watch: Watch) -> None:
    run = watch().run(with_node("Expand"))
    parent = nodes(run)["4"]
    assert [stage.facts["node"]["parent"] for stage in parent.children] == ["4", "4"]
    inner = sum(stage.seconds for stage in parent.children)
    assert inner <= parent.seconds


def test_a_node_that_waits_for_its_own_task_is_one_node(watch: Watch) -> None:
    run = watch().run(with_node("Wait"))
    assert states(run)["4"] == "run"
    assert [stage.name for stage in run.stages[0].children].count("Wait") == 1


def test_a_node_that_fails_is_named_and_the_rest_is_not_run(watch: Watch) -> None:
    run = watch().run({**with_node("Fail"), "5": {"class_type": "Pass", "inputs": {"x": ["4", 0]}}})
    assert (states(run)["4"], states(run)["5"]) == ("error", "not run")
    assert nodes(run)["4"].error == "ValueError: a cat was planted"
    assert not run.facts["comfyui"]["success"]


def test_an_interruption_is_not_called_an_error(watch: Watch, host: Host) -> None:
    def interrupt(x: Any) -> Any:
        raise Interrupted

    host.nodes["Stop"] = Node(("LATENT",), interrupt)
    assert states(watch().run(with_node("Stop")))["4"] == "interrupted"


def test_nodes_and_the_rest_add_up_to_the_prompt(watch: Watch) -> None:
    run = watch().run(with_node("Expand"))
    outermost = sum(stage.seconds for stage in run.stages[0].children)
    rest = run.facts["comfyui"]["seconds_of_no_node"]
    assert outermost + rest == pytest.approx(run.stages[0].seconds, abs=0.02)


def test_what_comes_before_a_prompt_is_known(
    watch: Watch, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = iter([0, 3_000_000_000, time.perf_counter_ns() - 100_000_000_000])
    fake = SimpleNamespace(perf_counter_ns=lambda: next(moments))
    watched = watch()
    monkeypatch.setattr("sigmascope.integrations.comfyui.queueing.time", fake)
    run = watched.run(GRAPH)
    before = run.facts["comfyui"]["seconds_before"]
    assert before["validation"] == 3.0
    assert 100.0 <= before["queue"] < 200.0
    assert "3.00 s of validation before, " in line_of(run)
    assert "in the queue before" in line_of(run)


def test_time_of_no_node_is_named_where_it_is_the_longest(watch: Watch) -> None:
    run = watch().run(GRAPH)
    known = {**run.facts["comfyui"], "seconds_of_no_node": 0.9 * run.seconds}
    assert ", 90 % outside nodes, " in line_of(replace(run, facts={**run.facts, "comfyui": known}))


def test_a_file_that_is_read_belongs_to_the_node_that_reads_it(watch: Watch, tmp_path: Any) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x" * 1000)
    graph = {**GRAPH, "1": {"class_type": "Load", "inputs": {"ckpt_name": str(file)}}}
    (read,) = nodes(watch().run(graph))["1"].facts["files"]
    assert (read["file"], read["from"], read["bytes"]) == ("model.safetensors", "disk", 1000)


@pytest.mark.parametrize(("asked", "fallback"), [(True, False), (False, True)])
def test_tiles_are_a_fallback_only_where_nobody_asked_for_them(
    watch: Watch, host: Host, asked: bool, fallback: bool
) -> None:
    def decode(x: Any) -> Any:
        vae = host.module("comfy.sd").VAE()
        assert (vae.decode_tiled() if asked else vae.decode(runs_out=True)) == "tiles"
        return (torch.rand(1, 8, 8, 3),)

    host.nodes["Decode"] = Node(("IMAGE",), decode)
    run = watch().run(with_node("Decode"))
    assert nodes(run)["4"].facts["tiled"] == [{"method": "decode_tiled_", "fallback": fallback}]
    assert ("comfyui.tiled_fallback" in [finding.id for finding in run.findings]) is fallback


def test_nan_in_the_sound_of_a_video_is_found(watch: Watch, host: Host) -> None:
    """Its latent is of two tensors, in an object of ComfyUI's own."""
    both = [torch.rand(1, 8, 2, 4, 4), torch.full((1, 8, 16), float("nan"))]
    nested = type("NestedTensor", (), {})()
    nested.tensors = both
    host.nodes["Sampler"] = Node(("LATENT",), lambda **_: ({"samples": nested},))
    run = watch().run(with_node("Sampler"))
    assert run.facts["comfyui"]["first_odd_output"]["what"] == "NaN"


@pytest.mark.parametrize(
    ("value", "what"), [(float("nan"), "NaN"), (float("inf"), "infinity"), (0.0, "constant"), (None, None)]
)
def test_the_first_odd_output_is_found_and_empty_latents_are_meant_to_be(
    watch: Watch, host: Host, value: float | None, what: str | None
) -> None:
    host.nodes["Spoil"] = Node(("LATENT",), lambda x: (latent(value),))
    graph = {**with_node("Spoil"), "5": {"class_type": "Pass", "inputs": {"x": ["4", 0]}}}
    odd = watch().run(graph).facts["comfyui"].get("first_odd_output")
    assert odd == (None if what is None else {"what": what, "node": "4", "class_type": "Spoil", "output": 0})


class Patcher:
    """What ComfyUI loads: a model of 100 bytes, of which some are on the card."""

    load_device, offload_device = "cuda:0", "cpu"

    def __init__(self, kind: str, loaded: int) -> None:
        self.model, self.loaded = type(kind, (), {})(), loaded

    def model_size(self) -> int:
        return 100

    def loaded_size(self) -> int:
        return self.loaded


def test_models_in_part_and_evictions_are_told(watch: Watch, host: Host) -> None:
    held, clip, vae, unet = Patcher("Held", 80), Patcher("Clip", 100), Patcher("Vae", 100), Patcher("Unet", 0)
    management = host.module("comfy.model_management")
    loaded = management.current_loaded_models
    loaded[:] = [SimpleNamespace(model=patcher) for patcher in (held, clip, vae)]

    def load_models_gpu(models: Any) -> None:
        del loaded[1]
        vae.loaded, unet.loaded = 40, 70
        loaded.append(SimpleNamespace(model=unet))

    management.load_models_gpu = load_models_gpu
    host.nodes["Models"] = Node(("LATENT",), lambda x: (management.load_models_gpu([unet, held]), (x,))[1])
    (load,) = nodes(watch().run(with_node("Models")))["4"].facts["loads"]
    assert load["evicted"] == ["Clip"]
    assert load["evicted_in_part"] == [{"model": "Vae", "bytes": 60}]
    assert [(one["model"], one["kept"], one["whole"]) for one in load["models"]] == [
        ("Unet", False, False),
        ("Held", True, False),
    ]
    assert load["models"][0]["bytes_on_each"] == {"cuda:0": 70, "cpu": 30}


def test_a_lora_s_keys_and_patches_are_counted(watch: Watch, host: Host) -> None:
    def load(x: Any) -> Any:
        host.module("comfy.lora").load_lora({"a": 1, "b": 2, "c": 3}, {"a": 1})
        return (x,)

    host.nodes["Lora"] = Node(("LATENT",), load)
    run = watch().run(with_node("Lora"))
    assert nodes(run)["4"].facts["lora"] == [{"keys": 3, "patches": 1}]
    (verdict,) = nodes(run)["4"].facts["lora_verdicts"]
    assert verdict["effective"] is None


@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        ({"lora_name": "x.safetensors"}, ["x.safetensors"]),
        ({"lora_1": {"on": True, "lora": "a.safetensors"}, "lora_2": {"on": False, "lora": "b.safetensors"}}, ["a.safetensors"]),
        ({"stack": {"all": [("b.safetensors", 1.0, 1.0), ("a.safetensors", 0.5, 0.5)]}}, ["b.safetensors", "a.safetensors"]),
        ({"first": "a.safetensors", "mode": "simple", "second": "None"}, ["a.safetensors"]),
        ({"lora_name": "None", "lora_stack": [("a.safetensors", 1.0, 1.0)]}, ["a.safetensors"]),
        ({"lora_name": "a.safetensors", "ckpt_name": "b.safetensors"}, ["a.safetensors"]),
        ({"lora_name": "x.safetensors", "lora_stack": [("a.safetensors", 1.0, 1.0)]}, ["x.safetensors", "a.safetensors"]),
        ({"text": "a cat"}, ["(unnamed)"]),
        ({"text": "a cat <lora:c:0.8>"}, ["sub/c.safetensors"]),
    ],
)  # fmt: skip
def test_a_node_s_loras_are_named_wherever_their_names_are_given(
    watch: Watch, host: Host, monkeypatch: pytest.MonkeyPatch, inputs: dict[str, Any], named: list[str]
) -> None:
    known = {"a.safetensors", "b.safetensors", "sub/c.safetensors"}
    folders = SimpleNamespace(
        get_full_path=lambda _kind, name: f"/loras/{name}" if name in known else None,
        get_filename_list=lambda _kind: sorted(known),
    )
    monkeypatch.setitem(sys.modules, "folder_paths", folders)

    def load(**_: Any) -> Any:
        if "<lora:" in str(inputs.get("text")):
            host.module("comfy.utils").load_torch_file("/loras/sub/c.safetensors")
        host.module("comfy.lora").load_lora({"a": 1}, {"a": 1})
        return (1,)

    host.nodes["Loras"] = Node(("OTHER",), load)
    run = watch().run({"1": {"class_type": "Loras", "inputs": inputs}})
    assert [verdict["lora"] for verdict in nodes(run)["1"].facts["lora_verdicts"]] == named


def power(*loras: str, found: bool = True) -> dict[str, Any]:
    files = {f"lora_{name[0]}": {"on": True, "lora": name, "strength": 1.0} for name in loras}
    return {"class_type": "Power" if found else "Other", "inputs": {"model": ["1", 0], **files}}


@pytest.mark.parametrize(
    ("loader", "gone", "acts"),
    [
        pytest.param(power("a.safetensors", "gone.safetensors"), ["gone.safetensors"], False, id="beside one that is found"),
        pytest.param(power("gone.safetensors"), ["gone.safetensors"], False, id="alone"),
        pytest.param(power("c.safetensors"), [], None, id="found in another folder by its name"),
        pytest.param(power("c.safetensors", "gone.safetensors"), ["gone.safetensors"], False, id="beside such a one"),
        pytest.param(power("a.safetensors"), [], None, id="none"),
        pytest.param(power("gone.safetensors", found=False), ["gone.safetensors"], None, id="by a node that gives another model"),
    ],
)  # fmt: skip
def test_a_lora_that_a_loader_of_several_does_not_find_is_named(
    watch: Watch,
    host: Host,
    monkeypatch: pytest.MonkeyPatch,
    loader: dict[str, Any],
    gone: list[str],
    acts: bool | None,
) -> None:
    """rgthree/rgthree-comfy's Power Lora Loader leaves such a file out. Now, and once ComfyUI has kept what the node gave."""
    known = ["a.safetensors", "sub/c.safetensors"]
    folders = SimpleNamespace(
        get_full_path=lambda _kind, name: f"/loras/{name}" if name in known else None,
        get_filename_list=lambda _kind: known,
    )
    monkeypatch.setitem(sys.modules, "folder_paths", folders)

    def load(model: Any, **loras: Any) -> Any:
        for lora in loras.values():
            for name in (name for name in known if name.endswith(lora["lora"])):
                host.module("comfy.utils").load_torch_file(f"/loras/{name}")
                host.module("comfy.lora").load_lora({"a": 1}, {"a": 1})
        return (model,)

    host.nodes |= {"Power": Node(("MODEL",), load), "Other": Node(("MODEL",), lambda **_: (object(),))}
    watched = watch()
    for prompt_id in "ab":
        run = watched.run({"1": GRAPH["1"], "2": loader}, prompt_id)
        told = nodes(run)["2"].facts.get("lora_verdicts", ()) if "2" in nodes(run) else ()
        told = [
            one
            for one in [*told, *run.facts["comfyui"].get("loras_kept", ())]
            if "finds no file" in one["says"]
        ]
        assert [one["lora"] for one in told] == gone
        assert [one["effective"] for one in told] == [acts] * len(gone)


@pytest.mark.parametrize(("gives_it_back", "told"), [(True, [("a.safetensors", False)]), (False, [])])
def test_a_lora_that_a_loader_of_several_reads_nothing_of_does_nothing_where_it_gives_back_the_model(
    watch: Watch,
    host: Host,
    monkeypatch: pytest.MonkeyPatch,
    gives_it_back: bool,
    told: list[tuple[str, bool]],
) -> None:
    """As with strength 0."""
    folders = SimpleNamespace(
        get_full_path=lambda _kind, name: f"/loras/{name}", get_filename_list=lambda _kind: []
    )
    monkeypatch.setitem(sys.modules, "folder_paths", folders)
    host.nodes["Power"] = Node(("MODEL",), lambda model, **_: (model if gives_it_back else object(),))
    run = watch().run({"1": GRAPH["1"], "2": power("a.safetensors")})
    verdicts = nodes(run)["2"].facts.get("lora_verdicts", ())
    assert [(one["lora"], one["effective"]) for one in verdicts] == told


@pytest.mark.parametrize(
    ("text", "module", "loads", "named"),
    [
        pytest.param("a cat <lora:c:0.8>", "nodes", None, ["sub/c.safetensors"], id="a file"),
        pytest.param("a cat <lora:sub/c:1>, <lora:d:1:2>", "nodes", None, ["sub/c.safetensors", "(unnamed)"], id="and none"),
        pytest.param("a cat, lora:c <c:1>", "nodes", None, [], id="no such words"),
        pytest.param("a cat <lora:c:0.8>", "custom_nodes.x", None, [], id="in a node that may read it"),
        pytest.param("a cat <lora:c:0.8>", "nodes", "sub/c.safetensors", [], id="that another node loads"),
    ],
)  # fmt: skip
def test_a_lora_that_a_text_names_for_other_programs_is_said_to_do_nothing(
    watch: Watch,
    host: Host,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    module: str,
    loads: str | None,
    named: list[str],
) -> None:
    """Now, and once ComfyUI has kept what the node gave."""
    known = ["sub/c.safetensors"]
    folders = SimpleNamespace(
        get_full_path=lambda _kind, name: f"/loras/{name}" if name in known else None,
        get_filename_list=lambda _kind: known,
    )
    monkeypatch.setitem(sys.modules, "folder_paths", folders)
    encoder = type("Encoder", (Node,), {"RELATIVE_PYTHON_MODULE": module})
    host.nodes["Encode"] = encoder(("CONDITIONING",), lambda **_: ([[torch.ones(1, 2, 8), {}]],))
    host.nodes["Lora"] = Node(("MODEL",), lambda model, lora_name: (object(),))
    graph = {"1": GRAPH["1"], "3": {"class_type": "Encode", "inputs": {"clip": ["1", 0], "text": text}}}
    if loads is not None:
        graph["2"] = {"class_type": "Lora", "inputs": {"model": ["1", 0], "lora_name": loads}}
    watched = watch()
    for prompt_id in "ab":
        run = watched.run(graph, prompt_id)
        told = [*run.facts["comfyui"].get("loras_kept", ())]
        told += [one for stage in nodes(run).values() for one in stage.facts.get("lora_verdicts", ())]
        told = [one for one in told if "in a text" in one["says"]]
        assert [(one["lora"], one["effective"]) for one in told] == [(name, False) for name in named]


UNET, TEXT = "lora_unet_mid_block_attentions_0_proj_in", "lora_te_text_model_encoder_layers_0_mlp_fc1"


@pytest.mark.parametrize(
    ("acts", "effective", "nowhere", "expected"),
    [
        pytest.param({UNET: True, TEXT: True}, True, set(), (True, 2, None), id="all of it"),
        pytest.param({UNET: True, TEXT: False}, True, set(), (True, 1, None), id="strength_clip 0"),
        pytest.param({UNET: True}, False, set(), (False, 0, None), id="zeros"),
        pytest.param({TEXT: True}, True, set(), (True, 1, "text encoder only"), id="text encoder only"),
        pytest.param({TEXT: True}, True, {"text encoder"}, (False, 0, "no node takes"), id="not wired"),
        pytest.param(
            {UNET: True, TEXT: True}, True, {"text encoder"}, (True, 1, "the text encoder"), id="half wired"
        ),
        pytest.param({UNET: True}, True, {"text encoder"}, (True, 1, None), id="nothing lost"),
    ],
)
def test_only_modules_that_act_on_what_the_prompt_takes_are_used(
    acts: dict[str, bool], effective: bool, nowhere: set[str], expected: tuple[bool, int, str | None]
) -> None:
    modules = [{"name": name, "acts": does} for name, does in acts.items()]
    said = use_of(modules, {"effective": effective, "why": None}, frozenset(nowhere), has_denoiser=True)
    assert (said["effective"], said["modules_used"], said["modules"]) == (*expected[:2], len(acts))
    assert said["why"] is None if expected[2] is None else expected[2] in said["why"]


@pytest.mark.parametrize(
    ("strengths", "why"),
    [
        ({"strength_model": 0.0, "strength_clip": 0}, "both strengths are 0"),
        ({"strength_model": 0.0}, "its strength is 0"),
        ({"lora_model_strength": 0.0, "lora_clip_strength": 0.0}, "both strengths are 0"),
        ({"strength_model": 0.0, "strength_clip": 1.0}, "another reason"),
        ({}, "another reason"),
    ],
)
def test_a_loader_of_strength_0_is_the_reason(
    watch: Watch, host: Host, monkeypatch: pytest.MonkeyPatch, strengths: dict[str, float], why: str
) -> None:
    verdict = {"effective": False, "reason": None, "why": "another reason", "modules_used": 0, "modules": 7}
    weighed = lora_instrument._Weighed(verdict)
    monkeypatch.setattr(lora_instrument, "_weigh", lambda *_: (weighed, {"findings": []}))
    model = type("Model", (), {})()
    host.nodes["Lora"] = Node(("MODEL",), lambda **_: (model,))
    run = watch().run({"1": {"class_type": "Lora", "inputs": {"lora_name": "a.safetensors", **strengths}}})
    assert f"LoRA a.safetensors: 0 of 7 modules used; {why}" in line_of(run)


def test_a_lora_whose_loader_was_kept_is_told_as_it_was_judged_then(
    watch: Watch, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Model:
        pass

    verdict = {"effective": True, "reason": None, "why": None, "modules_used": None, "modules": None}
    modules = [{"name": UNET, "acts": at < 16} for at in range(17)]
    weighed = lora_instrument._Weighed(verdict, modules, None, True)
    monkeypatch.setattr(lora_instrument, "_weigh", lambda *_: (weighed, {"findings": []}))
    monkeypatch.setitem(sys.modules, "nodes", SimpleNamespace(NODE_CLASS_MAPPINGS=host.nodes))
    host.nodes["Lora"] = Node(("MODEL",), lambda lora_name: (Model(),))
    host.nodes["Use"] = Node(("LATENT",), lambda model, seed: (latent(),))

    def asked(seed: int, lora: str = "a.safetensors", takes: str = "1") -> dict[str, Any]:
        loaders = {"1": lora, "3": "b.safetensors"}
        return {
            **{id: {"class_type": "Lora", "inputs": {"lora_name": name}} for id, name in loaders.items()},
            "2": {"class_type": "Use", "inputs": {"model": [takes, 0], "seed": seed}},
        }

    watched = watch()
    watched.run(asked(1), "11111111-first")
    kept = watched.run(asked(2), "22222222-second")
    assert "LoRA a.safetensors: kept from prompt 11111111: 16 of 17 modules used" in line_of(kept)
    assert row_of(kept).loras == ("a.safetensors", "b.safetensors")
    anew = line_of(watched.run(asked(2, "c.safetensors"), "33333333-third"))
    assert "LoRA c.safetensors: 16 of 17 modules used" in anew
    assert "a.safetensors" not in anew
    led_elsewhere = line_of(watched.run(asked(2, takes="3"), "44444444-fourth"))
    assert (
        "LoRA a.safetensors: kept from prompt 11111111: 0 of 17 modules used; no node takes" in led_elsewhere
    )
    assert "LoRA b.safetensors: kept from prompt 11111111: 16 of 17 modules used" in led_elsewhere


def test_outputs_are_those_of_the_bare_host(watch: Watch, host: Host) -> None:
    kept = latent()
    host.nodes["Give"] = Node(("LATENT",), lambda: (kept,))
    graph = {"1": {"class_type": "Give", "inputs": {}}}
    watch().run(graph)
    assert host.cache["1", repr(graph["1"])][0] is kept


def test_two_servers_tasks_do_not_see_our_stages(watch: Watch, host: Host) -> None:
    from sigmascope.monitor.recorder import current_recorder

    seen: list[Any] = []

    def look(x: Any) -> Any:
        seen.append(current_recorder())
        return (x,)

    host.nodes["Look"] = Node(("LATENT",), look)
    watch().run(with_node("Look"))
    assert seen == [None]
    assert asyncio.run(asyncio.sleep(0, current_recorder())) is None


def test_a_prompt_s_wait_ends_where_its_record_begins() -> None:
    prompt = PromptRecording("prompt-1", {})
    prompt.end()
    (generation,) = prompt.run().stages
    begun_ns = prompt._stage.started_ns - prompt.started_ns
    assert generation.started_seconds == pytest.approx(begun_ns / 1e9, abs=1e-9)
    assert begun_ns > 0


def test_nodes_that_another_keeps_from_running_did_not_run(host: Host, watch: Watch) -> None:
    host.nodes["Empty"] = Node(("LATENT",), lambda: (Blocker(),))
    run = watch().run(with_node("Pass"))
    assert states(run) == {"1": "run", "2": "run", "3": "blocked", "4": "blocked"}
    assert run.facts["comfyui"]["success"]
    assert "sampling" not in nodes(run)["3"].facts


def black(**_: Any) -> Any:
    return (latent(float("nan")),)


def test_nan_that_was_kept_from_before_does_not_begin_where_it_is_taken(host: Host, watch: Watch) -> None:
    host.nodes["Sampler"] = Node(("LATENT",), black)
    watched = watch()
    assert watched.run(GRAPH).facts["comfyui"]["first_odd_output"]["node"] == "3"
    run = watched.run(with_node("Pass"), "prompt-2")
    assert states(run)["3"] == "cached"
    odd = {"what": "NaN", "node": "3", "class_type": "Sampler", "output": 0, "kept": True, "taken_by": "4"}
    assert run.facts["comfyui"]["first_odd_output"] == odd
    assert "NaN first in what was kept of Sampler (node 3)" in line_of(run)
    [finding] = [one for one in run.findings if one.id.startswith("comfyui.")]
    assert finding.id == "comfyui.odd_kept_output"
    assert "had kept of Sampler (node 3)" in finding.message


def test_what_was_kept_is_judged_as_it_is_now(host: Host, watch: Watch) -> None:
    def spoil(x: Any) -> Any:
        x["samples"].fill_(float("nan"))  # as no node should: ComfyUI keeps what it is given
        return (x,)

    host.nodes["Spoil"] = Node(("LATENT",), spoil)
    watched = watch()
    first = watched.run(with_node("Spoil")).facts["comfyui"]["first_odd_output"]
    assert (first["node"], first.get("kept")) == ("4", None)
    again = watched.run(with_node("Pass"), "prompt-2").facts["comfyui"]["first_odd_output"]
    assert (again["node"], again["kept"], again["taken_by"]) == ("3", True, "4")


def test_what_was_kept_and_is_sound_is_no_news(watch: Watch) -> None:
    watched = watch()
    watched.run(GRAPH)
    assert "first_odd_output" not in watched.run(with_node("Pass"), "prompt-2").facts["comfyui"]


@pytest.mark.parametrize("strength", [0.5, 0.0])
@pytest.mark.parametrize("is_merged", [False, True], ids=["registered", "merged"])
def test_a_lora_of_no_known_file_is_judged_by_the_weights(is_merged: bool, strength: float) -> None:
    before = ModelPatcher(BaseModel())
    after = before.clone()
    after.add_patches({Q: lora_adapter()}, strength)
    if is_merged:
        after.load()
    verdict, _ = judge({"unet before": before, "unet": after}, None, frozenset())
    assert verdict["effective"] is (strength != 0.0)
