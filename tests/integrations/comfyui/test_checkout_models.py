"""A real ComfyUI with other models than SD 1.5: families, stored forms, LoRAs as hooks, and little memory."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.comfy_shapes.checkout import VARIABLE
from tests.integrations.comfyui.graphs import Graph, family, graph, hooked, image_to_image
from tests.integrations.comfyui.server import Server, node, packs, serving
from tests.integrations.comfyui.test_checkout_odd import pixels

from sigmascope.integrations.comfyui.one_line import line_of

pytestmark = [pytest.mark.comfyui, pytest.mark.slow]
FAMILIES = {
    "sdxl": ("SDXL", [1, 4, 8, 8], 15),
    "sd3": ("SD3", [1, 16, 8, 8], 2),
    "flux": ("Flux", [1, 16, 8, 8], 2),
    "wan": ("WAN21", [1, 16, 2, 8, 8], 2),
}
"""By family: ComfyUI's class of the model, the latent's shape, and the modules of the LoRA that the model has."""
GRAPHS: dict[str, Graph] = {
    **{name: family(name) for name in FAMILIES},
    "fp8": family("sd3", dtype="fp8_e4m3fn", seed=2),
    "from a picture": image_to_image(),
    "hook": hooked("good"),
    **({"gguf": family("wan gguf")} if os.environ.get(f"{VARIABLE}_NODES") else {}),
}


def numbers_in(file: Path) -> int:
    """How many numbers a file of weights holds."""
    with safe_open(file, "pt") as opened:
        return sum(opened.get_tensor(name).numel() for name in opened.keys())  # noqa: SIM118 - no mapping


def test_pictures_are_those_of_the_bare_server(base: Path, server: Server) -> None:
    watched = {name: server.pictures(server.prompt(nodes)) for name, nodes in GRAPHS.items()}
    with serving(base, SIGMASCOPE="0") as bare:
        for name, nodes in GRAPHS.items():
            assert bare.pictures(bare.prompt(nodes)) == watched[name], name
    assert all(watched.values())
    assert len(watched["wan"]) == 5


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_s_record_is_true(base: Path, server: Server, name: str) -> None:
    server.free()
    run = server.run(family(name, steps=3, seed=7))
    kind, latent, modules = FAMILIES[name]
    assert run.facts["comfyui"]["instruments_off"] == {}
    assert run.facts["comfyui"]["success"]
    file = base / "models" / "diffusion_models" / f"{name}.safetensors"
    (read,) = node(run, "1").facts["files"]
    assert (read["file"], read["from"], read["bytes"]) == (file.name, "disk", file.stat().st_size)
    sampler = node(run, "6")
    assert sampler.facts["sampling"]["latent"] == latent
    assert len(sampler.steps) == 3
    (model,) = (one for load in sampler.facts["loads"] for one in load["models"])
    assert (model["model"], model["whole"]) == (kind, True)
    size = 1 if "float8" in server.log(r"model weight dtype torch\.(\w+)") else 4
    assert (
        0 <= model["bytes"] - size * numbers_in(file) < 50_000
    )  # a table of noise levels is not in the file
    assert node(run, "7").facts["vae"]["tensors"]["pictures"][-3:] == [64, 64, 3]
    (verdict,) = node(run, "2").facts["lora_verdicts"]
    assert (verdict["effective"], verdict["modules_used"], verdict["modules"]) == (True, modules, modules + 1)


def test_a_lora_of_another_family_is_named(server: Server) -> None:
    nodes = family("sdxl", seed=3)
    nodes["2"]["inputs"]["lora_name"] = "flux.safetensors"
    (verdict,) = node(server.run(nodes), "2").facts["lora_verdicts"]
    assert (verdict["effective"], verdict["modules_used"], verdict["modules"]) == (False, 0, 19)
    assert "the file is for FLUX by its names, the model is SDXL" in verdict["says"]


def test_a_model_stored_as_float8_is_half_of_its_file(base: Path, server: Server) -> None:
    run = server.run(family("sd3", dtype="fp8_e4m3fn", seed=9))
    file = base / "models" / "diffusion_models" / "sd3.safetensors"
    (model,) = (one for load in node(run, "6").facts["loads"] for one in load["models"])
    assert 0 <= model["bytes"] - numbers_in(file) < 50_000
    (verdict,) = node(run, "2").facts["lora_verdicts"]
    assert (verdict["effective"], verdict["modules_used"]) == (True, 2)


def test_what_arrives_of_a_lora_on_a_float8_model_is_told(base: Path, server: Server) -> None:
    strength = 0.35
    stored = {
        name: load_file(base / "models" / f"{name}.safetensors")
        for name in ("diffusion_models/sd3", "loras/sd3")
    }
    weights, lora = stored.values()
    changes = arrived = 0.0
    for key in (key for key in weights if key.endswith("x_block.attn.qkv.weight")):
        name = f"lora_unet_{key.removesuffix('.weight').replace('.', '_')}"
        up, down, alpha = (
            lora[f"{name}.{part}"].double() for part in ("lora_up.weight", "lora_down.weight", "alpha")
        )
        change = up @ down * (alpha / down.shape[0]) * strength
        before = weights[key].to(torch.float8_e4m3fn)
        merged = (before.double() + change).float().to(torch.float8_e4m3fn)
        changes += float((change * change).sum())
        arrived += float((change * (merged.double() - before.double())).sum())
    share = arrived / changes
    assert 0.02 < share < 0.7
    try:
        server.run({"1": {"class_type": "PlantedRounding", "inputs": {"nearest": True}}})
        run = server.run(family("sd3", dtype="fp8_e4m3fn", seed=21, strength=strength))
    finally:
        server.run({"1": {"class_type": "PlantedRounding", "inputs": {"nearest": False}}})
    (verdict,) = node(run, "2").facts["lora_verdicts"]
    assert (verdict["effective"], verdict["modules_used"]) == (True, 2)
    told = re.search(r"Only ([0-9.]+) % of the LoRA arrives in .*float8_e4m3fn", verdict["says"])
    assert told is not None, verdict["says"]
    assert float(told[1]) == pytest.approx(100 * share, abs=1.0)


@pytest.mark.parametrize(
    ("weight", "first"),
    [
        ("model.diffusion_model.out.2.weight", ("6", "KSampler")),
        ("first_stage_model.decoder.conv_out.weight", ("7", "VAEDecode")),
        ("cond_stage_model.transformer.text_model.final_layer_norm.weight", ("3", "CLIPTextEncode")),
    ],
)
def test_a_checkpoint_with_nan_is_black_from_the_node_on_that_uses_the_weight(
    base: Path, server: Server, weight: str, first: tuple[str, str]
) -> None:
    folder = base / "models" / "checkpoints"
    tensors = load_file(folder / "tiny.safetensors")
    tensors[weight].view(-1)[0] = float("nan")
    save_file(tensors, folder / f"nan_{first[1]}.safetensors")
    nodes = graph(seed=22)
    nodes["1"]["inputs"]["ckpt_name"] = f"nan_{first[1]}.safetensors"
    run = server.run(nodes)
    (folder / f"nan_{first[1]}.safetensors").unlink()
    odd = run.facts["comfyui"]["first_odd_output"]
    assert (odd["node"], odd["class_type"], odd["what"]) == (*first, "NaN")
    assert f"NaN first in {first[1]} (node {first[0]})" in line_of(run)
    assert [finding.severity for finding in run.findings if finding.id == "comfyui.odd_output"] == ["error"]


def test_a_picture_is_encoded_and_changed(server: Server) -> None:
    run = server.run(image_to_image(seed=5))
    assert node(run, "5").facts["vae"]["tensors"] == {"latent": [1, 4, 8, 8], "pictures": [1, 64, 64, 3]}
    assert node(run, "6").facts["sampling"]["denoise"] == 0.5
    assert "first_odd_output" not in run.facts["comfyui"]


@pytest.mark.parametrize(
    ("lora", "options", "used", "of", "says"),
    [
        ("good", {}, 7, 7, "7 of 7 modules used"),
        ("text", {}, 12, 12, "12 of 12 modules used"),
        ("half", {}, 3, 7, "4 of 7 modules have an unknown prefix"),
        ("flux", {}, 0, 19, "the file is for FLUX by its names"),
        ("zeros", {}, 0, 7, ""),
        ("good", {"strength": 0.0}, 0, None, "both strengths are 0"),
        ("good", {"until": 0.5}, 7, 7, "7 of 7 modules used"),
        ("good", {"in_use": False}, 0, None, "no node that encodes a text or samples takes it"),
        ("good", {"reaches": "text encoder"}, 0, 7, "its hook reaches a text encoder alone"),
        ("text", {"reaches": "denoiser"}, 0, 12, "its hook reaches the denoiser alone"),
    ],
)
def test_a_lora_in_the_conditioning_is_judged_by_the_weights_while_it_samples(
    server: Server, lora: str, options: dict[str, Any], used: int, of: int | None, says: str
) -> None:
    server.free()
    run = server.run(hooked(lora, seed=11, **options))
    (verdict,) = node(run, "2").facts["lora_verdicts"]
    assert (verdict["effective"], verdict["modules_used"], verdict["modules"]) == (used > 0, used, of)
    assert says in verdict["says"]
    assert not any("lora_verdicts" in stage.facts for stage in run.walk() if stage is not node(run, "2"))


def test_a_hook_of_a_file_that_is_not_read_acts_where_weights_became_others(server: Server) -> None:
    """asagi4/comfyui-prompt-control issue 103: LoRAs for FLUX's depth and canny hold the weights' new sizes."""
    (verdict,) = node(server.run(hooked("reshaped", reaches="denoiser", seed=12)), "2").facts["lora_verdicts"]
    assert (verdict["effective"], verdict["modules_used"], verdict["modules"]) == (True, None, None)
    assert "reshape_weight" in verdict["says"]


def test_of_a_stack_of_loaders_that_bypass_the_weights_the_last_acts_alone(server: Server) -> None:
    """The picture is that of the same graph without the first LoRA."""
    if "LoraLoaderBypassModelOnly" not in server.ask("/object_info"):
        pytest.skip("this ComfyUI has no such loader")
    nodes = graph(seed=13)
    nodes["3"]["inputs"]["clip"] = ["1", 1]
    pictures = {}
    for first in ("half", "good"):
        for number, before, lora in (("2", "1", first), ("9", "2", "good")):
            inputs = {"model": [before, 0], "lora_name": f"{lora}.safetensors", "strength_model": 0.8}
            nodes[number] = {"class_type": "LoraLoaderBypassModelOnly", "inputs": inputs}
        nodes["6"]["inputs"]["model"] = ["9", 0]
        prompt_id = server.prompt(nodes)
        run, pictures[first] = server.record(prompt_id), pixels(server, prompt_id)
        told = {name: node(run, name).facts["lora_verdicts"][0]["effective"] for name in ("2", "9")}
        assert told == {"2": False, "9": True}
    assert pictures["half"] == pictures["good"]


def test_a_gguf_is_read_and_its_lora_judged(base: Path, server: Server) -> None:
    packs()
    file = base / "models" / "diffusion_models" / "wan.gguf"
    server.free()
    run = server.run(family("wan gguf", seed=9))
    (read,) = node(run, "1").facts["files"]
    assert (read["file"], read["from"], read["bytes"]) == (file.name, "disk", file.stat().st_size)
    (verdict,) = node(run, "2").facts["lora_verdicts"]
    assert (verdict["effective"], verdict["modules_used"], verdict["modules"]) == (True, 2, 3)


def test_little_memory_is_seen_as_models_in_part_and_evictions(base: Path) -> None:
    with serving(base) as server:
        server.run({"1": {"class_type": "PlantedMemory", "inputs": {"mib": 1024}}})
        run = server.run(graph())
        sampler = node(run, "6")
        (model,) = (one for load in sampler.facts["loads"] for one in load["models"])
        assert not model["whole"]
        assert model["loaded_bytes"] < model["bytes"]
        (verdict,) = node(run, "2").facts["lora_verdicts"]
        assert (verdict["effective"], verdict["modules_used"], verdict["modules"]) == (True, 7, 7)
        loads = node(run, "7").facts["loads"]
        assert [name for load in loads for name in load["evicted"]] == [model["model"]]
        again = node(server.run(graph(seed=2)), "6").facts["loads"]
        assert [name for load in again for name in load["evicted"]] == ["AutoencoderKL"]
