"""What files hold beside the usual factors, or hold otherwise, arrives whole or is refused by its name."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders.lora_pipeline import FluxLoraLoaderMixin
from safetensors.torch import load_file, save_file
from torch import Tensor

from sigmascope import (
    attach_lora,
    convert_lora,
    extract_lora,
    judge_lora,
    load_lora,
    merge_into_checkpoint,
    merge_into_model,
)
from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import CheckpointError, ConfigError, LoraFormatError, ModelMismatchError
from sigmascope.lora.compatibility import incomplete_base
from sigmascope.lora.extract import ExtractOptions
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.families import Part
from sigmascope.lora.file import LoraFile
from sigmascope.lora.merge import CombineOptions, merge_lora_files
from sigmascope.lora.pairs import PairOptions
from sigmascope.lora.ranks import FixedRank, RankRules
from sigmascope.lora.resize import RankPlan, resize_lora

from .layouts import LAYOUTS
from .models import single_file, tiny
from .test_wild import close, factors_of, in_original, unlike

WHOLE = RankPlan(RankRules(FixedRank(9999, 9999)))


def built(name: str, folder: Path, **other: object) -> tuple[Path, dict[str, Tensor]]:
    """A file of a layout, or of one like it, and the change of each layer."""
    tensors, truth = dataclasses.replace(LAYOUTS[name], **other).build()  # type: ignore[arg-type]
    return saved(tensors, folder), truth


def saved(tensors: dict[str, Tensor], folder: Path, name: str = "lora.safetensors") -> Path:
    save_file({key: tensor.clone().contiguous() for key, tensor in tensors.items()}, folder / name)
    return folder / name


def put_into(family: str, file: Path) -> dict[str, Tensor]:
    """What a file makes of a live model: the differences of its tensors that are not zero."""
    model = tiny(family)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with merge_into_model(model, load_lora(file)):
        after = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    return {
        key.removesuffix(".weight"): after[key] - before[key]
        for key in before
        if not torch.equal(after[key], before[key])
    }


def arrived(changes: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    assert changes.keys() == truth.keys()
    assert [path for path, change in changes.items() if not close(change, truth[path])] == []


# Names that the format's host does not take.


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("qwen-aitoolkit", {"start": "base_model.model."}),  # PEFT's save_pretrained
        ("wan-diffsynth", {}),
        ("lumina2-diffusers", {"start": "lora_transformer_", "ends": "down", "alpha": 1.0}),  # OneTrainer
        ("chroma-onetrainer", {"start": "lora_unet_"}),
        ("flux-xlabs", {}),
        ("flux-xlabs-single", {}),
    ],
)
@pytest.mark.parametrize("how", ["resize", "merge"])
def test_a_resize_or_merge_writes_names_that_a_host_takes(
    name: str, other: dict[str, object], how: str, tmp_path: Path
) -> None:
    """Before, it kept the file's own names, and refused to write what it had made."""
    file, truth = built(name, tmp_path, **other)
    target = tmp_path / "out.safetensors"
    if how == "resize":
        report = resize_lora(file, target, WHOLE)
    else:
        report = merge_lora_files([file, file], target, CombineOptions(weights=(0.25, 0.75)))
    assert report.loads is not None
    taken = [reading.taken for reading in report.loads.stated.hosts.values()]
    assert max(number or 0 for number in taken) == report.loads.stated.hosts["diffusers"].modules
    arrived(put_into(LAYOUTS[name].family, target), truth)


def test_what_a_host_takes_keeps_its_names(tmp_path: Path) -> None:
    file, _ = built("wan-musubi", tmp_path)
    resize_lora(file, tmp_path / "out.safetensors", WHOLE)
    assert load_file(tmp_path / "out.safetensors").keys() == load_file(file).keys()


# Whole differences.


@pytest.mark.parametrize("how", ["resize", "merge"])
def test_a_modulation_has_no_rank_to_cut(how: str, tmp_path: Path) -> None:
    """LightX2V's distilled LoRAs of WAN have `diff_m` (1, 6, width) beside their factors."""
    tensors, truth = LAYOUTS["wan-pipe"].build()
    table = torch.randn(1, 6, 24, generator=torch.Generator().manual_seed(3))
    file = saved(tensors | {"diffusion_model.blocks.0.diff_m": table}, tmp_path)
    target = tmp_path / "out.safetensors"
    if how == "resize":
        carried = resize_lora(file, target, WHOLE).carried
    else:
        carried = merge_lora_files([file], target).carried
    assert [name.endswith("blocks.0.modulation") for name in carried] == [True]
    arrived(put_into("wan", target), truth | {"blocks.0.scale_shift_table": table})


# Files for several parts, and for WAN 2.2's second denoiser.


def encoder_module(start: str) -> dict[str, Tensor]:
    name = f"{start}text_model_encoder_layers_0_self_attn_q_proj"
    return {f"{name}.lora_down.weight": torch.ones(1, 8), f"{name}.lora_up.weight": torch.ones(8, 1)}


@pytest.mark.parametrize("format", ["peft", "kohya", "comfyui"])
def test_a_text_encoders_modules_need_no_model(format: str, tmp_path: Path) -> None:
    """Comfy-Org/ComfyUI 9454: FLUX LoRAs with `lora_te1_`. Of the model, users have the transformer's file."""
    tensors, _ = LAYOUTS["flux-kohya"].build()
    file = saved(tensors | encoder_module("lora_te1_"), tmp_path)
    model = saved(single_file("flux"), tmp_path, "model.safetensors")
    convert_lora(file, tmp_path / "with.safetensors", format, model=model)
    convert_lora(file, tmp_path / "without.safetensors", format)
    assert (
        load_file(tmp_path / "with.safetensors").keys() == load_file(tmp_path / "without.safetensors").keys()
    )


def test_a_refused_merge_says_what_the_modules_are_for(tmp_path: Path) -> None:
    tensors, _ = LAYOUTS["flux-kohya"].build()
    file = saved(tensors | encoder_module("lora_te1_"), tmp_path)
    model = saved(single_file("flux"), tmp_path, "model.safetensors")
    with pytest.raises(
        ModelMismatchError, match=r"q_proj \(it is for the text encoder, which was not given\)"
    ):
        merge_into_checkpoint([file], model, tmp_path / "merged.safetensors")


def test_a_lora_of_the_second_denoiser_goes_into_one_that_is_given_alone(tmp_path: Path) -> None:
    """WAN 2.2's LoRAs for low noise begin with `transformer_2.`; a checkpoint or ComfyUI's file has one denoiser."""
    file, truth = built("wan-diffusers", tmp_path, start="transformer_2.")
    model = saved(single_file("wan"), tmp_path, "model.safetensors")
    merge_into_checkpoint([file], model, tmp_path / "merged.safetensors")
    merged = load_file(tmp_path / "merged.safetensors")
    assert unlike(single_file("wan"), merged, in_original("wan", truth)) == []
    assert judge_lora(file, tiny("wan")).reasons == {}
    for format in (
        "kohya",
        "comfyui",
        "peft",
    ):  # diffusers loads `transformer.` with load_into_transformer_2=True
        convert_lora(file, tmp_path / "out.safetensors", format)
        arrived(put_into("wan", tmp_path / "out.safetensors"), truth)
        assert "transformer_2" not in "".join(load_file(tmp_path / "out.safetensors"))


# One layer twice, and parts of a layer.


def test_one_layer_under_two_names_is_refused_with_both(tmp_path: Path) -> None:
    tensors, _ = LAYOUTS["wan-diffusers"].build()
    copies = {f"ema.{key}": torch.zeros_like(tensor) for key, tensor in tensors.items()}
    file = saved(tensors | copies, tmp_path)
    for format in ("peft", "kohya", "comfyui", "native"):
        with pytest.raises(LoraFormatError, match=r"are both for .*: remove one of them"):
            convert_lora(file, tmp_path / "out.safetensors", format)
    for apply in (attach_lora, merge_into_model):
        with pytest.raises(ModelMismatchError, match="those that name no part and those for denoiser"):
            apply(tiny("wan"), load_lora(file))


def test_factors_of_parts_are_not_read_as_if_they_were_not_there(tmp_path: Path) -> None:
    """musubi-tuner's modules of fused layers have `lora_down.0` to `lora_down.2` until they are saved for a host."""
    tensors, _ = LAYOUTS["flux-kohya"].build()
    name = "lora_unet_double_blocks_0_img_attn_qkv"
    parts = {f"{name}.lora_down.0.weight": torch.ones(1, 16), f"{name}.lora_up.0.weight": torch.ones(16, 1)}
    file = saved({key: tensor for key, tensor in tensors.items() if name not in key} | parts, tmp_path)
    with pytest.raises(LoraFormatError, match=r"img_attn_qkv\.lora_down\.0\.weight"):
        load_lora(file)


# A base that is not whole.


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    tiny("wan").save_pretrained(folder, max_shard_size="30KB")  # type: ignore[operator]
    (folder / "diffusion_pytorch_model.safetensors.index.json").unlink()
    return folder


def test_shards_without_an_index_are_named_so(sharded: Path, tmp_path: Path) -> None:
    shards = sorted(sharded.glob("*.safetensors"))
    total = len(shards)
    with pytest.raises(CheckpointError, match=rf"has {total} of the {total} shards .*, and no index"):
        open_checkpoint(sharded)
    alone = tmp_path / shards[0].name
    alone.write_bytes(shards[0].read_bytes())
    with pytest.raises(CheckpointError, match=rf"has 1 of the {total} shards .*, and no index"):
        open_checkpoint(tmp_path)


def test_a_shard_alone_is_an_incomplete_model(sharded: Path, tmp_path: Path) -> None:
    file, _ = built("wan-pipe", tmp_path)
    shard = min(sharded.glob("*.safetensors"))
    with open_checkpoint(shard) as model:
        verdict = judge_lora(file, model)
    assert set(verdict.reasons) == {"base_incomplete"}
    with pytest.raises(ModelMismatchError, match=rf"{shard.name} is one of \d shards"):
        merge_into_checkpoint([file], shard, tmp_path / "merged.safetensors")
    with pytest.raises(LoraFormatError, match=rf"{shard.name} is one of \d shards"):
        convert_lora(file, tmp_path / "out.safetensors", "peft", model=shard)


def test_blocks_with_a_hole_are_an_incomplete_model_and_no_variant(tmp_path: Path) -> None:
    """All image attention of WAN is in blocks that are there; of a model without a middle block, nobody can tell."""
    tensors = single_file("wan")
    moved = {key.replace("blocks.1.", "blocks.2."): tensor for key, tensor in tensors.items()}
    model = saved(moved, tmp_path, "model.safetensors")
    file, truth = built("wan-i2v-lightx2v", tmp_path)
    whole = saved(tensors, tmp_path, "whole.safetensors")
    lacking = {"blocks.1"} | {"add_" for path in truth if "add_" in path}
    assert len(lacking) == 2
    with open_checkpoint(whole) as opened:
        assert judge_lora(file, opened).reasons.keys() == {"layer_missing"}
    with open_checkpoint(model) as opened:
        verdict = judge_lora(file, opened)
    assert verdict.reasons.keys() == {"base_incomplete"}
    assert "it has blocks.2, but no blocks.1" in verdict.findings[0].message
    with pytest.raises(ModelMismatchError, match=r"it has blocks\.2, but no blocks\.1"):
        merge_into_checkpoint([file], model, tmp_path / "merged.safetensors")


@pytest.mark.parametrize(
    ("layer", "original"),
    [("attn1.to_k", "self_attn.k"), ("attn2.to_q", "cross_attn.q"), ("ffn.net.2", "ffn.2")],
)
def test_a_layer_that_every_model_has_and_no_block_of_this_one_is_an_incomplete_model(
    layer: str, original: str, tmp_path: Path
) -> None:
    whole = {key: tuple(tensor.shape) for key, tensor in tiny("wan").state_dict().items()}
    model = {key: shape for key, shape in whole.items() if layer not in key}
    assert len(model) < len(whole)
    file, truth = built("wan-pipe", tmp_path)
    verdict = judge_lora(file, model)
    assert verdict.reasons == {"layer_lost": sum(layer in path for path in truth)}
    assert f"none of its blocks has {original}, which every WAN model has" in str(verdict.modules)


def test_a_layer_is_in_no_other_block_because_one_with_another_number_in_its_name_is() -> None:
    """Of a model of no known family, all blocks of which have `linear_2`, and none `linear_1`."""
    factors = LoraFactors(torch.zeros(4, 1), torch.zeros(1, 4), 1.0, (4, 4))
    lora = LoraFile({"transformer.rows.0.mix_1.linear_1": factors}, format="peft")
    model = {f"rows.{number}.mix_2.linear_2.weight": (4, 4) for number in range(2)}
    assert judge_lora(lora, model).reasons.keys() == {"unknown"}
    other = {f"rows.{number}.mix_1.linear_1.weight": (4, 4) for number in range(1, 3)}
    assert judge_lora(lora, other).reasons.keys() == {"block_missing"}


def test_layers_that_a_distilled_unet_goes_without_are_no_hole() -> None:
    """Stable Diffusion's original names count layers: with one in each block, as BK-SDM has, every third number is free."""
    held = ("time_embed.0", "input_blocks.0.0", "input_blocks.1.0", "input_blocks.3.0", "output_blocks.1.0")
    names = [f"model.diffusion_model.{name}" for name in (*held, "input_blocks.4.1.transformer_blocks.0")]
    assert incomplete_base({f"{name}.weight": (4, 4) for name in names}) is None
    assert incomplete_base({f"{names[-1].replace('s.0', 's.1')}.weight": (4, 4)}) is not None


# PEFT's configuration.


def test_a_sharded_adapter_has_its_configuration(tmp_path: Path) -> None:
    tensors, truth = dataclasses.replace(LAYOUTS["hunyuan-diffusers"], start="base_model.model.").build()
    shards = {
        key: f"adapter_model-0000{1 + index % 2}-of-00002.safetensors" for index, key in enumerate(tensors)
    }
    for shard in set(shards.values()):
        saved({key: tensors[key] for key in tensors if shards[key] == shard}, tmp_path, shard)
    index = tmp_path / "adapter_model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 6}))
    arrived(put_into("hunyuan", index), {path: 3 * change for path, change in truth.items()})
    convert_lora(index, tmp_path / "out.safetensors", "peft")
    arrived(factors_of(tmp_path / "out.safetensors"), {path: 3 * change for path, change in truth.items()})


def test_modules_that_peft_trained_whole_take_the_models_place(tmp_path: Path) -> None:
    """`modules_to_save`: their weights and biases stand beside the factors, under their own names."""
    tensors, truth = dataclasses.replace(LAYOUTS["sd3-diffusers"], start="base_model.model.").build()
    state, layer = tiny("sd3").state_dict(), "context_embedder"
    whole = {f"{layer}.{end}": state[f"{layer}.{end}"] + 0.25 for end in ("weight", "bias")}
    beside = {"base_model.model.pos_embed.proj.weight": torch.zeros(1)}  # not named: what it is, nobody knows
    named = {f"base_model.model.{key}": tensor for key, tensor in whole.items()}
    file = saved(tensors | named | beside, tmp_path, "adapter_model.safetensors")
    assert layer not in load_lora(file).names
    config = {"r": 2, "lora_alpha": 2, "modules_to_save": [layer]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert load_lora(file).unused_keys == tuple(beside)
    truth |= {path.removesuffix(".weight"): torch.full(one.shape, 0.25) for path, one in whole.items()}
    arrived(put_into("sd3", file), truth)
    model = saved(single_file("sd3"), tmp_path, "model.safetensors")
    with pytest.raises(LoraFormatError, match=r"bias: kohya files cannot hold such a change \(set\)"):
        convert_lora(file, tmp_path / "out.safetensors", "kohya")
    convert_lora(file, tmp_path / "out.safetensors", "comfyui", model=model)
    arrived(put_into("sd3", tmp_path / "out.safetensors"), truth)


# Biases of up factors.


def test_peft_has_a_bias_beside_factors_as_the_up_factors_own(tmp_path: Path) -> None:
    """PEFT's `lora_bias=True`; diffusers takes such files, and what a conversion writes of kohya's `diff_b`."""
    layout = dataclasses.replace(LAYOUTS["flux-aitoolkit"], only=r"blocks.*attn\.to_[qkv]$")
    tensors, truth = layout.build()
    start = "transformer."
    biases = {path: torch.full((len(change),), 0.25) for path, change in truth.items()}
    file = saved(tensors | {f"{start}{path}.lora_B.bias": bias for path, bias in biases.items()}, tmp_path)
    everything = truth | {f"{path}.bias": bias for path, bias in biases.items()}
    arrived(put_into("flux", file), everything)
    convert_lora(file, tmp_path / "kohya.safetensors", "kohya")
    convert_lora(tmp_path / "kohya.safetensors", tmp_path / "peft.safetensors", "peft")
    resize_lora(file, tmp_path / "resized.safetensors", WHOLE)
    for name in ("peft", "resized"):
        arrived(put_into("flux", tmp_path / f"{name}.safetensors"), everything)
        model = copy.deepcopy(tiny("flux"))
        FluxLoraLoaderMixin.load_lora_into_transformer(
            load_file(tmp_path / f"{name}.safetensors"), network_alphas=None, transformer=model
        )
        for path, change in truth.items():
            layer, plain = model.get_submodule(path), tiny("flux").get_submodule(path)
            given = torch.randn(3, change.shape[1])
            wanted = plain(given) + given @ change.mT + 0.25
            torch.testing.assert_close(layer(given), wanted, atol=1e-5, rtol=1e-5)


def test_peft_has_no_bias_of_a_layer_without_factors(tmp_path: Path) -> None:
    tensors, _ = LAYOUTS["wan-pipe"].build()
    file = saved(tensors | {"diffusion_model.head.head.diff_b": torch.ones(4)}, tmp_path)
    with pytest.raises(LoraFormatError, match="only beside factors of its layer"):
        convert_lora(file, tmp_path / "peft.safetensors", "peft")


def test_of_a_file_for_both_denoisers_each_folder_gets_its_own(tmp_path: Path) -> None:
    """WAN 2.2 as diffusers saves LoRAs of it; its two denoisers have layers of the same names."""
    high, of_high = LAYOUTS["wan-diffusers"].build()
    low, of_low = dataclasses.replace(LAYOUTS["wan-diffusers"], start="transformer_2.").build()
    low = {key: 2 * tensor if ".lora_B." in key else tensor for key, tensor in low.items()}
    of_low = {path: 2 * change for path, change in of_low.items()}
    file, merged = saved(high | low, tmp_path), tmp_path / "merged.safetensors"
    before = tiny("wan").state_dict()
    for folder, truth in (("transformer", of_high), ("transformer_2", of_low)):
        tiny("wan").save_pretrained(tmp_path / folder)  # type: ignore[operator]
        with pytest.raises(
            ModelMismatchError, match=r"it is for the (?:first|second) denoiser, which was not"
        ):
            merge_into_checkpoint([file], tmp_path / folder, merged)
        merge_into_checkpoint([file], tmp_path / folder, merged, allow_unmatched=True)
        assert unlike(before, load_file(merged), truth) == []
        with open_checkpoint(tmp_path / folder) as model:
            assert len(judge_lora(file, model).matched) == len(truth)
        convert_lora(file, tmp_path / "o.safetensors", "peft", model=tmp_path / folder, drop_unsupported=True)
        arrived(factors_of(tmp_path / "o.safetensors"), truth)


def test_a_file_is_extracted_of_one_denoiser_by_its_folder(tmp_path: Path) -> None:
    model: Any = tiny("wan")
    tuned = copy.deepcopy(model)
    with torch.no_grad():
        tuned.blocks[0].attn1.to_q.weight.add_(1)
    for one, side in ((model, "base"), (tuned, "tuned")):
        for part in ("transformer", "transformer_2"):
            one.save_pretrained(tmp_path / side / part)
        kind = ["diffusers", "WanTransformer3DModel"]
        index = {"_class_name": "WanPipeline", "transformer": kind, "transformer_2": kind}
        (tmp_path / side / "model_index.json").write_text(json.dumps(index))
    base, after, out = tmp_path / "base", tmp_path / "tuned", tmp_path / "out.safetensors"
    both: tuple[Part, ...] = ("denoiser", "denoiser_2")
    for parts in (both, both[1:]):
        options = ExtractOptions(rank=1, pairing=PairOptions(parts=parts))
        with pytest.raises(ConfigError, match="peft files are for one denoiser"):
            extract_lora(base, after, out, options)
        assert not out.exists()
    report = extract_lora(base / "transformer_2", after / "transformer_2", out, ExtractOptions(rank=1))
    assert (report.format, [*load_lora(out).modules]) == ("peft", ["transformer.blocks.0.attn1.to_q"])
