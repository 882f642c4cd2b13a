"""Files that diffusers loaded, or not, into the tiny pipelines."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.families import FAMILIES, make_pipeline

from sigmascope.lora import applied_verdict
from sigmascope.lora.applied_verdict import judge_applied
from sigmascope.lora.compatibility import judge_lora
from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.peft import read_adapters

Save = Callable[..., Path]

pytest.importorskip("peft")


@pytest.fixture(scope="module")
def shared_sd15() -> Any:
    return make_pipeline("sd15")


@pytest.fixture
def sd15(shared_sd15: Any) -> Iterator[Any]:
    """A pipeline from which the test's adapters are taken off again."""
    yield shared_sd15
    shared_sd15.enable_lora()
    shared_sd15.unload_lora_weights()


def patches_of(model: Any) -> tuple[AppliedPatch, ...]:
    reading = read_adapters(model)
    assert reading.value is not None, reading.reason
    return reading.value


@pytest.mark.parametrize(
    ("family", "format"),
    [
        ("sd15", "peft"),
        ("sd15", "kohya"),
        ("wan", "peft"),
        ("wan", "kohya"),
        ("flux", "peft"),
        ("sd3", "peft"),
    ],
)
def test_what_diffusers_loaded_is_found(save: Save, family: str, format: str) -> None:
    pipeline = make_pipeline(family)
    path = save(pipeline, FAMILIES[family].denoiser, format=format, only="blocks.0")
    pipeline.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name="style")
    verdict = judge_applied(path, patches_of(pipeline), pipeline)
    assert verdict.complete, verdict.missing[:2]
    assert verdict.findings == ()
    assert verdict.strengths == {1.0: len(verdict.modules)}
    assert verdict.modules[0].sources == ("style",)
    placed = judge_lora(path, pipeline)
    assert judge_applied(path, patches_of(pipeline), pipeline, placed) == verdict


def test_a_file_that_was_placed_is_not_placed_once_more(
    sd15: Any, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(sd15, "unet", only="attn1")
    sd15.load_lora_weights(str(path.parent), weight_name=path.name)
    placed, patches = judge_lora(path, sd15), patches_of(sd15)
    expected = judge_applied(path, patches, sd15)
    monkeypatch.delattr(applied_verdict, "place")
    assert judge_applied(path, patches, sd15, placed) == expected
    without = replace(placed, modules=placed.modules[1:])  # of another file
    assert judge_applied(path, patches, sd15, without).error is not None


def test_no_tensor_of_a_lora_in_memory_is_written_out_as_text(
    sd15: Any, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes time, and on a device a wait for each."""
    state = load_file(save(sd15, "unet", only="attn1.to_q"))
    sd15.load_lora_weights(dict(state))
    patches = patches_of(sd15)
    monkeypatch.setattr(torch.Tensor, "__repr__", lambda _: pytest.fail("a tensor is written out"))
    verdict = judge_applied(state, patches, sd15)
    assert (verdict.complete, verdict.path) == (True, None)


def test_the_strength_is_the_adapters_weight(sd15: Any, save: Save) -> None:
    path = save(sd15, "unet", only="attn1.to_q")
    sd15.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name="style")
    sd15.set_adapters("style", 0.25)
    assert set(judge_applied(path, patches_of(sd15), sd15).strengths) == {0.25}


def test_a_file_that_loads_nothing_is_told(sd15: Any, save: Save) -> None:
    """With its default prefix, the adapter loader finds nothing in a U-Net's file, and reports no error."""
    path = save(sd15, "unet", only="attn1.to_q")
    sd15.unet.load_lora_adapter(load_file(path))
    verdict = judge_applied(path, patches_of(sd15), sd15)
    assert verdict.there == ()
    assert [finding.id for finding in verdict.findings] == ["lora_not_loaded"]
    assert verdict.findings[0].severity == "critical"


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
def test_peft_s_own_biases_are_found_on_layers_with_a_bias_and_without(sd15: Any, save: Save) -> None:
    path = save(sd15, "unet", only="attn1.to_")
    ups = {key: value for key, value in load_file(path).items() if key.endswith("lora_B.weight")}
    biases = {key.replace("weight", "bias"): torch.ones(len(up)) for key, up in ups.items()}
    save_file(load_file(path) | biases, path)
    sd15.load_lora_weights(str(path.parent), weight_name=path.name)
    layer = sd15.unet.mid_block.attentions[0].transformer_blocks[0].attn1.to_q
    assert layer.base_layer.bias is None
    assert layer.lora_B["default_0"].bias.detach().all()
    verdict = judge_applied(path, patches_of(sd15), sd15)
    assert (len(verdict.there), verdict.findings) == (2 * len(ups), ())


def test_half_a_file_is_told(sd15: Any, save: Save) -> None:
    path = save(sd15, "unet", only="to_q")
    half = {key: tensor for key, tensor in load_file(path).items() if "attn1" in key}
    sd15.load_lora_weights(half)
    verdict = judge_applied(path, patches_of(sd15), sd15)
    assert 0 < len(verdict.there) < len(verdict.modules)
    assert [finding.id for finding in verdict.findings] == ["lora_partly_loaded"]
    assert "not on the model (no LoRA is applied to its weights): " in verdict.findings[0].message


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_two_adapters_of_one_file_are_told(sd15: Any, save: Save) -> None:
    path = save(sd15, "unet", only="attn1.to_q")
    for name in ("a", "b"):
        sd15.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name=name)
    sd15.set_adapters(["a", "b"], [1.0, 0.5])
    verdict = judge_applied(path, patches_of(sd15), sd15)
    assert len(verdict.twice) == len(verdict.modules)
    assert set(verdict.strengths) == {1.5}
    assert [finding.id for finding in verdict.findings] == ["lora_applied_twice"]
    sd15.set_adapters(["a", "b"], [1.0, -0.5])
    opposed = judge_applied(path, patches_of(sd15), sd15)
    assert set(opposed.strengths) == {0.5}
    assert [(finding.id, finding.evidence["left"]) for finding in opposed.findings] == [("lora_opposed", 0.5)]


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_two_adapters_of_one_file_cancel_each_other(sd15: Any, save: Save) -> None:
    path = save(sd15, "unet", only="attn1.to_q")
    for name in ("a", "b"):
        sd15.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name=name)
    sd15.set_adapters(["a", "b"], [0.8, -0.8])
    verdict = judge_applied(path, patches_of(sd15), sd15)
    assert [finding.id for finding in verdict.findings] == ["lora_cancelled"]


def test_switched_off_adapters_are_there_and_do_not_act(sd15: Any, save: Save) -> None:
    path = save(sd15, "unet", only="attn1.to_q")
    sd15.load_lora_weights(str(path.parent), weight_name=path.name)
    sd15.disable_lora()
    verdict = judge_applied(path, patches_of(sd15), sd15)
    assert len(verdict.there) == len(verdict.modules)
    assert not verdict.complete
    assert [finding.id for finding in verdict.findings] == ["lora_not_acting"]


def test_another_lora_is_not_taken_for_it(sd15: Any, save: Save) -> None:
    path = save(sd15, "unet", only="attn1.to_q")
    other = {key: torch.randn_like(tensor) for key, tensor in load_file(path).items()}
    sd15.load_lora_weights(other, adapter_name="other")
    verdict = judge_applied(path, patches_of(sd15), sd15)
    assert verdict.there == ()
    assert " has only other changes of other" in (verdict.modules[0].detail or "")


def test_parts_of_a_fused_weight_are_found_by_their_factors(tmp_path: Path) -> None:
    """As ComfyUI holds a LoRA of query, key and value: three changes of parts of one weight."""
    shapes = {
        "double_blocks.0.img_attn.qkv.weight": (12, 4),
        "img_in.weight": (4, 4),
        "vector_in.in_layer.weight": (4, 4),
        "single_blocks.0.linear1.weight": (28, 4),
    }
    parts = {part: (torch.randn(4, 2), torch.randn(2, 4)) for part in "qkv"}
    state = {
        f"transformer.transformer_blocks.0.attn.to_{part}.lora_{end}.weight": tensor
        for part, pair in parts.items()
        for end, tensor in zip("BA", pair, strict=True)
    }
    save_file(state, tmp_path / "lora.safetensors")
    patches = [
        AppliedPatch(
            "double_blocks.0.img_attn.qkv.weight",
            "lora",
            "unknown",
            "",
            "registered",
            tensors={"up": up.bfloat16(), "down": down.bfloat16()},
            strength=0.5,
            weight_shape=(12, 4),
            offset=(0, 4 * index, 4),
        )
        for index, (up, down) in enumerate(parts.values())
    ]
    verdict = judge_applied(tmp_path / "lora.safetensors", patches, shapes)
    assert verdict.complete
    assert [module.times for module in verdict.modules] == [1, 1, 1]
    assert verdict.strengths == {0.5: 3}


def test_an_unreadable_file_is_a_verdict(tmp_path: Path) -> None:
    verdict = judge_applied(tmp_path / "none.safetensors", ())
    assert verdict.error is not None
    assert verdict.findings[0].id == "lora_unreadable"
