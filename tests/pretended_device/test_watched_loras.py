"""LoRAs that are set, fused and taken off in a watch, on a device: how often the host waits for us."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_file
from tests.conftest import Pretend
from tests.families import generate, make_pipeline
from tests.families.loras import lora_state, modules_of
from tests.pretend_device import Kind

from sigmascope import watch

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]

ACTS: dict[str, Callable[[Any, Path], object]] = {
    "load": lambda pipeline, file: pipeline.load_lora_weights(file, adapter_name="style"),
    "set_adapters": lambda pipeline, _: pipeline.set_adapters(["style"], [0.5]),
    "fuse": lambda pipeline, _: pipeline.fuse_lora(),
    "unfuse": lambda pipeline, _: pipeline.unfuse_lora(),
    "delete": lambda pipeline, _: pipeline.delete_adapters("style"),
}
MOST_WAITS = 12


def test_the_host_waits_a_few_times_for_a_method_and_not_for_each_layer(
    pretend: Pretend, tmp_path: Path
) -> None:
    pipeline = make_pipeline("sd15")
    state = lora_state(pipeline, ["unet"], only="attn")
    save_file(state, tmp_path / "style.safetensors")
    waits: dict[str, Counter[str]] = {}
    facts: dict[str, Any] = {}
    with pretend("cuda") as device:
        pipeline.to("cuda")
        for name, act in ACTS.items():
            with watch(pipeline) as run:
                device.waits.clear()
                act(pipeline, tmp_path / "style.safetensors")
                waits[name] = Counter(wait.place for wait in device.waits if wait.is_ours)
            facts[name] = run.stage("lora_application").facts["lora_application"]
    assert [name for name, found in facts.items() if found["effective"]] == ["load", "set_adapters", "delete"]
    assert facts["load"]["applied_verdict"]["modules_there"] == len(modules_of(state)) > 30
    assert {name: found for name, found in waits.items() if found.total() > MOST_WAITS} == {}


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_zeros_that_were_there_before_the_watch_are_found_without_a_wait(
    pretend: Pretend, kind: Kind, tmp_path: Path
) -> None:
    pipeline = make_pipeline("sd15")
    state = lora_state(pipeline, ["unet"], only="attn")
    save_file(state, tmp_path / "style.safetensors")
    pipeline.load_lora_weights(tmp_path / "style.safetensors", adapter_name="style")
    ids: dict[float, list[list[str]]] = {}
    waits: dict[float, list[Counter[str]]] = {}
    with pretend(kind) as device:
        pipeline.to(kind)
        for factor in (1.0, 0.0):
            for name, tensor in pipeline.unet.named_parameters():
                if "lora_B" in name:
                    tensor.data.mul_(factor)
            for _ in range(2):
                device.waits.clear()
                with watch(pipeline) as run:
                    generate(pipeline, "sd15")
                    waits.setdefault(factor, []).append(Counter(wait.place for wait in device.our_waits))
                found = [one.id for one in run.record().findings if one.id.startswith("lora_")]
                ids.setdefault(factor, []).append(found)
    assert ids == {1.0: [[], []], 0.0: [["lora_is_zero"]] * 2}
    if kind == "cuda":
        assert waits[0.0] == waits[1.0]


def test_of_a_lora_on_late_layers_it_is_open_without_waiting_whether_it_acts(pretend: Pretend) -> None:
    pipeline = make_pipeline("sdxl")
    config = LoraConfig(r=2, target_modules=r".*layers\.1\..*q_proj", init_lora_weights=False)
    pipeline.text_encoder.add_adapter(config)
    with pretend("cuda") as device:
        pipeline.to("cuda")
        generate(pipeline, "sdxl", num_inference_steps=1)
        device.waits.clear()
        with watch(pipeline) as watching:
            generate(pipeline, "sdxl", num_inference_steps=1)
            assert device.our_waits == []
        found = {finding.id for finding in watching.record().findings}
    assert "lora_on_late_layers" in found


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
@pytest.mark.parametrize("factor", [-1.0, -0.5])
def test_a_file_and_its_negation_are_summed_on_the_device_without_waiting(
    pretend: Pretend, factor: float
) -> None:
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    state = lora_state(pipeline, ["unet"], only="attn", size=0.3)
    other = {name: tensor * (factor if "lora_B" in name else 1.0) for name, tensor in state.items()}
    for name, one in (("a", state), ("b", other)):
        pipeline.load_lora_weights(one, adapter_name=name)
    pipeline.set_adapters(["a", "b"])
    moved = not torch.allclose(generate(pipeline, "sd15", num_inference_steps=1), bare, atol=1e-5)
    with pretend("cuda") as device:
        pipeline.to("cuda")
        generate(pipeline, "sd15", num_inference_steps=1)
        device.waits.clear()
        with watch(pipeline) as watching:
            generate(pipeline, "sd15", num_inference_steps=1)
            waits = [*device.our_waits]
        found = {finding.id for finding in watching.record().findings}
    assert moved is (factor != -1.0)
    assert ("lora_opposite" in found) is not moved
    assert waits == []


@pytest.mark.parametrize("is_loaded_again", [True, False])
def test_whether_weights_are_those_from_before_a_merge_is_known_on_a_device(
    pretend: Pretend, is_loaded_again: bool
) -> None:
    pipeline = make_pipeline("sd15")
    state = {name: weight.clone() for name, weight in pipeline.unet.state_dict().items()}
    with pretend("cuda") as device:
        pipeline.to("cuda")
        with watch(pipeline) as watching:
            pipeline.load_lora_weights(lora_state(pipeline, ["unet"], only="attn"))
            device.waits.clear()
            pipeline.fuse_lora()
            waits = Counter(wait.place for wait in device.waits if wait.is_ours)
            pipeline.unload_lora_weights()
            if is_loaded_again:
                pipeline.unet.load_state_dict(state)
            generate(pipeline, "sd15", num_inference_steps=1)
        found = {finding.id for finding in watching.record().findings}
    assert waits.total() <= MOST_WAITS
    assert ("model.lora_elsewhere" in found) is is_loaded_again
