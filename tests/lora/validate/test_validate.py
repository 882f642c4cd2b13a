import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sigmascope.errors import LoraFormatError, ModelMismatchError, NonFiniteError
from sigmascope.lora.alignment import ChangedKeys
from sigmascope.lora.extract import ExtractOptions, extract_lora
from sigmascope.lora.validate import (
    ModuleError,
    Residual,
    ResidualMeter,
    ValidationReport,
    band_of,
    validate_lora,
)

if TYPE_CHECKING:
    from tests.conftest import MakePair, ModelPair, State

SHORTCUT = "denoiser.mid_block.resnets.0.conv_shortcut"
LINEAR = "denoiser.time_embedding.linear_1"


def lora_path(files: "ModelPair") -> Path:
    return files.base.with_name("lora.safetensors")


def validate(files: "ModelPair") -> ValidationReport:
    return validate_lora(files.base, files.tuned, lora_path(files))


def extract_and_validate(
    files: "ModelPair",
    options: ExtractOptions | None = None,
    edit: Callable[[dict[str, Tensor]], object] | None = None,
) -> ValidationReport:
    """Extract, let `edit` change the tensors of the LoRA file, and validate."""
    extract_lora(files.base, files.tuned, lora_path(files), options)
    if edit is not None:
        tensors = load_file(lora_path(files))
        edit(tensors)
        save_file(tensors, lora_path(files))
    return validate(files)


def module_named(report: ValidationReport, name: str) -> ModuleError:
    return next(module for module in report.modules if module.name == name)


def test_the_error_of_a_rank_is_what_its_svd_discards(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    report = extract_and_validate(files, ExtractOptions(rank=4, conv_rank=2, save_precision="float"))
    assert [module.status for module in report.modules] == ["applied"] * 10
    for module in report.modules:
        sigma = torch.linalg.svdvals(files.delta(module.name))
        assert module.rank is not None
        expected = (sigma[module.rank :].square().sum() / sigma.square().sum()).sqrt().item()
        assert module.relative_error == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_overall_error_and_average_differ_as_defined(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    report = extract_and_validate(files, ExtractOptions(rank=4, conv_rank=2))
    errors = torch.tensor([module.error_norm for module in report.modules], dtype=torch.float64)
    norms = torch.tensor([files.delta(module.name).norm() for module in report.modules], dtype=torch.float64)
    assert report.relative_error == pytest.approx((errors.norm() / norms.norm()).item(), rel=1e-6)
    assert report.average_error == pytest.approx((errors / norms).mean().item(), rel=1e-6)


def test_full_rank_in_float_is_exact(make_model_pair: "MakePair") -> None:
    report = extract_and_validate(make_model_pair(), ExtractOptions(9999, 9999, save_precision="float"))
    assert report.worst[0].relative_error is not None
    assert report.worst[0].relative_error <= 1e-6
    assert (report.success_rate, report.band) == (100.0, "excellent")


def test_full_rank_in_bf16_is_within_half_a_per_cent(make_model_pair: "MakePair") -> None:
    files = make_model_pair(dtype=torch.bfloat16)
    report = extract_and_validate(files, ExtractOptions(9999, 9999, save_precision="bf16"))
    assert report.worst[0].relative_error is not None
    assert report.worst[0].relative_error <= 0.005


def test_alpha_scales_the_product(make_model_pair: "MakePair") -> None:
    def halve(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LINEAR}.alpha"] /= 2

    options = ExtractOptions(9999, 9999, save_precision="float")
    report = extract_and_validate(make_model_pair(), options, halve)
    assert module_named(report, LINEAR).relative_error == pytest.approx(0.5, rel=1e-6)


def test_alpha_9999_beside_whole_factors_means_scale_one(make_model_pair: "MakePair") -> None:
    def write_9999(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if name.endswith(".alpha"):
                tensors[name] = torch.tensor(9999.0)

    options = ExtractOptions(9999, 9999, save_precision="float")
    report = extract_and_validate(make_model_pair(), options, write_9999)
    assert report.relative_error is not None
    assert report.relative_error <= 1e-6


@pytest.mark.parametrize(
    ("error", "band"),
    [
        (0.0499, "excellent"),
        (0.05, "good"),
        (0.4999, "good"),
        (0.5, "poor"),
        (1.0, "poor"),
        (1.001, "noise"),
    ],
)
def test_bands_begin_and_end_where_users_were_told(error: float, band: str) -> None:
    assert band_of(error) == band


def test_a_changed_layer_without_a_module_is_a_failure(make_model_pair: "MakePair") -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(SHORTCUT)]:
            del tensors[name]

    report = extract_and_validate(make_model_pair(), edit=drop)
    assert [(failure.name, failure.status) for failure in report.failures] == [(SHORTCUT, "missing")]
    assert report.failures[0].relative_error == 1.0
    assert report.success_rate == 90.0


def test_a_module_that_the_model_lacks_is_a_failure(make_model_pair: "MakePair") -> None:
    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(SHORTCUT)]:
            tensors[name.replace("mid_block", "middle")] = tensors.pop(name)

    report = extract_and_validate(make_model_pair(), edit=rename)
    assert {(failure.name, failure.status) for failure in report.failures} == {
        (SHORTCUT, "missing"),
        (SHORTCUT.replace("mid_block", "middle"), "unmatched"),
    }
    assert report.success_rate == pytest.approx(100 * 9 / 11)


def test_a_module_of_other_sizes_is_a_failure_that_names_both(make_model_pair: "MakePair") -> None:
    def widen(tensors: dict[str, Tensor]) -> None:
        down = tensors[f"{LINEAR}.lora_down.weight"]
        tensors[f"{LINEAR}.lora_down.weight"] = torch.cat([down, down], dim=1)

    report = extract_and_validate(make_model_pair(), edit=widen)
    (failure,) = report.failures
    assert (failure.name, failure.status) == (LINEAR, "wrong_shape")
    assert failure.detail is not None
    assert "(16, 8)" in failure.detail
    assert "(16, 16)" in failure.detail


def unchanged_shortcut(base: "State", tuned: "State") -> None:
    tuned[f"{SHORTCUT}.weight"] = base[f"{SHORTCUT}.weight"].clone()


def test_an_unchanged_layer_needs_no_module(make_model_pair: "MakePair") -> None:
    report = extract_and_validate(make_model_pair(edit=unchanged_shortcut))
    assert report.success_rate == 100.0
    assert (len(report.modules), report.unchanged_layers) == (9, 1)


def test_what_a_lora_adds_to_an_unchanged_layer_is_an_absolute_error(make_model_pair: "MakePair") -> None:
    files = make_model_pair(edit=unchanged_shortcut)
    up, down = torch.ones(16, 1, 1, 1), torch.full((1, 8, 1, 1), 0.25)

    def add(tensors: dict[str, Tensor]) -> None:
        tensors[f"{SHORTCUT}.lora_up.weight"], tensors[f"{SHORTCUT}.lora_down.weight"] = up, down

    module = module_named(extract_and_validate(files, edit=add), SHORTCUT)
    assert (module.status, module.relative_error, module.band) == ("applied", None, None)
    assert module.error_norm == pytest.approx(0.25 * (16 * 8) ** 0.5)


def test_blocks_come_in_the_order_of_the_latent(make_model_pair: "MakePair") -> None:
    report = extract_and_validate(make_model_pair())
    assert [block.name for block in report.blocks] == [
        "conv_in",
        "time_embedding",
        "down_blocks.0",
        "down_blocks.1",
        "mid_block",
        "up_blocks.0",
        "conv_out",
    ]
    assert [block.modules for block in report.blocks] == [1, 1, 1, 4, 1, 1, 1]


def test_a_block_s_error_is_that_of_its_layers_together(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    report = extract_and_validate(files, ExtractOptions(rank=4, conv_rank=4))
    inside = [module for module in report.modules if ".down_blocks.1." in module.name]
    errors = torch.tensor([module.error_norm for module in inside], dtype=torch.float64)
    norms = torch.tensor([module.delta_norm for module in inside], dtype=torch.float64)
    block = report.blocks[3]
    assert block.relative_error == pytest.approx((errors.norm() / norms.norm()).item())
    assert block.largest_error == pytest.approx((errors / norms).max().item())
    assert block.average_error == pytest.approx((errors / norms).mean().item())
    assert block.ranks == (4, 4)


def test_the_worst_layers_come_first(make_model_pair: "MakePair") -> None:
    report = extract_and_validate(make_model_pair(), ExtractOptions(rank=4, conv_rank=4))
    errors = [module.relative_error or 0.0 for module in report.worst]
    assert errors == sorted((module.relative_error or 0.0 for module in report.modules), reverse=True)


def test_a_lora_for_another_base_is_told(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    extract_lora(files.base, files.tuned, lora_path(files))

    def shift(base: "State", tuned: "State") -> None:
        base["denoiser.conv_in.weight"] = base["denoiser.conv_in.weight"] + 0.01

    report = validate(make_model_pair(edit=shift))
    assert [finding.id for finding in report.findings] == ["lora.other_base"]


def test_keys_of_no_module_are_told(make_model_pair: "MakePair") -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["denoiser.conv_in.note"] = torch.zeros(8)

    (finding,) = extract_and_validate(make_model_pair(), edit=add).findings
    assert (finding.id, finding.evidence["key"]) == ("lora.unused_keys", "denoiser.conv_in.note")


def changed_bias(base: "State", tuned: "State") -> None:
    tuned["denoiser.conv_in.bias"] = base["denoiser.conv_in.bias"] + 0.5


def test_a_bias_in_the_lora_counts_as_a_module(make_model_pair: "MakePair") -> None:
    files = make_model_pair(edit=changed_bias)

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["denoiser.conv_in.diff_b"] = torch.full((8,), 0.4)

    report = extract_and_validate(files, edit=add)
    module = module_named(report, "denoiser.conv_in.bias")
    assert (module.status, module.kind, module.shape) == ("applied", "diff", (8,))
    assert module.relative_error == pytest.approx(0.2, rel=1e-5)
    assert report.success_rate == 100.0
    assert report.findings == ()
    assert "denoiser.conv_in.bias" not in report.layer_names


def test_a_changed_bias_that_the_lora_lacks_is_told_and_is_no_failure(make_model_pair: "MakePair") -> None:
    report = extract_and_validate(make_model_pair(edit=changed_bias))
    assert [finding.id for finding in report.findings] == ["lora.biases_and_norms_changed"]
    assert report.findings[0].evidence["delta_norm"] == pytest.approx(0.5 * 8**0.5, rel=1e-5)
    assert report.success_rate == 100.0


def test_modules_are_found_under_kohya_s_names(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    native = extract_and_validate(files, ExtractOptions(rank=4, conv_rank=4))

    def flatten(tensors: dict[str, Tensor]) -> None:
        for key in list(tensors):
            module, end = key.removeprefix("denoiser.").split(".lora_" if ".lora_" in key else ".alpha")
            end = f"lora_{end}" if end else "alpha"
            tensors[f"lora_unet_{module.replace('.', '_')}.{end}"] = tensors.pop(key)

    flat = extract_and_validate(files, ExtractOptions(rank=4, conv_rank=4), flatten)
    assert [module.as_dict() for module in flat.modules] == [module.as_dict() for module in native.modules]


def test_other_kinds_of_change_are_measured(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    generator = torch.Generator().manual_seed(0)
    w1, w2 = (torch.randn(16, 2, generator=generator) @ torch.randn(2, 8, generator=generator) for _ in "12")

    def replace(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if key.startswith(LINEAR)]:
            del tensors[key]
        for side, product in enumerate((w1, w2), start=1):
            u, sigma, vh = torch.linalg.svd(product, full_matrices=False)
            tensors[f"{LINEAR}.hada_w{side}_a"] = (u[:, :2] * sigma[:2]).contiguous()
            tensors[f"{LINEAR}.hada_w{side}_b"] = vh[:2].contiguous()

    module = module_named(extract_and_validate(files, edit=replace), LINEAR)
    expected = (files.delta(LINEAR) - (w1 * w2).double()).norm() / files.delta(LINEAR).norm()
    assert (module.kind, module.status, module.rank) == ("loha", "applied", 2)
    assert module.relative_error == pytest.approx(float(expected), rel=1e-4)


def test_a_changed_part_that_the_lora_changes_is_compared_too(make_model_pair: "MakePair") -> None:
    vae = "vae.vae_model.encoder.conv_in"

    def change_vae(base: "State", tuned: "State") -> None:
        tuned[f"{vae}.weight"] = base[f"{vae}.weight"] + 1.0

    def add(tensors: dict[str, Tensor]) -> None:
        tensors[f"{vae}.diff"] = torch.full((8, 3, 3, 3), 0.75)

    files = make_model_pair(edit=change_vae)
    report = extract_and_validate(files, edit=add)
    assert module_named(report, vae).relative_error == pytest.approx(0.25, rel=1e-5)
    assert (report.success_rate, report.findings) == (100.0, ())


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_number_of_threads_does_not_show(make_model_pair: "MakePair", workers: int) -> None:
    files = make_model_pair()
    expected = extract_and_validate(files).modules
    assert validate_lora(files.base, files.tuned, lora_path(files), workers=workers).modules == expected


def test_each_module_is_read_when_its_turn_comes(
    make_model_pair: "MakePair", monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than one module a thread, and its layer, is ever in memory: a LoRA may be as large as its model."""
    files = make_model_pair()
    extract_lora(files.base, files.tuned, lora_path(files))
    events: list[str] = []

    read = ChangedKeys.change

    def watch(self: ChangedKeys, key: str) -> object:
        events.append(key)
        return read(self, key)

    def measured(self: ResidualMeter, key: str, change: object = None) -> object:
        events.append("measured")
        return Residual(1.0, 0.5)

    monkeypatch.setattr(ChangedKeys, "change", watch)
    monkeypatch.setattr(ResidualMeter, "measure", measured)
    validate_lora(files.base, files.tuned, lora_path(files), workers=1)
    assert {event for event in events if event != "measured"} == {f"{layer}.weight" for layer in files.layers}
    assert all(after == "measured" for event, after in pairwise(events) if event != "measured")


def test_the_report_is_json(make_model_pair: "MakePair") -> None:
    report = extract_and_validate(make_model_pair())
    loaded = json.loads(json.dumps(report.as_dict()))
    assert loaded["success_rate"] == 100.0
    assert len(loaded["modules"]) == 10
    assert sum(loaded["bands"].values()) == 10
    assert loaded["modules"][0]["relative_error"] == report.modules[0].relative_error


def test_models_that_do_not_differ_leave_nothing_to_compare(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    extract_lora(files.base, files.tuned, lora_path(files))
    copies = make_model_pair(edit=lambda base, tuned: tuned.update(base))
    with pytest.raises(ModelMismatchError, match="no change to compare"):
        validate(copies)


def test_a_lora_with_nan_is_refused_with_its_key(make_model_pair: "MakePair") -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LINEAR}.lora_up.weight"][0, 0] = float("nan")

    with pytest.raises(NonFiniteError, match=rf"lora\.safetensors: {LINEAR}\.lora_up\.weight"):
        extract_and_validate(make_model_pair(), edit=damage)


def test_a_checkpoint_is_no_lora(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    with pytest.raises(LoraFormatError, match=r"tuned\.safetensors"):
        validate_lora(files.base, files.tuned, files.tuned)
