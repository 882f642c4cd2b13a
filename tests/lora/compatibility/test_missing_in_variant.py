"""A LoRA of WAN 2.1's I2V model on WAN 2.2, which has no image attention: the rest applies, and the report says so."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.families import make_pipeline
from torch import nn

from sigmascope.errors import LoraFormatError, ModelMismatchError
from sigmascope.lora.apply import attach_lora
from sigmascope.lora.checkpoint_merge import merge_into_checkpoint
from sigmascope.lora.convert import convert_lora
from sigmascope.lora.live_merge import merge_into_model
from sigmascope.lora.reader import load_lora

Tensors = dict[str, torch.Tensor]
START = "diffusion_model.blocks.0."
IMAGE = (f"{START}cross_attn.k_img", f"{START}cross_attn.v_img")
# Each ‖up·down‖² is that of `change`: 4 for two that apply, and 1 for two that are left out.
APPLY = {f"{START}self_attn.q": "blocks.0.attn1.to_q", f"{START}cross_attn.o": "blocks.0.attn2.to_out.0"}


def change(out: int, inner: int, norm: float) -> Tensors:
    """Factors of one number: ΔW has it in its first row and column."""
    up, down = torch.zeros(out, 1), torch.zeros(1, inner)
    up[0], down[0, 0] = norm, 1.0
    return {"lora_B.weight": up, "lora_A.weight": down}


@pytest.fixture
def transformer() -> Any:
    return make_pipeline("wan").transformer


@pytest.fixture
def folder(transformer: Any, tmp_path: Path) -> Path:
    transformer.save_pretrained(tmp_path / "transformer")
    return tmp_path / "transformer"


@pytest.fixture
def width(transformer: Any) -> int:
    return int(transformer.get_submodule("blocks.0.attn1.to_q").weight.shape[0])


def written(path: Path, names: dict[str, float], width: int, **others: Tensors) -> Path:
    tensors = {
        f"{name}.{end}": t for name, norm in names.items() for end, t in change(width, width, norm).items()
    }
    save_file(tensors | {key: t for of in others.values() for key, t in of.items()}, path)
    return path


@pytest.fixture
def i2v(width: int, tmp_path: Path) -> Path:
    return written(tmp_path / "i2v.safetensors", dict.fromkeys(APPLY, 2.0) | dict.fromkeys(IMAGE, 1.0), width)


def test_a_merge_into_a_checkpoint_applies_the_rest(i2v: Path, folder: Path, tmp_path: Path) -> None:
    report = merge_into_checkpoint([i2v], folder, tmp_path / "m.safetensors")
    before = load_file(folder / "diffusion_pytorch_model.safetensors")
    after = load_file(tmp_path / "m.safetensors")
    assert {key for key in before if not torch.equal(before[key], after[key])} == {
        f"{layer}.weight" for layer in APPLY.values()
    }
    assert report.not_in_variant == {0: IMAGE}
    assert report.unmatched == {}
    assert report.kept_energy == pytest.approx(8 / 10)
    (finding,) = report.findings
    assert (finding.id, finding.severity) == ("lora_layer_missing", "warning")
    assert "2 of 4 modules" in finding.message
    assert IMAGE[0] in finding.message
    as_json = report.as_dict()
    assert as_json["not_in_variant"] == {"0": list(IMAGE)}
    assert as_json["kept_energy"] == pytest.approx(0.8)


def test_a_conversion_for_the_model_converts_the_rest(i2v: Path, folder: Path, tmp_path: Path) -> None:
    report = convert_lora(i2v, tmp_path / "out.safetensors", "peft", model=folder)
    stored = load_file(tmp_path / "out.safetensors")
    assert {key.removeprefix("transformer.").split(".lora_")[0] for key in stored} == set(APPLY.values())
    assert report.not_in_variant == IMAGE
    assert [module.name for module in report.left_out] == list(IMAGE)
    assert report.kept_energy == pytest.approx(0.8)
    assert [finding["id"] for finding in report.as_dict()["findings"]] == ["lora_layer_missing"]


@pytest.mark.parametrize("apply", [attach_lora, merge_into_model])
def test_a_live_model_gets_the_rest(
    apply: Callable[..., object], i2v: Path, transformer: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    applied = apply(transformer, load_lora(i2v))
    assert {*applied.applied} == {*APPLY.values()}  # type: ignore[attr-defined]
    assert applied.not_in_variant == IMAGE  # type: ignore[attr-defined]
    assert "2 of 4 modules are for layers that the model's family has" in caplog.text


def test_a_swap_says_what_the_new_file_leaves_out(i2v: Path, transformer: nn.Module, width: int) -> None:
    both = written(i2v.with_name("t2v.safetensors"), dict.fromkeys(APPLY, 1.0), width)
    with attach_lora(transformer, both) as attached:
        assert not attached.not_in_variant
        attached.swap(i2v)
        assert attached.not_in_variant == IMAGE


@pytest.mark.parametrize(
    "odd",
    [f"{START}cross_attn.k_picture", "diffusion_model.blocks.77.self_attn.q", "diffusion_model.elsewhere"],
    ids=["no name of the family", "no such block", "no name at all"],
)
def test_what_no_variant_has_stays_an_error(
    odd: str, folder: Path, transformer: nn.Module, width: int, tmp_path: Path
) -> None:
    names = dict.fromkeys((*APPLY, *IMAGE, odd), 1.0)
    path = written(tmp_path / "odd.safetensors", names, width)
    for apply in (attach_lora, merge_into_model):
        with pytest.raises(ModelMismatchError, match=odd.removeprefix("diffusion_model.")):
            apply(transformer, load_lora(path))
    with pytest.raises(ModelMismatchError, match=odd):
        merge_into_checkpoint([path], folder, tmp_path / "m.safetensors")
    with pytest.raises(LoraFormatError, match=odd):
        convert_lora(path, tmp_path / "out.safetensors", "peft", model=folder)
    allowed = merge_into_checkpoint([path], folder, tmp_path / "m.safetensors", allow_unmatched=True)
    assert (allowed.not_in_variant, allowed.unmatched) == ({0: IMAGE}, {0: (odd,)})
    assert allowed.kept_energy == pytest.approx(2 / 5)


def test_a_file_of_which_nothing_would_apply_stays_an_error(
    folder: Path, transformer: nn.Module, width: int, tmp_path: Path
) -> None:
    path = written(tmp_path / "images.safetensors", dict.fromkeys(IMAGE, 1.0), width)
    for apply in (attach_lora, merge_into_model):
        with pytest.raises(ModelMismatchError, match="k_img"):
            apply(transformer, load_lora(path))
    with pytest.raises(ModelMismatchError, match="k_img"):
        merge_into_checkpoint([path], folder, tmp_path / "m.safetensors")
    with pytest.raises(LoraFormatError, match="k_img"):
        convert_lora(path, tmp_path / "out.safetensors", "peft", model=folder)
    assert not (tmp_path / "m.safetensors").exists()


def test_the_energy_kept_is_unknown_where_a_change_depends_on_the_weights(
    folder: Path, width: int, tmp_path: Path
) -> None:
    dora = {f"{next(iter(APPLY))}.dora_scale": torch.ones(width, 1)}
    names = dict.fromkeys((*APPLY, *IMAGE), 1.0)
    path = written(tmp_path / "dora.safetensors", names, width, dora=dora)
    assert merge_into_checkpoint([path], folder, tmp_path / "m.safetensors").kept_energy is None


def test_each_lora_counts_at_its_weight(i2v: Path, folder: Path, width: int, tmp_path: Path) -> None:
    other = written(tmp_path / "t2v.safetensors", dict.fromkeys(APPLY, 1.0), width)
    report = merge_into_checkpoint([i2v, other], folder, tmp_path / "m.safetensors", weights=[0.5, 2.0])
    # At half strength 8/4 stay and 2/4 go; at double strength 2·4 stay.
    assert report.kept_energy == pytest.approx((2 + 8) / (2 + 8 + 0.5))
