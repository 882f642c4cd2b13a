from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families import FAMILIES, generate, make_pipeline
from tests.families.loras import lora_state, modules_of, parts_of, write
from tests.integrations.diffusers.marks import left_behind
from typer.testing import CliRunner

import sigmascope
from sigmascope.analysis.lora_acting import acting_lora
from sigmascope.analysis.lora_idle import idle_lora
from sigmascope.analysis.lora_state import standing
from sigmascope.cli.root import app
from sigmascope.records.run import Run, Stage

pytestmark = pytest.mark.slow


def lora_stages(run: Run) -> list[Stage]:
    return [stage for stage in run.walk() if stage.name == "lora_application"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_lora_is_analysed_as_it_is_loaded(family: str, tmp_path: Path) -> None:
    pipeline = make_pipeline(family)
    state = lora_state(pipeline, parts_of(family))
    path = write(state, tmp_path / "style.safetensors")
    with sigmascope.watch(pipeline) as run:
        pipeline.load_lora_weights(str(path), adapter_name="style")
    (stage,) = lora_stages(run.record())
    analysis = stage.facts["lora_application"]
    assert stage.facts["file"] == f"{path.parent.name}/{path.name}"
    assert analysis["effective"]
    found = analysis["unet_changes"]["patches_added"] + (analysis["clip_changes"]["patches_added"] or 0)
    assert found == len(modules_of(state))


def test_a_lora_for_another_model_is_found_out(tmp_path: Path) -> None:
    path = write(
        lora_state(make_pipeline("flux"), parts_of("flux", encoders=False)), tmp_path / "flux.safetensors"
    )
    pipeline = make_pipeline("sd15")
    with sigmascope.watch(pipeline) as run:
        pipeline.load_lora_weights(str(path))
    analysis = run.stage("lora_application").facts["lora_application"]
    assert not analysis["effective"]
    assert "lora_matches_nothing" in {finding["id"] for finding in analysis["findings"]}


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
@pytest.mark.parametrize("is_everywhere", [True, False])
def test_a_model_s_loader_is_heard_before_its_pipeline_is_known(
    is_everywhere: bool, pipeline: Any, tmp_path: Path
) -> None:
    """A watch of all pipelines meets each at its first call. Another pipeline's model is no matter of a watch of one."""
    path = write(lora_state(pipeline, parts_of("sd15", encoders=False)), tmp_path / "style.safetensors")
    with sigmascope.watch() if is_everywhere else sigmascope.watch(make_pipeline("sd15")) as run:
        pipeline.unet.load_lora_adapter(str(path))
        pipeline.unet.load_lora_adapter(str(path), prefix="unet")
    found = [stage.facts["lora_application"]["effective"] for stage in lora_stages(run.record())]
    assert found == ([False, True] if is_everywhere else [])
    assert left_behind() == []


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_a_lora_of_several_is_called_by_its_name(pipeline: Any, tmp_path: Path) -> None:
    """Diffusers makes the last one that is loaded the only active one, until all are set."""
    for seed, name in enumerate(("one", "zeros", "two")):
        state = lora_state(pipeline, parts_of("sd15", encoders=False), seed=seed, only="to_q")
        state = {key: value * (name != "zeros") for key, value in state.items()}
        write(state, tmp_path / f"{name}.safetensors")
    with sigmascope.watch(pipeline) as run:
        for name in ("one", "zeros", "two"):
            pipeline.load_lora_weights(str(tmp_path / f"{name}.safetensors"), adapter_name=name)
        pipeline.set_adapters(["one", "two", "zeros"], [1.0, 0.0, 1.0])
    stages = lora_stages(run.record())
    told = {finding["id"]: finding["message"] for finding in stages[1].facts["lora_application"]["findings"]}
    assert told["lora_is_zero"].startswith("The LoRA zeros changes nothing: ")
    told = {finding["id"]: finding["message"] for finding in stages[3].facts["lora_application"]["findings"]}
    assert told["lora_inactive"] == "Denoiser: 20 changes of two are off or at strength 0."
    acts = acting_lora(run.record())
    assert acts is not None
    assert " LoRA two is off or at strength 0." in acts
    assert " LoRA zeros changes nothing: all its changes are zero." in acts


def test_every_method_is_a_stage_in_order(pipeline: Any, tmp_path: Path) -> None:
    path = write(lora_state(pipeline, parts_of("sd15")), tmp_path / "style.safetensors")
    with sigmascope.watch(pipeline) as run:
        pipeline.load_lora_weights(str(path), adapter_name="style")
        pipeline.set_adapters(["style"], [0.5])
        pipeline.fuse_lora()
        pipeline.unfuse_lora()
        pipeline.unload_lora_weights()
    methods = [stage.facts["method"] for stage in lora_stages(run.record())]
    assert methods == ["load_lora_weights", "set_adapters", "fuse_lora", "unfuse_lora", "unload_lora_weights"]
    assert left_behind() == []


def test_methods_that_find_no_lora_have_done_nothing_wrong(pipeline: Any, tmp_path: Path) -> None:
    path = write(lora_state(pipeline, ("unet",)), tmp_path / "style.safetensors")
    with sigmascope.watch(pipeline) as clean:
        pipeline.unload_lora_weights()
        pipeline.disable_lora()
    pipeline.load_lora_weights(str(path))
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    with sigmascope.watch(pipeline) as fused:
        pipeline.unfuse_lora()
    for run, beside in ((clean.record(), set()), (fused.record(), {("lora_fused_before", "info")})):
        found = {(one.id, one.severity) for one in run.findings if one.id.startswith("lora_")}
        assert found == {("lora_none_there", "info")} | beside
        assert idle_lora(run) is None


def test_a_lora_that_widened_a_layer_acts_no_more_once_that_has_its_shape_back() -> None:
    """As FLUX' control LoRAs do: `unload_lora_weights` keeps the wider layer, unless it is told to reset it."""
    pipeline = make_pipeline("flux")
    bare = generate(pipeline, "flux", num_inference_steps=1)
    embedder = pipeline.transformer.x_embedder
    pipeline.load_lora_weights(
        {
            "transformer.x_embedder.lora_A.weight": torch.ones(2, 2 * embedder.in_features),
            "transformer.x_embedder.lora_B.weight": torch.ones(embedder.out_features, 2),
        },
        adapter_name="control",
    )
    with sigmascope.watch(pipeline) as run:
        pipeline.set_adapters("control", 0.85)
        pipeline.unload_lora_weights(reset_to_overwritten_params=True)
        assert torch.equal(generate(pipeline, "flux", num_inference_steps=1), bare)
    says = "No LoRA acts: unload_lora_weights took off what was on, before the last call."
    assert standing(run.record()) == ("taken off", says, None)


def test_a_lora_on_gguf_layers_has_the_norm_of_its_factors() -> None:
    gguf = pytest.importorskip("gguf")
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    pipeline = make_pipeline("flux")
    state = lora_state(pipeline, ["transformer"], size=0.3)
    model, kind = pipeline.transformer, gguf.GGMLQuantizationType.Q8_0
    for name, layer in [*model.named_modules()]:
        if ".ff" in name and isinstance(layer, torch.nn.Linear) and layer.in_features % 32 == 0:
            packed = GGUFLinear(layer.in_features, layer.out_features, compute_dtype=torch.float32)
            codes = torch.from_numpy(gguf.quantize(layer.weight.detach().numpy(), kind).copy())
            packed.weight, packed.bias = GGUFParameter(codes, quant_type=kind), layer.bias
            model.set_submodule(name, packed)
    bare = generate(pipeline, "flux", num_inference_steps=1)
    with sigmascope.watch(pipeline) as run:
        pipeline.load_lora_weights(dict(state))
        moved = not torch.equal(generate(pipeline, "flux", num_inference_steps=1), bare)
    (stage,) = lora_stages(run.record())
    changes = stage.facts["lora_application"]["unet_weight_changes"]
    products = (
        state[key.replace("lora_A", "lora_B")].double() @ state[key].double()
        for key in state
        if "lora_A" in key
    )
    norm = sum(float(product.square().sum()) for product in products) ** 0.5
    assert moved
    assert changes["delta_norm"] == pytest.approx(norm, rel=1e-3)
    assert changes["unavailable"]["relative_change"].endswith("packed codes, not the layer's numbers.")
    assert (acting_lora(run.record()) or "").startswith("The LoRA acts. ")


def test_images_with_a_lora_are_the_same_bit_for_bit(tmp_path: Path) -> None:
    bare, watched = make_pipeline("sd15"), make_pipeline("sd15")
    path = write(lora_state(bare, parts_of("sd15")), tmp_path / "style.safetensors")
    bare.load_lora_weights(str(path), adapter_name="style")
    with sigmascope.watch(watched):
        watched.load_lora_weights(str(path), adapter_name="style")
        image = generate(watched, "sd15")
    assert torch.equal(image, generate(bare, "sd15"))


def test_a_loader_that_fails_fails_as_without_a_watch(pipeline: Any, tmp_path: Path) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(b"no weights")
    with sigmascope.watch(pipeline) as run, pytest.raises(OSError, match="Unable to load"):
        pipeline.load_lora_weights(str(path))
    assert run.stage("lora_application").error is not None


@pytest.mark.parametrize("method", ["load_lora_weights", "load_attn_procs"])
def test_names_of_attention_processors_are_told_to_load_nothing(method: str, tmp_path: Path) -> None:
    """As diffusers saved LoRAs before it used PEFT; `load_attn_procs` raises, and takes other files today."""
    pipeline = make_pipeline("sd15")
    state = lora_state(pipeline, ["unet"], only="attn1.to_q")
    old = {
        key.removeprefix("unet.")
        .replace("to_q.lora_A", "processor.to_q_lora.down")
        .replace("to_q.lora_B", "processor.to_q_lora.up"): tensor
        for key, tensor in state.items()
    }
    file = write(old, tmp_path / "old.safetensors")
    target = pipeline if method == "load_lora_weights" else pipeline.unet
    with sigmascope.watch(pipeline) as run, suppress(ValueError):
        getattr(target, method)(str(tmp_path), weight_name=file.name)
    analysis = run.stage("lora_application").facts["lora_application"]
    assert not analysis["effective"]
    assert {"lora_not_loaded", "lora_part_unnamed"} <= {finding["id"] for finding in analysis["findings"]}


@pytest.mark.parametrize(("prefix", "kind"), [("hada", "LoHa"), ("lokr", "LoKr")])
def test_a_file_of_a_kind_that_diffusers_refuses_is_called_that_and_the_advice_mends_it(
    prefix: str, kind: str, tmp_path: Path
) -> None:
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    layer = pipeline.unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1.to_q
    name = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
    generator = torch.Generator().manual_seed(0)
    state = {}
    for factor in ("w1", "w2"):
        sizes = layer.weight.shape if kind == "LoHa" or factor == "w2" else (4, 4)
        rows, columns = (size // (4 if kind == "LoKr" and factor == "w2" else 1) for size in sizes)
        state[f"{name}.{prefix}_{factor}_a"] = torch.randn(rows, 2, generator=generator)
        state[f"{name}.{prefix}_{factor}_b"] = torch.randn(2, columns, generator=generator)
    path = write(state, tmp_path / "style.safetensors")
    with sigmascope.watch(pipeline) as watching, suppress(ValueError):
        pipeline.load_lora_weights(str(path))
    run = watching.record()
    assert f"the file holds {kind}, which ComfyUI applies and diffusers does not" in (idle_lora(run) or "")
    advice = next(one.advice or "" for one in run.findings if one.id == "lora_comfyui_only")
    options = advice.rstrip(".").partition("sigmascope lora convert FILE NEW ")[2].split()
    plain = tmp_path / "plain.safetensors"
    assert CliRunner().invoke(app, ["lora", "convert", str(path), str(plain), *options]).exit_code == 0
    pipeline.load_lora_weights(str(plain))
    assert not torch.equal(generate(pipeline, "sd15", num_inference_steps=1), bare)


@pytest.mark.parametrize("layers", ["attn2", "processor"])
def test_a_lora_on_an_ip_adapter_s_own_layers_is_on_the_model(layers: str, tmp_path: Path) -> None:
    """PEFT names these layers by the attention processor that they are in."""
    pipeline = make_pipeline("sd15")
    _load_ip_adapter(pipeline, tmp_path)
    call: dict[str, Any] = {"ip_adapter_image_embeds": [torch.ones(2, 1, 8)], "num_inference_steps": 1}
    bare = generate(pipeline, "sd15", **call)
    state = lora_state(pipeline, ["unet"], only=layers)
    norm = sum(
        float((state[f"{name}.lora_B.weight"].double() @ state[f"{name}.lora_A.weight"].double()).norm() ** 2)
        for name in modules_of(state)
    )
    with sigmascope.watch(pipeline) as watching:
        pipeline.load_lora_weights(str(write(state, tmp_path / "lora.safetensors")))
        picture = generate(pipeline, "sd15", **call)
    run = watching.record()
    (stage,) = lora_stages(run)
    found = stage.facts["lora_application"]
    assert not torch.equal(picture, bare)
    assert found["effective"] is True
    assert found["unet_weight_changes"]["delta_norm"] == pytest.approx(norm**0.5, rel=1e-3)
    assert found["findings"] == []


def _load_ip_adapter(pipeline: Any, folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    layers: dict[str, torch.Tensor] = {}
    for place, name in enumerate(pipeline.unet.attn_processors):
        if ".attn2." in name:
            shape = pipeline.unet.get_submodule(name.removesuffix(".processor")).to_k.weight.shape
            for layer in ("to_k_ip", "to_v_ip"):
                layers[f"{place}.{layer}.weight"] = torch.randn(shape, generator=generator)
    projection = {
        "proj.weight": torch.randn(64, 8, generator=generator),
        "proj.bias": torch.zeros(64),
        "norm.weight": torch.ones(16),
        "norm.bias": torch.zeros(16),
    }
    torch.save({"image_proj": projection, "ip_adapter": layers}, folder / "ip.bin")
    pipeline.load_ip_adapter(str(folder), subfolder="", weight_name="ip.bin", image_encoder_folder=None)


@pytest.mark.parametrize(
    ("family", "start", "prefix", "advice"),
    [
        ("flux", "transformer.", "unet", 'load_lora_weights, or pass prefix="transformer",'),
        ("flux", "", "transformer", "Pass prefix=None,"),
        ("sd15", "unet.", "transformer", 'load_lora_weights, or pass prefix="unet",'),
        ("wan", "diffusion_model.", "transformer", "load_lora_weights, or convert it"),
    ],
)
def test_a_model_s_own_loader_takes_the_names_with_its_prefix_alone(
    family: str, start: str, prefix: str, advice: str
) -> None:
    pipeline, part = make_pipeline(family), FAMILIES[family].denoiser
    state = lora_state(pipeline, [part], only="to_")
    named = {start + name.removeprefix(f"{part}."): factor for name, factor in state.items()}
    model = getattr(pipeline, part)
    with sigmascope.watch(pipeline) as run:
        model.load_lora_adapter(named, prefix=prefix, adapter_name="style")
    assert not getattr(model, "peft_config", {})  # diffusers took nothing
    first = run.stage("lora_application").facts["lora_application"]["findings"][0]
    assert first["id"] == "lora_not_loaded"
    assert f"its prefix ({prefix}.), and none in the file does" in first["message"]
    assert advice in first["advice"]
