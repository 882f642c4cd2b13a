from typing import Any

import pytest
import torch
from tests.families import FAMILIES, make_pipeline
from tests.families.group_offload import needs_group_offload
from tests.probes.models.pipelines import read_only
from torch import nn

from sigmascope.probes.models import pipeline_facts

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_component_of_every_family_is_read(family: str) -> None:
    pipeline = read_only(family)
    facts = pipeline_facts(pipeline)
    assert facts.class_name == FAMILIES[family].pipeline_class
    assert not facts.unavailable
    assert set(facts.components) == {name for name, part in pipeline.components.items() if part is not None}
    assert list(facts.of_role("denoiser")) == [FAMILIES[family].denoiser]
    assert list(facts.of_role("vae")) == ["vae"]
    assert len(facts.of_role("text_encoder")) == sum("text_encoder" in name for name in facts.components)


def test_weights_and_configuration_are_those_of_the_component() -> None:
    pipeline = read_only("sd15")
    unet = pipeline_facts(pipeline).components["unet"]
    assert unet.module is not None
    assert unet.module.parameters == sum(p.numel() for p in pipeline.unet.parameters())
    assert unet.config["in_channels"] == pipeline.unet.config.in_channels
    assert pipeline_facts(pipeline).components["scheduler"].config["num_train_timesteps"] == 1000


def test_processors_of_joint_blocks_are_counted_apart() -> None:
    pipeline = read_only("flux")
    attention = pipeline_facts(pipeline).attention
    assert attention.processors == {"FluxAttnProcessor": 4}
    assert attention.joint_processors == {"FluxAttnProcessor": 2}
    assert attention.backends == {"default": 4}


def test_a_chosen_backend_is_named() -> None:
    pipeline = make_pipeline("flux")
    pipeline.transformer.set_attention_backend("native")
    assert pipeline_facts(pipeline).attention.backends == {"native": 4}


@pytest.mark.parametrize("kind", ["model", "sequential", "group"])
def test_offloading_is_told_from_its_hooks(kind: str) -> None:
    if kind == "group":
        needs_group_offload()
    pipeline = make_pipeline("sd15")
    assert pipeline_facts(pipeline).components["unet"].offload is None
    switch_on: dict[str, Any] = {
        "model": lambda: pipeline.enable_model_cpu_offload(device="cpu"),
        "sequential": lambda: pipeline.enable_sequential_cpu_offload(device="cpu"),
        "group": lambda: pipeline.unet.enable_group_offload(onload_device=CPU, offload_type="leaf_level"),
    }
    switch_on[kind]()
    assert pipeline_facts(pipeline).components["unet"].offload == kind


def test_layerwise_casting_is_told() -> None:
    pipeline = make_pipeline("flux")
    assert pipeline_facts(pipeline).components["transformer"].layerwise_casting is False
    pipeline.transformer.enable_layerwise_casting(torch.float8_e4m3fn, torch.bfloat16)
    assert pipeline_facts(pipeline).components["transformer"].layerwise_casting is True


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # torch's own
def test_compiling_is_told_whether_of_the_whole_or_of_its_blocks() -> None:
    unet: Any = make_pipeline("sd15").unet
    for part in (unet.mid_block, unet):
        assert pipeline_facts({"unet": unet}).components["unet"].compiled is False
        part.compile()
        assert pipeline_facts({"unet": unet}).components["unet"].compiled is True
        unet.mid_block._compiled_call_impl = None
    wrapped = torch.compile(read_only("sd15").unet)
    assert pipeline_facts({"unet": wrapped}).components["unet"].compiled is True


def test_the_memory_format_of_convolutions_is_told() -> None:
    pipeline = make_pipeline("sd15")
    assert pipeline_facts(pipeline).components["unet"].channels_last is False
    pipeline.unet.to(memory_format=torch.channels_last)
    assert pipeline_facts(pipeline).components["unet"].channels_last is True
    assert pipeline_facts(pipeline).components["text_encoder"].channels_last is None


def test_switches_of_a_vae_are_told() -> None:
    pipeline = make_pipeline("sd15")
    pipeline.vae.enable_tiling()
    vae = pipeline_facts(pipeline).components["vae"]
    assert (vae.tiling, vae.slicing) == (True, False)
    assert vae.config["force_upcast"] is True


def test_a_denoiser_alone_is_a_pipeline_of_one_component() -> None:
    unet = read_only("sd15").unet
    facts = pipeline_facts(unet)
    assert facts.architecture == "UNet"
    assert [(name, part.role) for name, part in facts.components.items()] == [("denoiser", "denoiser")]


def test_what_cannot_be_read_has_a_reason_and_hides_nothing_else() -> None:
    class Broken(nn.Module):
        @property
        def config(self) -> object:
            raise RuntimeError("no configuration today")

    facts = pipeline_facts({"unet": read_only("sd15").unet, "vae": Broken()})
    assert list(facts.components) == ["unet"]
    assert "no configuration today" in facts.unavailable["components.vae"]


@pytest.mark.parametrize("thing", [None, 3, "pipeline", object()])
def test_what_is_no_pipeline_says_so(thing: object) -> None:
    assert "architecture" in pipeline_facts(thing).unavailable


def test_the_parts_of_a_prior_in_the_same_pipeline_have_the_roles_of_the_others() -> None:
    names = (
        "prior_text_encoder",
        "prior_tokenizer",
        "prior_image_encoder",
        "prior_scheduler",
        "low_res_scheduler",
    )
    facts = pipeline_facts(dict.fromkeys(names, nn.Identity()))
    roles = ["text_encoder", "tokenizer", "image_encoder", "scheduler", "scheduler"]
    assert [facts.components[name].role for name in names] == roles


@pytest.mark.parametrize("place", ["decode", "encode", "decoder.forward"])
def test_a_method_that_is_compiled_alone_makes_its_model_compiled(place: str) -> None:
    """As diffusers' docs write it: `vae.decode = torch.compile(vae.decode)`."""
    vae = make_pipeline("sd15").vae
    assert pipeline_facts({"vae": vae}).components["vae"].compiled is False
    path, _, method = place.rpartition(".")
    holder = vae.get_submodule(path)
    setattr(holder, method, torch.compile(getattr(holder, method), backend="eager"))
    assert pipeline_facts({"vae": vae}).components["vae"].compiled is True
    delattr(holder, method)
    setattr(holder, method, getattr(holder, method))
    assert pipeline_facts({"vae": vae}).components["vae"].compiled is False
