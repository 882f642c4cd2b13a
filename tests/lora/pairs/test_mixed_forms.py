"""A base and a tuned model in two forms: the pair is the same as if both had the base's form.

Original files are made of diffusers' models by the families' tables, whose layers `families/test_names_of_models` holds to
diffusers' own conversions, and whose norms are held to them here.
"""

import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.lora.families.small_models import small
from tests.lora.families.test_names_of_models import CONVERSIONS, Lenient
from tests.lora.pairs.test_pair_models import Save, State, save, state, tuned
from torch import Tensor

from sigmascope import extract_lora
from sigmascope.errors import ModelMismatchError
from sigmascope.lora.extract import ExtractOptions
from sigmascope.lora.families import FAMILIES, row_of_diffusers
from sigmascope.lora.families.family import Row, parsed_rows
from sigmascope.lora.layer_names import blocks_of, to_sgm
from sigmascope.lora.pairs import PairOptions, open_pair, pair_findings
from sigmascope.lora.storage_noise import is_coarse

__all__ = ["save"]  # a fixture
MODELS = ("sdxl", "flux", "wan", "z_image", "qwen_image", "sd3")
"""Of each, diffusers' model in small."""


def of_diffusers(name: str) -> State:
    if name != "z_image":
        return state(name)
    generator = torch.Generator().manual_seed(0)
    return {
        key: torch.randn(value.shape, generator=generator) for key, value in small(name).state_dict().items()
    }


def vector_rows(name: str) -> dict[str, Row]:
    return {part: row for row in parsed_rows(FAMILIES[name].vectors) for part in row.parts}


def in_original_form(name: str, model: State) -> State:
    """The same model as its original file has it."""
    if name == "sdxl":
        blocks = blocks_of({key.rpartition(".")[0] for key in model})
        keys = {key: key.rpartition(".") for key in model}
        return {f"{to_sgm(path, blocks)}.{ending}": model[key] for key, (path, _, ending) in keys.items()}
    made: State = {}
    for key in model:
        path, dot, ending = key.rpartition(".")
        number = re.search(r"\d+", path)
        template = path if number is None else f"{path[: number.start()]}#{path[number.end() :]}"
        row = row_of_diffusers(name, path)
        vector = vector_rows(name).get(template)
        if vector is not None:
            original = vector.original.replace("#", number[0] if number else "")
            made[f"{original}.{'scale' if original.endswith('_norm') else ending}"] = model[key]
        elif row is None:
            whole = row_of_diffusers(name, key)
            made[key if whole is None else whole.original] = model[key]
        elif path == row.parts[0]:
            joined = torch.cat([model[f"{part}{dot}{ending}"] for part in row.parts])
            outputs, inputs = (
                model[f"{path}.weight"].reshape(len(joined), -1).shape
                if row.is_rename or row.swapped
                else (0, 0)
            )
            halves = row.swapped and row.swaps(outputs, inputs)
            made[f"{row.original}{dot}{ending}"] = joined.roll(len(joined) // 2, 0) if halves else joined
    return made


def pipeline(folder: Path, component: str, model: State) -> Path:
    """A folder as diffusers saves it, its denoiser in two shards."""
    (folder / component).mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps({component: ["diffusers", "Model"]}))
    (folder / component / "config.json").write_text("{}")
    keys = list(model)
    weight_map: dict[str, str] = {}
    for number, some in enumerate((keys[::2], keys[1::2]), start=1):
        shard = f"diffusion_pytorch_model-0000{number}-of-00002.safetensors"
        save_file({key: model[key].contiguous() for key in some}, folder / component / shard)
        weight_map |= dict.fromkeys(some, shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / component / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def single_file(name: str, model: State) -> State:
    """As download sites have it: with a prefix, and for the U-Net with the averaged weights beside it."""
    averaged = {"model_ema.diffusion_modeltime_embed0weight": torch.zeros(3)} if name == "sdxl" else {}
    return averaged | {
        f"model.diffusion_model.{key}": value.contiguous()
        for key, value in in_original_form(name, model).items()
    }


def extracted(base: Path, tuned_file: Path, target: Path) -> dict[str, Tensor]:
    extract_lora(
        base, tuned_file, target, ExtractOptions(rank=3, conv_rank=3, format="native", biases_and_norms=True)
    )
    stored: State = load_file(target)
    return stored


@pytest.mark.parametrize(
    ("name", "ending"), [("flux2", ".scale"), ("hunyuan_video", ".weight"), ("lumina2", ".weight")]
)
def test_norms_have_the_names_that_diffusers_conversions_give_them(name: str, ending: str) -> None:
    """FLUX' and Chroma's are FLUX.2's; the conversions of those two ask for whole models."""
    rows = {
        row.original.replace("#", "0") + ending: row
        for row in parsed_rows(FAMILIES[name].vectors)
        if ending == ".scale"
        or (
            "attn.norm." not in row.original
            and ".norm.query" not in row.original
            and ".norm.key" not in row.original
        )
    }
    values = {key: torch.full((12,), float(number)) for number, key in enumerate(rows, start=1)}
    converted = CONVERSIONS[name](Lenient(dict(values)))
    assert len(rows) >= 6
    for key, row in rows.items():
        assert torch.equal(converted[row.parts[0].replace("#", "0") + ".weight"], values[key]), key


def in_both_forms(name: str, folder: Path, save: Save) -> dict[str, tuple[Path, Path]]:
    """The base and the tuned model, by form."""
    before = of_diffusers(name)
    models = {"a": before, "b": tuned(before)}
    component = "unet" if name == "sdxl" else "transformer"
    folders = [pipeline(folder / side, component, model) for side, model in models.items()]
    singles = [save(side, single_file(name, model)) for side, model in models.items()]
    return {"folder": (folders[0], folders[1]), "single file": (singles[0], singles[1])}


OTHER_FORM = {"folder": "single file", "single file": "folder"}


@pytest.mark.parametrize("form", OTHER_FORM)
@pytest.mark.parametrize("name", MODELS)
def test_a_tuned_model_in_the_other_form_has_the_tensors_of_the_plain_pair(
    name: str, form: str, tmp_path: Path, save: Save
) -> None:
    files = in_both_forms(name, tmp_path, save)
    with open_pair(*files[form]) as plain, open_pair(files[form][0], files[OTHER_FORM[form]][1]) as mixed:
        assert mixed.layers == plain.layers
        assert mixed.others == plain.others
        assert mixed.skipped == {}
        for key in (*(f"{layer}.weight" for layer in plain.layers), *plain.others):
            wanted = plain.tuned.tensor(key)
            assert torch.equal(mixed.tuned.tensor(key), wanted), key
            pieces = [
                piece.clone() for piece in mixed.tuned.pieces(key, torch.empty(1000, dtype=torch.uint8))
            ]
            assert torch.equal(torch.cat(pieces), wanted.reshape(-1)), key
            assert {len(piece) for piece in pieces[:-1]} <= {250}


@pytest.mark.slow
@pytest.mark.parametrize("form", OTHER_FORM)
@pytest.mark.parametrize("name", MODELS)
def test_the_lora_of_a_folder_and_a_single_file_is_that_of_the_plain_pair(
    name: str, form: str, tmp_path: Path, save: Save
) -> None:
    files = in_both_forms(name, tmp_path, save)
    plain = extracted(*files[form], tmp_path / "plain.safetensors")
    mixed = extracted(files[form][0], files[OTHER_FORM[form]][1], tmp_path / "mixed.safetensors")
    assert len(plain) > 20
    assert plain.keys() == mixed.keys()
    for key, value in plain.items():
        assert torch.equal(mixed[key], value), key


@pytest.mark.slow
def test_an_extraction_from_two_forms_that_was_stopped_goes_on(tmp_path: Path, save: Save) -> None:
    files = in_both_forms("wan", tmp_path, save)
    pair, options = (files["folder"][0], files["single file"][1]), ExtractOptions(rank=2, conv_rank=2)
    seen: list[str] = []

    def stop(done: int, total: int, layer: str) -> None:
        if done == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        extract_lora(*pair, tmp_path / "lora.safetensors", options, progress=stop)
    assert not (tmp_path / "lora.safetensors").exists()
    extract_lora(
        *pair, tmp_path / "lora.safetensors", options, progress=lambda done, *_: seen.append(str(done))
    )
    extract_lora(*pair, tmp_path / "again" / "lora.safetensors", options)
    assert len(seen) < 33  # of its layers
    assert (tmp_path / "lora.safetensors").read_bytes() == (
        tmp_path / "again" / "lora.safetensors"
    ).read_bytes()


def as_gguf(path: Path, model: State, kind: str) -> Path:
    """As llama.cpp's tools and ComfyUI-GGUF's write it: matrices whose rows divide are quantised."""
    writer = gguf.GGUFWriter(path, "flux")
    for key, value in model.items():
        numbers = value.float().contiguous().numpy()
        if value.ndim == 2 and value.shape[1] % 32 == 0:
            type_ = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(key, gguf.quants.quantize(numbers, type_), raw_dtype=type_)
        else:
            writer.add_tensor(key, numbers)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return path


def scaled_fp8(model: State) -> State:
    stored: State = {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    for key, value in model.items():
        if value.ndim == 2:
            scale = value.abs().amax() / 448
            stored[key] = (value / scale).to(torch.float8_e4m3fn)
            stored[key.removesuffix("weight") + "scale_weight"] = scale
        else:
            stored[key] = value
    return stored


@pytest.fixture(scope="module")
def z_image() -> tuple[State, State]:
    before = of_diffusers("z_image")
    generator = torch.Generator().manual_seed(2)
    after = {
        key: value + 0.05 * torch.randn(value.shape, generator=generator) for key, value in before.items()
    }
    return before, after


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "fp8", "scaled fp8"])
def test_a_quantised_single_file_is_a_base_for_a_folder(
    kind: str, z_image: tuple[State, State], tmp_path: Path, save: Save
) -> None:
    """The change is off by what the rounding moved the base, to the last bit, and the finding says how much that is."""
    before, after = z_image
    original = {key: value.contiguous() for key, value in in_original_form("z_image", before).items()}
    if kind.startswith("Q"):
        base = as_gguf(tmp_path / "base.gguf", original, kind)
    elif kind == "fp8":
        base = save(
            "base",
            {
                key: value.to(torch.float8_e4m3fn) if value.ndim == 2 else value
                for key, value in original.items()
            },
        )
    else:
        base = save("base", scaled_fp8(original))
    wanted = in_original_form("z_image", after)
    lost = changed = 0.0
    with open_pair(base, pipeline(tmp_path / "tuned", "transformer", after)) as pair:
        findings = {
            finding.id: finding
            for finding in pair_findings(pair, {}, [])
            if finding.id == "lora.storage_noise"
        }
        for layer in pair.layers:
            change = pair.change(f"{layer}.weight", torch.device("cpu")).delta
            true = wanted[f"{layer}.weight"] - original[f"{layer}.weight"]
            stored = pair.base.tensor(f"{layer}.weight").float()
            assert torch.equal(change, wanted[f"{layer}.weight"] - stored)
            if is_coarse(pair.base, f"{layer}.weight"):
                lost += float((change - true).double().square().sum())
                changed += float(change.double().square().sum())
    finding = findings["lora.storage_noise"]
    assert finding.evidence["noise_of_change"] == pytest.approx(lost / changed, rel=0.2)
    assert finding.severity == ("warning" if lost / changed > 0.05 else "info")


def test_a_folder_is_a_base_for_a_quantised_single_file(z_image: tuple[State, State], tmp_path: Path) -> None:
    before, after = z_image
    tuned_file = as_gguf(tmp_path / "tuned.gguf", in_original_form("z_image", after), "Q8_0")
    base = pipeline(tmp_path / "base", "transformer", before)
    with open_pair(base, tuned_file) as pair:
        (finding,) = [one for one in pair_findings(pair, {}, []) if one.id == "lora.storage_noise"]
        assert finding.evidence["side"] == "tuned model"
        whole = pair.tuned.tensor("transformer.layers.0.attention.to_k.weight")
    assert torch.allclose(whole, after["layers.0.attention.to_k.weight"], atol=0.05)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_the_noise_of_types_that_cannot_be_written_follows_from_their_levels(
    kind: str, tmp_path: Path
) -> None:
    """All blocks of one scale 1 and minimum 0: the numbers are the codes, whose distance is 1 (times Q6_K's scale)."""
    type_ = gguf.GGMLQuantizationType[kind]
    _, size = gguf.GGML_QUANT_SIZES[type_]
    blocks = np.random.default_rng(0).integers(0, 256, (64, size), dtype=np.uint8)
    one = np.frombuffer(np.float16(1.0).tobytes(), dtype=np.uint8)
    if kind == "Q4_K":
        blocks[:, :2], blocks[:, 2:4], blocks[:, 4:16] = one, 0, 1
    else:
        blocks[:, -2:], blocks[:, -18:-2] = one, 1
    writer = gguf.GGUFWriter(tmp_path / "base.gguf", "flux")
    writer.add_tensor("a.weight", blocks, raw_dtype=type_)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    save_file({"a.weight": torch.randn(64, 256) * 100}, tmp_path / "tuned.safetensors")
    with open_pair(tmp_path / "base.gguf", tmp_path / "tuned.safetensors") as pair:
        weight = pair.base.tensor("a.weight")
        (finding,) = [one for one in pair_findings(pair, {}, []) if one.id == "lora.storage_noise"]
    expected = weight.numel() ** 0.5 / 12**0.5 / float(weight.norm())
    assert finding.evidence["noise_of_weight"] == pytest.approx(expected, rel=0.1)


def test_a_text_encoder_of_a_single_file_is_that_of_a_folder(tmp_path: Path, save: Save) -> None:
    """open_clip's fused matrix has no ending of a weight, and its bias is named likewise."""
    generator = torch.Generator().manual_seed(0)
    names = ("q_proj", "k_proj", "v_proj")
    start = "text_encoder_2.text_model.encoder.layers.0.self_attn."
    parts = {
        f"{start}{name}.{ending}": torch.randn(shape, generator=generator)
        for name in names
        for ending, shape in (("weight", (8, 8)), ("bias", (8,)))
    }
    base = state("sdxl", "unet.") | parts
    fused = {
        f"conditioner.embedders.1.model.transformer.resblocks.0.attn.in_proj_{ending}": torch.cat(
            [parts[f"{start}{name}.{ending}"] for name in names]
        )
        for ending in ("weight", "bias")
    }
    projection = torch.randn(6, 8, generator=generator)
    parts["text_encoder_2.text_projection.weight"] = projection
    base |= parts
    fused["conditioner.embedders.1.model.text_projection"] = projection.t().contiguous()
    options = PairOptions(parts=("denoiser", "text_encoder_2"))
    single = single_file("sdxl", state("sdxl")) | fused
    with open_pair(save("base", base), save("single", single), options) as pair:
        for key, value in parts.items():
            assert torch.equal(pair.tuned.tensor(key), value)
        assert pair.skipped == {}


VAE: State = {
    "encoder.conv_in.bias": torch.zeros(3),
    "encoder.mid_block.resnets.0.norm1.bias": torch.zeros(3),
}
VAE_OF_SINGLE_FILE: State = {
    "encoder.conv_in.bias": torch.zeros(3),
    "encoder.mid.block_1.norm1.bias": torch.ones(3),
}
BESIDE: dict[str, tuple[State, State, dict[str, object]]] = {
    "a VAE of other names in each": (
        VAE,
        {f"first_stage_model.{key}": value for key, value in VAE_OF_SINGLE_FILE.items()},
        {"part": "vae", "base_tensors": 1, "tuned_tensors": 1},
    ),
    "a VAE in the base alone": (
        VAE,
        {},
        {"side": "base", "parts": "vae", "tensors": 2, "key": "vae.encoder.conv_in.bias"},
    ),
    "a text encoder in the tuned model alone": (
        {},
        {"conditioner.embedders.0.transformer.text_model.final_layer_norm.bias": torch.zeros(3)},
        {
            "side": "tuned model",
            "parts": "text_encoder",
            "tensors": 1,
            "key": "conditioner.embedders.0.transformer.text_model.final_layer_norm.bias",
        },
    ),
    "averaged weights in the tuned model alone": (
        {},
        {"model_ema.decay": torch.zeros(())},
        {"side": "tuned model", "parts": "other", "tensors": 1, "key": "model_ema.decay"},
    ),
    "the same VAE in both": (
        {key: value for key, value in VAE.items() if "conv_in" in key},
        {"first_stage_model.encoder.conv_in.bias": torch.zeros(3)},
        {},
    ),
}


@pytest.mark.parametrize("case", BESIDE)
def test_what_an_extraction_leaves_out_beside_the_denoiser_is_named(
    case: str, tmp_path: Path, save: Save
) -> None:
    vae, beside, evidence = BESIDE[case]
    model = state("sdxl")
    single = {key: value for key, value in single_file("sdxl", model).items() if "model_ema" not in key}
    base = pipeline(tmp_path / "base", "unet", model)
    if vae:
        (base / "model_index.json").write_text(json.dumps({"unet": ["d", "M"], "vae": ["d", "A"]}))
        (base / "vae").mkdir()
        save_file(vae, base / "vae" / "diffusion_pytorch_model.safetensors")
    with open_pair(base, save("tuned", single | beside)) as pair:
        named = [one.evidence for one in pair.findings if one.id == "lora.other_parts_not_compared"]
    assert named == ([evidence] if evidence else [])


def test_a_snapshot_in_the_hubs_cache_is_paired_with_a_gguf_file(
    z_image: tuple[State, State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = z_image
    commit = "0" * 40
    model = tmp_path / "hub" / "models--org--z-image"
    pipeline(model / "snapshots" / commit, "transformer", before)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    tuned_file = as_gguf(tmp_path / "tuned.gguf", in_original_form("z_image", after), "F16")
    with open_pair("org/z-image", tuned_file) as pair:
        assert pair.skipped == {}
        weight = pair.tuned.tensor("transformer.layers.1.attention.to_v.weight")
    torch.testing.assert_close(weight.float(), after["layers.1.attention.to_v.weight"], rtol=1e-3, atol=1e-3)


def test_a_layer_that_the_single_file_lacks_is_refused_by_its_name(save: Save) -> None:
    base = state("flux")
    single = in_original_form("flux", base)
    del single["double_blocks.0.img_attn.qkv.weight"], single["double_blocks.0.img_mlp.2.weight"]
    base_file, other = (
        save("base", base),
        save("single", {key: value.contiguous() for key, value in single.items()}),
    )
    with pytest.raises(ModelMismatchError, match="flux"), open_pair(base_file, other):
        pass


def test_models_of_two_families_are_named_by_both(save: Save) -> None:
    with (
        pytest.raises(ModelMismatchError, match=r"flux in diffusers naming.*wan in original naming"),
        open_pair(save("a", state("flux")), save("b", single_file("wan", state("wan")))),
    ):
        pass


def test_a_norm_of_an_unknown_name_is_left_out_and_said(save: Save) -> None:
    single = single_file("flux", state("flux"))
    old = "model.diffusion_model.double_blocks.0.img_attn.norm.key_norm.scale"
    single["model.diffusion_model.double_blocks.0.img_attn.another_norm"] = single.pop(old)
    with open_pair(save("base", state("flux")), save("single", single)) as pair:
        assert (
            sorted(finding.id for finding in pair.findings if finding.id == "lora.missing_keys")
            == ["lora.missing_keys"] * 2
        )
        assert pair.skipped["transformer_blocks.0.attn.norm_k.weight"] == "the tuned model lacks it"
