"""LoRAs extracted from pairs of real models, small, loaded by diffusers itself: outputs equal the tuned model's."""

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sigmascope.errors import ConfigError
from sigmascope.lora.checkpoint_merge import merge_into_checkpoint
from sigmascope.lora.extract import ExtractionReport, ExtractOptions, extract_lora
from sigmascope.lora.pairs import PairOptions
from sigmascope.lora.reader import load_lora

diffusers: Any = pytest.importorskip("diffusers")
pytest.importorskip("peft")

State = dict[str, Tensor]
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
EVERYTHING = ExtractOptions(rank=9999, conv_rank=9999, save_precision="float")
UNET: dict[str, Any] = {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 4,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}


def clip() -> nn.Module:
    import transformers

    config = transformers.CLIPTextConfig(
        vocab_size=20, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model: nn.Module = transformers.CLIPTextModel(config)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sd15": lambda: diffusers.UNet2DConditionModel(**UNET, cross_attention_dim=768),
    "sdxl": lambda: diffusers.UNet2DConditionModel(
        **UNET, cross_attention_dim=2048, use_linear_projection=True, addition_embed_type="text_time",
        addition_time_embed_dim=4, projection_class_embeddings_input_dim=32,
    ),
    "sd3": lambda: diffusers.SD3Transformer2DModel(
        sample_size=4, num_layers=1, attention_head_dim=4, num_attention_heads=2, joint_attention_dim=8,
        caption_projection_dim=8, pooled_projection_dim=8, pos_embed_max_size=4,
    ),
    "flux": lambda: diffusers.FluxTransformer2DModel(
        num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=1,
        joint_attention_dim=8, pooled_projection_dim=8, in_channels=4, axes_dims_rope=(4, 6, 6),
    ),
    "wan": lambda: diffusers.WanTransformer3DModel(
        num_layers=1, attention_head_dim=12, num_attention_heads=1, text_dim=8, ffn_dim=16, freq_dim=8
    ),
    "qwen_image": lambda: diffusers.QwenImageTransformer2DModel(
        num_layers=1, attention_head_dim=16, num_attention_heads=1, joint_attention_dim=8, in_channels=4,
        axes_dims_rope=(4, 6, 6),
    ),
    "vae": lambda: diffusers.AutoencoderKL(
        block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=4,
    ),
    "wan_vae": lambda: diffusers.AutoencoderKLWan(base_dim=4, z_dim=4, num_res_blocks=1),
    "clip": clip,
}  # fmt: skip
COMPONENT = {"sd15": "unet", "sdxl": "unet", "vae": "vae", "wan_vae": "vae", "clip": "text_encoder"}
DENOISERS = ["sd15", "sdxl", "sd3", "flux", "wan", "qwen_image"]


def r(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


INPUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "sd15": lambda: {"sample": r(1, 4, 8, 8), "timestep": 5, "encoder_hidden_states": r(1, 3, 768)},
    "sdxl": lambda: {
        "sample": r(1, 4, 8, 8),
        "timestep": 5,
        "encoder_hidden_states": r(1, 3, 2048),
        "added_cond_kwargs": {"text_embeds": r(1, 8), "time_ids": torch.ones(1, 6)},
    },
    "sd3": lambda: {
        "hidden_states": r(1, 16, 4, 4),
        "encoder_hidden_states": r(1, 3, 8),
        "pooled_projections": r(1, 8),
        "timestep": torch.tensor([5]),
    },
    "flux": lambda: {
        "hidden_states": r(1, 6, 4),
        "encoder_hidden_states": r(1, 3, 8),
        "pooled_projections": r(1, 8),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(6, 3),
        "txt_ids": torch.zeros(3, 3),
    },
    "wan": lambda: {
        "hidden_states": r(1, 16, 1, 4, 4),
        "timestep": torch.tensor([5]),
        "encoder_hidden_states": r(1, 3, 8),
    },
    "qwen_image": lambda: {
        "hidden_states": r(1, 4, 4),
        "encoder_hidden_states": r(1, 3, 8),
        "encoder_hidden_states_mask": torch.ones(1, 3, dtype=torch.bool),
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, 2, 2)]],
    },
    "vae": lambda: {"sample": r(1, 3, 8, 8)},
}


@cache
def base_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # diffusers' own use of what it deprecates
        model = MODELS[name]().eval()
    for parameter in model.parameters():  # some begin as zeros, and would hide what is behind them
        nn.init.normal_(parameter, std=0.3)
    return model


def changed(module: nn.Module, name: str, share: float, *, others: bool) -> None:
    generator = torch.Generator().manual_seed(len(name))
    for key, parameter in module.named_parameters(recurse=False):
        if others or (isinstance(module, LAYERS) and key == "weight"):
            parameter.data += share * torch.randn(parameter.shape, generator=generator)


@cache
def tuned_model(name: str, *, others: bool = False) -> nn.Module:
    """Every Linear and convolution weight changed; with `others`, biases, norms and embeddings too."""
    model = copy.deepcopy(base_model(name))
    for path, module in model.named_modules():
        changed(module, path, 0.1, others=others)
    return model


def state(model: nn.Module) -> State:
    return {key: tensor.detach().clone().contiguous() for key, tensor in model.state_dict().items()}


def deltas(name: str) -> State:
    """The change of every layer, by its path."""
    base, tuned = state(base_model(name)), state(tuned_model(name))
    return {
        path: tuned[f"{path}.weight"].double() - base[f"{path}.weight"].double()
        for path, module in base_model(name).named_modules()
        if isinstance(module, LAYERS)
    }


def output(model: nn.Module, name: str) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(**INPUTS[name](), return_dict=False)[0]
    return result


def component(name: str) -> str:
    return COMPONENT.get(name, "transformer")


def inside(layer: str, name: str) -> str:
    """A layer's path in the module of its component; CLIP's began at `text_model` before transformers 5."""
    return layer.removeprefix(f"{component(name)}.").removeprefix("text_model.")


# The forms in which people have models


def pipeline_folder(folder: Path, models: dict[str, nn.Module], **saving: Any) -> Path:
    for name, model in models.items():
        saved: Any = model
        saved.save_pretrained(folder / name, **saving)
    index = {name: ["diffusers", type(model).__name__] for name, model in models.items()}
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "Pipeline", **index}))
    return folder


def in_a_pipeline(folder: Path, name: str, model: nn.Module) -> Path:
    beside = {} if name in DENOISERS else {"unet": base_model("sd15")}
    return pipeline_folder(folder, {component(name): model, **beside})


def as_a_component(folder: Path, name: str, model: nn.Module) -> Path:
    saved: Any = model
    saved.save_pretrained(folder)
    return folder


def in_shards(folder: Path, name: str, model: nn.Module) -> Path:
    beside = {} if name in DENOISERS else {"unet": base_model("sd15")}
    return pipeline_folder(folder, {component(name): model, **beside}, max_shard_size="30KB")


def as_one_file(folder: Path, name: str, model: nn.Module) -> Path:
    save_file(state(model), folder.with_suffix(".safetensors"))
    return folder.with_suffix(".safetensors")


def as_ckpt(folder: Path, name: str, model: nn.Module) -> Path:
    torch.save({"state_dict": state(model)}, folder.with_suffix(".ckpt"))
    return folder.with_suffix(".ckpt")


Write = Callable[[Path, str, nn.Module], Path]


def extracted(
    tmp_path: Path, name: str, write: Write = as_one_file, options: ExtractOptions = EVERYTHING, **tuning: Any
) -> ExtractionReport:
    files = (
        write(tmp_path / "base", name, base_model(name)),
        write(tmp_path / "tuned", name, tuned_model(name, **tuning)),
    )
    return extract_lora(*files, tmp_path / "lora.safetensors", options)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


FORMS = [*((name, in_a_pipeline) for name in DENOISERS), ("sd15", as_one_file), ("flux", as_one_file)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "write"), [*FORMS, ("vae", as_a_component)])
def test_diffusers_loads_every_layer_and_its_output_is_the_tuned_models(
    tmp_path: Path, name: str, write: Write
) -> None:
    pairing = PairOptions(parts=("vae",) if name == "vae" else ("denoiser",))
    options = ExtractOptions(9999, 9999, "float", pairing=pairing)
    report = extracted(tmp_path, name, write, options)
    assert (report.format, report.total_lora_modules) == ("peft", len(deltas(name)))
    model: Any = copy.deepcopy(base_model(name))
    model.load_lora_adapter(str(report.lora), prefix=component(name))
    expected = output(tuned_model(name), name)
    torch.testing.assert_close(
        output(model, name), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())
    )
    assert not torch.allclose(output(base_model(name), name), expected, rtol=0.05)
    assert report.relative_error == 0.0
    assert report.uncovered == {}


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("wan", as_a_component),
        ("wan", in_shards),
        ("wan_vae", in_a_pipeline),
        ("wan_vae", as_ckpt),
        ("clip", in_a_pipeline),
        ("clip", as_one_file),
    ],
)
def test_every_form_of_a_model_gives_every_layers_change(tmp_path: Path, name: str, write: Write) -> None:
    part: Any = {"wan": "denoiser", "wan_vae": "vae", "clip": "text_encoder"}[name]
    pairing = PairOptions(parts=(part,))
    options = ExtractOptions(rank=4, conv_rank=3, save_precision="float", pairing=pairing)
    report = extracted(tmp_path, name, write, options)
    modules = load_lora(report.lora).modules
    wanted = deltas(name)
    assert len(modules) == len(wanted) == len(report.modules)
    reported = {inside(module.name, name): module for module in report.modules}
    for module, factors in modules.items():
        path = inside(module, name)
        delta, found = wanted[path], reported[path]
        kept = 3 if delta.ndim > 2 else 4
        discarded = float(torch.linalg.svdvals(delta.flatten(1))[kept:].norm())
        error = float((factors.delta(torch.float64) - delta).norm())
        assert error == pytest.approx(discarded, rel=1e-4, abs=1e-6)
        assert found.error_norm == pytest.approx(error, rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_ranks_that_differ_load_too(tmp_path: Path) -> None:
    from sigmascope.lora.budget import Budget

    report = extracted(tmp_path, "sd15", options=ExtractOptions(budget=Budget(max_error=0.02, min_rank=0)))
    assert len({module.rank for module in report.modules}) > 4
    model: Any = copy.deepcopy(base_model("sd15"))
    model.load_lora_adapter(str(report.lora), prefix="unet")
    expected = output(tuned_model("sd15"), "sd15")
    left = (output(model, "sd15") - expected).norm() / (output(base_model("sd15"), "sd15") - expected).norm()
    assert left < 0.1


# Biases, norms, embeddings


@pytest.mark.slow
@pytest.mark.parametrize(("name", "format"), [("sd15", "kohya"), ("sdxl", "comfyui"), ("sdxl", "native")])
def test_with_biases_and_norms_the_base_becomes_the_tuned_model(
    tmp_path: Path, name: str, format: str
) -> None:
    options = ExtractOptions(9999, 9999, save_precision="float", biases_and_norms=True, format=format)
    report = extracted(tmp_path, name, options=options, others=True)
    wanted = state(tuned_model(name, others=True))
    assert len(report.modules) + len(report.diffs) == len(wanted)
    assert report.uncovered == {}
    merge_into_checkpoint([report.lora], report.base, tmp_path / "baked.safetensors")
    baked = load_file(tmp_path / "baked.safetensors")
    for key, tensor in wanted.items():
        torch.testing.assert_close(baked[key], tensor, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["flux", "wan_vae", "clip"])
def test_natively_every_tensor_of_every_model_is_kept(tmp_path: Path, name: str) -> None:
    part: Any = {"wan_vae": "vae", "clip": "text_encoder"}.get(name, "denoiser")
    options = ExtractOptions(
        9999, 9999, save_precision="float", biases_and_norms=True, format="native",
        pairing=PairOptions(parts=(part,)),
    )  # fmt: skip
    report = extracted(tmp_path, name, options=options, others=True)
    base, wanted = state(base_model(name)), state(tuned_model(name, others=True))
    different = {key for key in wanted if not torch.equal(base[key], wanted[key])}
    assert len(report.modules) + len(report.diffs) == len(different)
    stored = load_file(report.lora)
    for key in report.diffs:
        path = key.removesuffix(".weight").removesuffix(".bias")
        end = "diff_b" if key.endswith(".bias") else "diff"
        torch.testing.assert_close(stored[f"{path}.{end}"], wanted[key] - base[key])


def test_without_them_they_are_named_as_not_covered(tmp_path: Path) -> None:
    report = extracted(tmp_path, "sd15", others=True)
    base, wanted = state(base_model("sd15")), state(tuned_model("sd15", others=True))
    layers = {f"{path}.weight" for path in deltas("sd15")}
    assert report.uncovered.keys() == wanted.keys() - layers
    for key, norm in report.uncovered.items():
        assert norm == pytest.approx(float((wanted[key] - base[key]).norm()), rel=1e-5)
    assert [finding.id for finding in report.findings] == ["lora.biases_and_norms_changed"]


def test_a_format_that_cannot_hold_them_is_refused(tmp_path: Path) -> None:
    options = ExtractOptions(biases_and_norms=True)
    with pytest.raises(ConfigError, match=r"--biases_and_norms: peft files .*--format native") as caught:
        extracted(tmp_path, "sd15", options=options)
    assert "native" in str(caught.value.hint)
    assert not (tmp_path / "lora.safetensors").exists()


@pytest.mark.parametrize("format", ["kohya", "comfyui"])
def test_a_format_without_a_name_for_one_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    monkeypatch.setattr("sigmascope.lora.layer_extraction.extract_layer", None)
    options = ExtractOptions(biases_and_norms=True, format=format)
    with pytest.raises(ConfigError, match=r"--biases_and_norms: .* is not one layer in") as caught:
        extracted(tmp_path, "flux", options=options, others=True)
    assert "native" in str(caught.value.hint)


# Parts


def whole_pipeline(folder: Path, *, tuned: bool, **saving: Any) -> Path:
    names = {"unet": "sdxl", "vae": "vae", "text_encoder": "clip"}
    make = tuned_model if tuned else base_model
    return pipeline_folder(folder, {part: make(name) for part, name in names.items()}, **saving)


@pytest.mark.slow
def test_parts_are_compared_when_asked_for(tmp_path: Path) -> None:
    files = whole_pipeline(tmp_path / "base", tuned=False), whole_pipeline(tmp_path / "tuned", tuned=True)
    pairing = PairOptions(parts=("denoiser", "text_encoder", "vae"))
    report = extract_lora(
        *files, tmp_path / "lora.safetensors", ExtractOptions(9999, 9999, "float", pairing=pairing)
    )
    places = {"unet": "sdxl", "vae": "vae", "text_encoder": "clip"}
    wanted = {
        f"{part}.{path}": delta for part, name in places.items() for path, delta in deltas(name).items()
    }
    assert {module.name.replace("text_model.", "") for module in report.modules} == {
        path.replace("text_model.", "") for path in wanted
    }
    for name, factors in load_lora(report.lora).modules.items():
        (path,) = [
            path for path in wanted if path.replace("text_model.", "") == name.replace("text_model.", "")
        ]
        torch.testing.assert_close(factors.delta(torch.float64), wanted[path], rtol=1e-5, atol=1e-6)
    model: Any = copy.deepcopy(base_model("sdxl"))
    model.load_lora_adapter(str(report.lora), prefix="unet")
    expected = output(tuned_model("sdxl"), "sdxl")
    torch.testing.assert_close(
        output(model, "sdxl"), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())
    )


def test_parts_that_are_not_compared_and_differ_are_named(tmp_path: Path) -> None:
    files = whole_pipeline(tmp_path / "base", tuned=False), whole_pipeline(tmp_path / "tuned", tuned=True)
    report = extract_lora(*files, tmp_path / "lora.safetensors", ExtractOptions(rank=2, conv_rank=2))
    assert all(module.name.startswith("unet.") for module in report.modules)
    (finding,) = report.findings
    assert finding.id == "lora.other_parts_changed"


@pytest.mark.slow
def test_one_variant_of_a_folder_is_compared_with_the_same_of_the_other(tmp_path: Path) -> None:
    files = tmp_path / "base", tmp_path / "tuned"
    for folder, tuned in zip(files, (False, True), strict=True):
        whole_pipeline(folder, tuned=not tuned)  # the plain files say the opposite
        whole_pipeline(folder, tuned=tuned, variant="fp16")
    found = []
    for variant in (None, "fp16"):
        options = ExtractOptions(9999, 9999, "float", pairing=PairOptions(variant=variant))
        report = extract_lora(*files, tmp_path / "lora.safetensors", options)
        found.append(load_lora(report.lora).modules["unet.conv_in"].delta())
    assert torch.equal(found[0], -found[1])
