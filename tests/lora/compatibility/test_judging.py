"""Files of every format against the tiny pipelines of every family."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.families import FAMILIES

from sigmascope.checkpoints import open_checkpoint
from sigmascope.lora.compatibility import judge_lora
from sigmascope.lora.file_verdict import LoraVerdict, match_sentence

Pipelines = Callable[[str], Any]
Save = Callable[..., Path]
FORMATS = ("native", "kohya", "peft", "comfyui")


def edited(path: Path, edit: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]]) -> Path:
    state = dict(edit(key, tensor) for key, tensor in load_file(path).items())
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, path)
    return path


def only_reason(verdict: LoraVerdict) -> str:
    assert verdict.matched == ()
    (reason,) = verdict.reasons
    return reason


@pytest.mark.parametrize(
    ("family", "format"),
    [
        ("sd15", "native"),
        *((family, format) for family in FAMILIES for format in ("kohya", "peft", "comfyui")),
    ],
)
def test_all_modules_of_a_right_lora_match(
    pipelines: Pipelines, save: Save, family: str, format: str
) -> None:
    pipeline = pipelines(family)
    verdict = judge_lora(save(pipeline, FAMILIES[family].denoiser, format=format), pipeline)
    assert verdict.unmatched == ()
    assert verdict.fits
    assert verdict.model_family == family.removesuffix("_vace")
    assert (verdict.format, sum(verdict.ranks.values())) == (format, len(verdict.modules))


@pytest.mark.parametrize("family", ["sd15", "sdxl", "sd3", "flux"])
@pytest.mark.slow
def test_text_encoders_match_too(pipelines: Pipelines, save: Save, family: str) -> None:
    pipeline = pipelines(family)
    parts = (FAMILIES[family].denoiser, *FAMILIES[family].lora_encoders)
    for format in FORMATS:
        verdict = judge_lora(save(pipeline, *parts, format=format), pipeline)
        assert verdict.unmatched == (), format
        assert set(verdict.parts) == {"denoiser", *FAMILIES[family].lora_encoders}


def test_a_bare_denoiser_is_a_model_too(pipelines: Pipelines, save: Save) -> None:
    path = save(pipelines("flux"), "transformer", format="kohya")
    assert judge_lora(path, pipelines("flux").transformer).fits


def test_shapes_by_name_are_a_model_too(pipelines: Pipelines, save: Save) -> None:
    unet = pipelines("sd15").unet
    shapes = {key: tuple(tensor.shape) for key, tensor in unet.state_dict().items()}
    assert judge_lora(save(pipelines("sd15"), "unet"), shapes).fits


@pytest.mark.parametrize(
    ("family", "other", "titles"),
    [
        ("sdxl", "flux", ("SDXL", "FLUX")),
        ("flux", "wan", ("FLUX", "WAN")),
        ("sd15", "sd3", ("Stable Diffusion 1.5", "Stable Diffusion 3")),
        ("wan_vace", "qwen_image", ("WAN", "Qwen-Image")),
    ],
)
@pytest.mark.parametrize("format", ["kohya", "peft"])
def test_another_architecture_is_named(
    pipelines: Pipelines, save: Save, family: str, other: str, titles: tuple[str, str], format: str
) -> None:
    path = save(pipelines(family), FAMILIES[family].denoiser, format=format)
    verdict = judge_lora(path, pipelines(other))
    assert only_reason(verdict) == "other_architecture"
    told = re.fullmatch(
        r"the file is for (.+) \(by (.+)\), the model is (.+)", verdict.modules[0].detail or ""
    )
    assert told is not None
    assert (told[1], told[3]) == titles
    assert verdict.findings[0].id == "lora_matches_nothing"
    assert verdict.findings[0].severity == "critical"


def test_a_missing_text_encoder_is_named(pipelines: Pipelines, save: Save) -> None:
    verdict = judge_lora(save(pipelines("sd15"), "unet", "text_encoder"), pipelines("sd15").unet)
    assert verdict.reasons == {"text_encoder_missing": verdict.parts["text_encoder"]["modules"]}
    assert verdict.parts["denoiser"]["matched"] == verdict.parts["denoiser"]["modules"]


def test_a_lora_of_text_encoders_alone_matches_no_denoiser(pipelines: Pipelines, save: Save) -> None:
    path = save(pipelines("sdxl"), "text_encoder", "text_encoder_2", format="kohya")
    assert only_reason(judge_lora(path, pipelines("sdxl").unet)) == "text_encoder_missing"
    assert judge_lora(path, pipelines("sdxl")).fits


def test_an_encoder_that_the_family_does_not_have_is_another_architecture_s(
    pipelines: Pipelines, save: Save
) -> None:
    verdict = judge_lora(save(pipelines("sdxl"), "text_encoder_2"), pipelines("sd15"))
    assert only_reason(verdict) == "other_architecture"
    assert (
        verdict.modules[0].detail
        == "it is for the second text encoder, which Stable Diffusion 1.5 does not have"
    )
    assert "the file is for" not in verdict.findings[0].message


NORM_OF_FLUX = "transformer.transformer_blocks.0.attn.norm_q"
T5 = "lora_te3_encoder_block_0_layer_0_SelfAttention_q"
CLIP_G = "lora_te2_text_model_encoder_layers_20_self_attn_q_proj"


@pytest.mark.parametrize(
    ("family", "name", "why"),
    [
        ("sdxl", T5, "T5, which SDXL does not have"),
        ("sd15", T5, "T5, which Stable Diffusion 1.5 does not have"),
        ("sd15", CLIP_G, "the second text encoder, which Stable Diffusion 1.5 does not have"),
        ("flux", CLIP_G, "a second CLIP, which FLUX does not have"),
        ("flux", T5, None),
        ("sd3", T5, None),
        ("sd3", CLIP_G, None),
    ],
)
def test_kohya_s_names_of_an_encoder_that_the_family_does_not_have(
    pipelines: Pipelines, tmp_path: Path, family: str, name: str, why: str | None
) -> None:
    """The numbers of its starts mean other encoders in other families, and its layers tell which."""
    factors = {f"{name}.lora_down.weight": torch.ones(4, 1280), f"{name}.lora_up.weight": torch.ones(1280, 4)}
    save_file(factors, tmp_path / "lora.safetensors")
    (module,) = judge_lora(tmp_path / "lora.safetensors", pipelines(family)).modules
    assert (module.reason == "other_architecture") is (why is not None)
    assert why is None or module.detail == f"it is for {why}"


def test_a_bias_for_a_layer_without_one_is_not_called_another_block_s(
    pipelines: Pipelines, save: Save
) -> None:
    """A U-Net's `to_q` has no bias, and its `to_out.0` has; PEFT's `lora_bias` gives both one."""
    path = save(pipelines("sd15"), "unet", only="attn1.to_")
    ups = {key: value for key, value in load_file(path).items() if key.endswith("lora_B.weight")}
    biases = {key.replace("weight", "bias"): torch.ones(len(up)) for key, up in ups.items()}
    save_file(load_file(path) | biases, path)
    verdict = judge_lora(path, pipelines("sd15"))
    unmatched = {module.name: module.detail for module in verdict.unmatched}
    assert verdict.reasons == {"bias_missing": len(unmatched)}
    assert all(re.search(r"to_[qkv]\.bias$", name) for name in unmatched)
    assert all(detail == f"{name.removesuffix('.bias')} has no bias" for name, detail in unmatched.items())
    assert len(unmatched) == 3 * sum("to_out" in name for name in ups)
    told = {finding.id: finding.severity for finding in verdict.findings}
    assert told["lora_bias_missing"] == "warning"


@pytest.mark.parametrize(
    ("parts", "ending"),
    [
        (("unet",), "All 181 modules of the LoRA match it."),
        (
            ("unet", "text_encoder"),
            "181 of 193 modules of the LoRA match it: 12 are for a text encoder that was not given.",
        ),
    ],
    ids=["all", "some"],
)
def test_a_sentence_says_what_matches_and_why_the_rest_does_not(
    pipelines: Pipelines, save: Save, parts: tuple[str, ...], ending: str
) -> None:
    verdict = judge_lora(save(pipelines("sd15"), *parts), pipelines("sd15").unet)
    assert match_sentence(verdict, "it") == ending


def test_a_file_for_another_family_is_said_so_beside_what_matches(pipelines: Pipelines, save: Save) -> None:
    verdict = judge_lora(save(pipelines("flux"), "transformer", "text_encoder"), pipelines("sd15"))
    words = "50 are for another architecture (the file is for FLUX by its names, the model is Stable Diffusion 1.5)."
    assert match_sentence(verdict, "it") == f"12 of 62 modules of the LoRA match it: {words}"


def test_an_unknown_prefix_is_named(pipelines: Pipelines, save: Save) -> None:
    path = edited(
        save(pipelines("flux"), "transformer", only="x_embedder"),
        lambda key, tensor: (f"my_model.{key}", tensor),
    )
    verdict = judge_lora(path, pipelines("flux"))
    assert only_reason(verdict) == "prefix"
    assert (verdict.modules[0].detail or "").startswith("without the prefix my_model. its name matches ")


def test_encoders_of_another_family_s_lora_are_not_the_first_one_with_a_prefix(
    pipelines: Pipelines, save: Save
) -> None:
    path = save(pipelines("sd3"), "transformer", "text_encoder_2")
    verdict = judge_lora(path, pipelines("flux"))
    reasons = {one.reason for one in verdict.unmatched if one.part == "text_encoder_2"}
    assert reasons == {"other_architecture"}


def test_a_prefix_before_a_known_block_is_no_obstacle(pipelines: Pipelines, save: Save) -> None:
    path = edited(
        save(pipelines("flux"), "transformer", only="transformer_blocks"),
        lambda key, tensor: (f"my_model.{key}", tensor),
    )
    assert judge_lora(path, pipelines("flux")).fits


def test_renamed_blocks_are_unknown_and_have_their_nearest_names(pipelines: Pipelines, save: Save) -> None:
    path = edited(
        save(pipelines("flux"), "transformer", only="single_transformer_blocks.0.attn"),
        lambda key, tensor: (key.replace("single_transformer_blocks", "solo_blocks"), tensor),
    )
    verdict = judge_lora(path, pipelines("flux"))
    module = next(module for module in verdict.modules if module.name.endswith("attn.to_q"))
    assert module.reason == "unknown"
    assert all(name.endswith("attn.to_q") for name in module.nearest)


def test_a_block_that_the_model_has_not_is_named(pipelines: Pipelines, save: Save) -> None:
    path = edited(
        save(pipelines("wan"), "transformer", only="blocks.0.attn1"),
        lambda key, tensor: (key.replace("blocks.0", "blocks.31"), tensor),
    )
    verdict = judge_lora(path, pipelines("wan"))
    assert only_reason(verdict) == "block_missing"
    assert "not in blocks.31" in (verdict.modules[0].detail or "")


def test_a_shape_of_codes_is_not_told_as_that_of_the_weight(tmp_path: Path) -> None:
    """Nothing says that two numbers are in each code."""
    state = {
        "a.weight": torch.zeros(2048, 1, dtype=torch.uint8),
        "a.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(b"{"), dtype=torch.uint8),
    }
    save_file(state, tmp_path / "base.safetensors")
    factors = {"a.lora_A.weight": torch.ones(2, 64), "a.lora_B.weight": torch.ones(64, 2)}
    with open_checkpoint(tmp_path / "base.safetensors", keep_unread=True) as base:
        (module,) = judge_lora(factors, base).modules
    assert module.reason == "other_shape"
    assert (module.detail or "").endswith(
        "as it is stored, and how is not known: "
        "'a.weight.quant_state.bitsandbytes__nf4' is no JSON text that describes a quantisation"
    )


def test_another_shape_is_told_with_both(pipelines: Pipelines, save: Save) -> None:
    def wider(key: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        return key, torch.cat([tensor, tensor], dim=1) if "lora_A" in key else tensor

    path = edited(save(pipelines("flux"), "transformer", only="transformer_blocks.0.ff.net.2"), wider)
    (module,) = judge_lora(path, pipelines("flux")).modules
    assert module.reason == "other_shape"
    assert module.model_shape is not None
    assert f"{module.shape}, but " in (module.detail or "")
    assert str(module.model_shape) in (module.detail or "")


def test_factors_the_wrong_way_round_are_named(pipelines: Pipelines, save: Save) -> None:
    path = save(pipelines("flux"), "transformer", only="transformer_blocks.0.ff.net.2")
    state = load_file(path)
    (up,), (down,) = ([key for key in state if end in key] for end in ("lora_B", "lora_A"))
    save_file({up: state[down].T.contiguous(), down: state[up].T.contiguous()}, path)
    assert only_reason(judge_lora(path, pipelines("flux"))) == "transposed"


def test_nan_is_found_in_its_module(pipelines: Pipelines, save: Save) -> None:
    def poisoned(key: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        return key, tensor * torch.nan if "conv_in" in key and "lora_A" in key else tensor

    verdict = judge_lora(edited(save(pipelines("sd15"), "unet"), poisoned), pipelines("sd15"))
    assert verdict.not_finite == ("unet.conv_in",)
    assert not verdict.fits
    assert "lora_not_finite" in {finding.id for finding in verdict.findings}


def test_one_layer_under_two_names_is_told(pipelines: Pipelines, save: Save) -> None:
    path = save(pipelines("sd15"), "unet", only="conv_in")
    state = load_file(path)
    save_file(state | {key.removeprefix("unet."): tensor.clone() for key, tensor in state.items()}, path)
    verdict = judge_lora(path, pipelines("sd15"))
    assert (len(verdict.matched), verdict.reasons) == (1, {"twice": 1})


def test_alphas_that_diffusers_refuses_are_told(pipelines: Pipelines, save: Save) -> None:
    path = save(pipelines("sd15"), "unet", only="conv_in")
    save_file(load_file(path) | {"unet.conv_in.alpha": torch.tensor(1.0)}, path)
    verdict = judge_lora(path, pipelines("sd15"))
    (finding,) = (one for one in verdict.findings if one.id == "lora_alpha_refused")
    assert finding.severity == "warning"
    assert finding.evidence["first_scale"] == 0.5
    assert (verdict.modules[0].alpha, verdict.modules[0].scale) == (1.0, 0.5)


@pytest.mark.parametrize(
    ("family", "key", "only"),
    [("sd15", "unet.conv_norm_out", "conv_in"), ("flux", NORM_OF_FLUX, "attn.to_q")],
)
def test_whole_differences_are_told_as_diffusers_takes_them(
    pipelines: Pipelines, save: Save, family: str, key: str, only: str
) -> None:
    pipeline, (part, _, layer) = pipelines(family), key.partition(".")
    path = save(pipeline, part, only=only)
    weight = getattr(pipeline, part).get_submodule(layer).weight
    save_file(load_file(path) | {f"{key}.diff": torch.zeros(weight.shape)}, path)
    verdict = judge_lora(path, pipeline)
    assert verdict.fits
    said = next(one.message for one in verdict.findings if one.id == "lora_whole_differences")
    own = copy.copy(pipeline)
    setattr(own, part, copy.deepcopy(getattr(pipeline, part)))
    if "drops it silently" in said:
        own.load_lora_weights(load_file(path))
        return
    assert said.endswith("refuses the file because of it.")
    with pytest.raises(ValueError, match="Make sure all LoRA param names contain"):
        own.load_lora_weights(load_file(path))


def test_attention_that_comfyui_loses_is_counted(pipelines: Pipelines, save: Save) -> None:
    verdict = judge_lora(save(pipelines("sdxl"), "unet"), pipelines("sdxl"))
    (finding,) = (one for one in verdict.findings if one.id == "lora_comfyui_loses_attention")
    attention = [module for module in verdict.modules if ".attn" in module.name]
    assert finding.evidence["modules"] == len(attention)


def test_magnitudes_that_a_host_does_not_read_are_told(tmp_path: Path) -> None:
    """Comfy-Org/ComfyUI issues 3494 and 4259: "lora key not loaded: ….lora_magnitude_vector".

    huggingface/diffusers pull request 7371: "we are going to filter out the keys associated to 'dora_scale'".
    """
    factors = {"to_q.lora_A.weight": torch.ones(2, 4), "to_q.lora_B.weight": torch.ones(4, 2)}
    told = []
    for name in ("lora_magnitude_vector", "dora_scale"):
        path = tmp_path / f"{name}.safetensors"
        save_file({**factors, f"to_q.{name}": torch.ones(4, 1)}, path)
        findings = judge_lora(path, {"to_q.weight": (4, 4)}).findings
        told.append({one.id: one.evidence for one in findings if one.id.endswith("_loses_magnitudes")})
    assert told == [
        {"lora_comfyui_loses_magnitudes": {"modules": 1, "first": "to_q.lora_magnitude_vector"}},
        {"lora_diffusers_loses_magnitudes": {"modules": 1, "first": "to_q.dora_scale"}},
    ]


@pytest.mark.parametrize(
    ("content", "said"), [(b"", "lora.safetensors"), (b"\x08\0\0\0\0\0\0\0{}", "lora.safetensors")]
)
def test_a_file_that_cannot_be_read_is_a_verdict(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "lora.safetensors"
    path.write_bytes(content)
    verdict = judge_lora(path, {"a.weight": (2, 2)})
    assert not verdict.fits
    assert said in (verdict.error or "")
    assert [finding.id for finding in verdict.findings] == ["lora_unreadable"]


def test_an_empty_file_is_a_verdict(tmp_path: Path) -> None:
    path = tmp_path / "lora.safetensors"
    save_file({}, path)
    assert "holds no tensors" in (judge_lora(path, {"a.weight": (2, 2)}).error or "")


def test_a_missing_file_is_a_verdict(tmp_path: Path) -> None:
    assert judge_lora(tmp_path / "none.safetensors", {"a.weight": (2, 2)}).error is not None


def test_no_model_is_a_verdict(pipelines: Pipelines, save: Save) -> None:
    verdict = judge_lora(save(pipelines("sd15"), "unet", only="conv_in"), object())
    assert "no weights were found in the" in (verdict.error or "")


def test_without_values_nothing_is_read(pipelines: Pipelines, save: Save) -> None:
    verdict = judge_lora(save(pipelines("sd15"), "unet"), pipelines("sd15"), values=False)
    assert verdict.fits
    assert {module.finite for module in verdict.modules} == {None}
    assert "values" in verdict.unavailable


def test_strength_by_block_is_that_of_the_modules(pipelines: Pipelines, save: Save) -> None:
    verdict = judge_lora(save(pipelines("sd15"), "unet"), pipelines("sd15"))
    total = sum((module.norm or 0.0) ** 2 for module in verdict.modules)
    assert sum((block.delta_norm or 0.0) ** 2 for block in verdict.blocks) == pytest.approx(total)
    assert sum(block.share for block in verdict.blocks) == pytest.approx(1.0)


def test_the_verdict_is_json(pipelines: Pipelines, save: Save) -> None:
    import json

    verdict = judge_lora(save(pipelines("sd15"), "unet", "text_encoder"), pipelines("sd15").unet)
    kept = json.loads(json.dumps(verdict.as_dict()))
    assert kept["matched_modules"] + kept["unmatched_modules"] == kept["total_modules"]
    assert kept["modules"][0]["matched"] is True


class Hostile(torch.nn.Module):
    @property
    def _parameters(self) -> Any:
        raise Strange

    @_parameters.setter
    def _parameters(self, value: Any) -> None:
        pass


class Strange(Exception):
    """Of no kind that a probe knows."""


def test_a_model_that_raises_is_a_verdict(pipelines: Pipelines, save: Save) -> None:
    path = save(pipelines("sd15"), "unet", only="conv_in")
    assert judge_lora(path, Hostile()).error is not None
