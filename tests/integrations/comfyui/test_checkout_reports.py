"""Reports of users of ComfyUI, built again on a real server: what the record says of each."""

import uuid
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.integrations.comfyui.graphs import SLEEP, Graph, family, graph
from tests.integrations.comfyui.server import Server, node, packs, states
from torch import Tensor

from sigmascope.analysis.breakdown import headline
from sigmascope.analysis.lora_acting import acting_lora

pytestmark = [pytest.mark.comfyui, pytest.mark.slow]


def test_a_sampler_that_takes_the_model_from_before_the_lora(server: Server) -> None:
    """receyuki/comfyui-prompt-reader-node issue 27: "the LoRA is completely ignored by the KSampler node"."""
    nodes = graph(seed=41)
    nodes["6"]["inputs"]["model"] = ["1", 0]
    nodes["2"]["inputs"]["strength_model"] = 0.41  # no other prompt's, whose loader would be cached
    (verdict,) = node(server.run(nodes), "2").facts["lora_verdicts"]
    assert (verdict["effective"], verdict["modules_used"], verdict["modules"]) == (False, 0, 7)
    assert "no node takes the denoiser that the loader gives" in verdict["says"]


def test_models_that_are_read_again_for_each_prompt(server: Server) -> None:
    """Comfy-Org/ComfyUI issue 14618: "keeps loading models on every prompt change"."""
    server.run(family("sd3", seed=42))
    kept = server.run(family("sd3", seed=43)).facts["comfyui"]
    assert {file["from"] for file in kept["files_kept"]} == {"kept"}
    server.free()
    run = server.run(family("sd3", seed=44))
    again = [file for stage in run.walk() for file in stage.facts.get("files", ())]
    assert {file["file"] for file in again} >= {"sd3.safetensors", "clip_l.safetensors", "tiny16.safetensors"}
    changed = run.facts["comfyui"]["changed"]
    assert (changed["files_read_then"], changed["files_read_now"]) == (False, True)


def test_another_workflow_with_the_same_model(server: Server) -> None:
    """Comfy-Org/ComfyUI issue 4053: "6-Second Delay for the First Image When Switching Workflows, Even with the Same Model"."""
    server.run(family("sd3", seed=48))
    other = {f"1{number}": node for number, node in family("sd3", seed=49).items()}
    for one in other.values():
        for name, value in one["inputs"].items():
            one["inputs"][name] = [f"1{value[0]}", value[1]] if isinstance(value, list) else value
    prompt_id = server.prompt(other)
    messages = dict(server.wait_for(prompt_id)["status"]["messages"])
    cached, run = messages["execution_cached"]["nodes"], server.record(prompt_id)
    assert {name for name, state in states(run).items() if state == "cached"} == set(cached)
    read = {stage.facts["node"]["id"] for stage in run.walk() if stage.facts.get("files")}
    assert read == {"11", "12", "14", "19"} - set(cached)
    loads = [one for load in node(run, "16").facts["loads"] for one in load["models"]]
    assert [one["kept"] for one in loads if one["model"] == "SD3"] == ["11" in cached and "12" in cached]


def test_the_time_of_a_node_that_raises(server: Server) -> None:
    """Comfy-Org/ComfyUI pull request 16266: "a node that raises reports nothing"."""
    failed = node(server.run(graph("PlantedFailure", seed=45)), "9")
    assert SLEEP <= failed.seconds < 3 * SLEEP + 1.0
    assert failed.error == "ValueError: planted"


def test_a_lora_on_a_gguf_with_little_memory(server: Server) -> None:
    """city96/ComfyUI-GGUF issue 33: "LoRA loading has almost no effect when lowvram is triggered"."""
    packs()
    try:
        server.free()
        server.run({"1": {"class_type": "PlantedMemory", "inputs": {"mib": 1024}}})
        (verdict,) = node(server.run(family("wan gguf", seed=46)), "2").facts["lora_verdicts"]
    finally:
        server.run({"1": {"class_type": "PlantedMemory", "inputs": {"mib": 0}}})
        server.free()
    assert (verdict["effective"], verdict["modules_used"], verdict["modules"]) == (True, 2, 3)


def test_a_lora_on_a_gguf_as_a_hook(server: Server) -> None:
    """Comfy-Org/ComfyUI issue 6768: "USING LORA WITH GGUF and SET CLIP HOOKS": the prompt fails, and the record says where."""
    packs()
    nodes = family("wan gguf", seed=47)
    nodes["2"] = {
        "class_type": "CreateHookLora",
        "inputs": {"lora_name": "wan.safetensors", "strength_model": 1.0, "strength_clip": 1.0},
    }
    props = {"cond_NEW": ["3", 0], "strength": 1.0, "set_cond_area": "default", "hooks": ["2", 0]}
    nodes["9"] = {"class_type": "ConditioningSetProperties", "inputs": props}
    nodes["6"]["inputs"] |= {"model": ["1", 0], "positive": ["9", 0]}
    run = server.run(nodes)
    assert run.facts["comfyui"]["instruments_off"] == {}
    assert run.facts["comfyui"]["stopped_by"] == {"node": "6", "how": "execution_error"}
    assert node(run, "6").error == "AttributeError: 'Linear' object has no attribute 'temp'"
    (verdict,) = node(run, "2").facts["lora_verdicts"]
    assert (verdict["effective"], verdict["modules_used"], verdict["modules"]) == (False, 0, 3)
    assert "in force for no text that was encoded and no step" in verdict["says"]


@pytest.mark.parametrize(("second", "used"), [(0.5, [7, 7]), (-0.8, [0, 0])])
def test_of_a_stack_with_little_memory_no_lora_is_said_to_contradict_the_weights(
    server: Server, second: float, used: list[int]
) -> None:
    try:
        server.free()
        server.run({"1": {"class_type": "PlantedMemory", "inputs": {"mib": 1024}}})
        nodes = graph(seed=50) | {"9": lora_loader("2", "good", second)}
        nodes["6"]["inputs"]["model"] = ["9", 0]
        run = server.run(nodes)
    finally:
        server.run({"1": {"class_type": "PlantedMemory", "inputs": {"mib": 0}}})
        server.free()
    verdicts = [node(run, name).facts["lora_verdicts"][0] for name in ("2", "9")]
    assert [one["modules_used"] for one in verdicts] == used
    assert "lora_weights_disagree" not in {one.id for one in run.findings}
    assert all("contradict" not in one["says"] for one in verdicts)


@pytest.mark.parametrize("is_hook", [False, True])
@pytest.mark.parametrize(("denoise", "acts"), [(1.0, False), (0.5, True)])
def test_a_second_sampler_that_begins_from_noise_leaves_nothing_of_a_flow_models_first_one(
    server: Server, denoise: float, acts: bool, is_hook: bool
) -> None:
    """kijai/ComfyUI-WanVideoWrapper issue 887: "denoise too high on 2nd sampler, ignores high-noise model's output"."""
    nodes = family("sd3", seed=51 + is_hook)
    nodes["10"] = {"class_type": "KSampler", "inputs": dict(nodes["6"]["inputs"])}
    if is_hook:
        given = {"lora_name": "sd3.safetensors", "strength_model": 1.0}
        nodes["2"] = {"class_type": "CreateHookLoraModelOnly", "inputs": given}
        on = {"cond_NEW": ["3", 0], "strength": 1.0, "set_cond_area": "default", "hooks": ["2", 0]}
        nodes["11"] = {"class_type": "ConditioningSetProperties", "inputs": on}
        nodes["6"]["inputs"] |= {"model": ["1", 0], "positive": ["11", 0]}
    nodes["10"]["inputs"] |= {"model": ["1", 0], "latent_image": ["6", 0], "denoise": denoise}
    end = {"class_type": "SaveLatent", "inputs": {"samples": ["10", 0], "filename_prefix": "second"}}
    bare: Graph = {name: {**one, "inputs": dict(one["inputs"])} for name, one in nodes.items()}
    bare["6"]["inputs"] |= {"model": ["1", 0], "positive": ["3", 0]}
    bare.pop("11", None)
    del bare["2"]
    latents = [saved(server, one, "10") for one in (nodes, bare)]
    for run in (server.run({**latent_of(nodes), "8": end}), server.run({**latent_of(nodes), "8": end})):
        found = [*run.facts["comfyui"].get("loras_kept", ())]
        found += [one for stage in run.walk() for one in stage.facts.get("lora_verdicts", ())]
        assert [one["effective"] for one in found] == [acts]
        assert acts or "begins from noise alone" in found[0]["says"]
    assert bool((latents[0] != latents[1]).any()) is acts


def lora_loader(before: str, lora: str, strength: float) -> dict[str, Any]:
    inputs = {"lora_name": f"{lora}.safetensors", "strength_model": strength, "strength_clip": strength}
    return {"class_type": "LoraLoader", "inputs": {**inputs, "model": [before, 0], "clip": [before, 1]}}


def merge(model: str, other: str, ratio: float) -> dict[str, Any]:
    inputs = {"model1": [model, 0], "model2": [other, 0], "ratio": ratio}
    return {"class_type": "ModelMergeSimple", "inputs": inputs}


@pytest.mark.parametrize(
    ("more", "model", "used", "says"),
    [
        pytest.param({"9": lora_loader("2", "good", -0.8)}, "9", [0, 0], "cancel each other", id="cancelled"),
        pytest.param({"9": lora_loader("2", "good", -0.3)}, "9", [7, 7], "0.8 and -0.3 leave 0.5", id="opposed"),
        pytest.param({"10": merge("1", "2", 1.0)}, "10", [0], "no node that ran uses", id="merged with nothing"),
        pytest.param(
            {"10": merge("2", "1", 0.5), "9": lora_loader("10", "good", -0.4)},
            "9", [0, 0], "cancel each other", id="half is left by a merge",
        ),
        pytest.param(
            {"10": merge("2", "1", 0.5), "9": lora_loader("10", "good", -0.8)},
            "9", [7, 7], "0.4 and -0.8 leave -0.4", id="more than a merge leaves",
        ),
        pytest.param({"denoise": 0.0}, "2", [0], "no sampler made a step", id="no step"),
    ],
)  # fmt: skip
def test_a_lora_that_acts_moves_the_latent_now_and_when_all_is_kept(
    server: Server, more: dict[str, Any], model: str, used: list[int], says: str
) -> None:
    """A latent that rounding alone moved counts as the one without the LoRA."""
    seed = 200 + len(says)
    nodes = graph(seed=seed) | {name: one for name, one in more.items() if name != "denoise"}
    nodes["6"]["inputs"] |= {"model": [model, 0], "denoise": more.get("denoise", 1.0)}
    nodes["3"]["inputs"]["clip"] = ["1", 1]
    for name in nodes.keys() & {"9"}:
        nodes[name]["inputs"]["clip"] = ["1", 1]
    without = graph(seed=seed)
    del without["2"]
    without["3"]["inputs"]["clip"] = ["1", 1]
    without["6"]["inputs"] |= {"model": ["1", 0], "denoise": more.get("denoise", 1.0)}
    server.free()
    for run in (server.run(latent_of(nodes)), server.run(latent_of(nodes))):
        told = {
            stage.facts["node"]["id"]: stage.facts["lora_verdicts"]
            for stage in run.walk()
            if "lora_verdicts" in stage.facts
        }
        told |= {one["node"]: [one] for one in run.facts["comfyui"].get("loras_kept", ())}
        verdicts = [told[name][0] for name in ("2", "9") if name in told]
        assert [one["modules_used"] for one in verdicts] == used
        assert [one["effective"] for one in verdicts] == [count > 0 for count in used]
        assert all(says in one["says"] for one in verdicts[-1:])
        assert (acting_lora(run) is None) is not any(used)
        assert not any(used) or says in str(acting_lora(run))
        assert any(used) or says in headline(run) or "constant begins in KSampler" in headline(run)
    moved = float(
        (saved(server, nodes) - (bare := saved(server, without))).norm() / bare.norm().clamp_min(1e-9)
    )
    assert (moved > 1e-4) is any(used)


def latent_of(nodes: Graph) -> Graph:
    """A graph that ends with the sampler's latent."""
    save = {"class_type": "SaveLatent", "inputs": {"samples": ["6", 0], "filename_prefix": "kept"}}
    return {**{name: one for name, one in nodes.items() if name not in ("7", "8")}, "8": save}


def saved(server: Server, nodes: Graph, sampler: str = "6") -> Tensor:
    """The latent that a graph ends with."""
    wanted = latent_of(nodes)
    wanted["8"]["inputs"]["samples"] = [sampler, 0]
    wanted["8"]["inputs"]["filename_prefix"] = name = f"latent_{uuid.uuid4().hex}"
    server.prompt(wanted)
    (file,) = (server.base / "output").glob(f"{name}*.latent")
    latent: Tensor = load_file(file)["latent_tensor"]
    return latent
