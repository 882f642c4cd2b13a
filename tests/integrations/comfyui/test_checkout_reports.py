"""Reports of users of ComfyUI, built again on a real server: what the record says of each."""

import pytest
from tests.integrations.comfyui.graphs import SLEEP, family, graph
from tests.integrations.comfyui.server import Server, node, packs, states

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
