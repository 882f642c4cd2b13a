import json
from typing import TYPE_CHECKING

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from sigmascope.lora.extract import ExtractionReport, ExtractOptions, extract_lora

if TYPE_CHECKING:
    from tests.conftest import MakePair, ModelPair, State

SHORTCUT = "denoiser.mid_block.resnets.0.conv_shortcut"
FULL = ExtractOptions(rank=9999, conv_rank=9999)


def extract(files: "ModelPair", options: ExtractOptions | None = None) -> ExtractionReport:
    return extract_lora(files.base, files.tuned, files.base.with_name("lora.safetensors"), options)


def stored_matrix(report: ExtractionReport, layer: str) -> Tensor:
    """ΔW as any reader of the file forms it: up · down · alpha / rank."""
    tensors = load_file(report.lora)
    up, down = (tensors[f"{layer}.lora_{side}.weight"].double().flatten(1) for side in ("up", "down"))
    product: Tensor = up @ down * tensors[f"{layer}.alpha"].double() / down.shape[0]
    return product


def discarded(delta: Tensor, rank: int) -> float:
    """Eckart and Young: the error of the best approximation is the norm of what it discards."""
    return float(torch.linalg.svdvals(delta)[rank:].square().sum().sqrt())


def test_a_planted_rank_4_change_comes_back_at_rank_4(make_model_pair: "MakePair") -> None:
    files = make_model_pair(delta_rank=4)
    report = extract(files, ExtractOptions(rank=4, conv_rank=4, save_precision="float"))
    for layer in files.layers:
        delta = files.delta(layer)
        assert (stored_matrix(report, layer) - delta).norm() <= 2e-6 * delta.norm()


def test_every_layer_is_as_near_as_its_rank_allows(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    report = extract(files, ExtractOptions(rank=4, conv_rank=2, save_precision="float"))
    assert len(report.modules) == len(files.layers)
    for module in report.modules:
        delta = files.delta(module.name)
        assert module.rank == (2 if len(module.shape) == 4 else 4)
        assert module.error_norm == pytest.approx(discarded(delta, module.rank), rel=1e-5)
        assert module.delta_norm == pytest.approx(delta.norm().item(), rel=1e-6)


def test_the_reported_error_is_that_of_the_factors_in_the_file(make_model_pair: "MakePair") -> None:
    files = make_model_pair(size=1e-3)
    report = extract(files, ExtractOptions(rank=8, conv_rank=8, save_precision="bf16"))
    for module in report.modules:
        error = (files.delta(module.name) - stored_matrix(report, module.name)).norm().item()
        assert module.relative_error == pytest.approx(error / module.delta_norm, rel=1e-4)


def test_double_precision_models_are_decomposed_in_double_precision(make_model_pair: "MakePair") -> None:
    files = make_model_pair(dtype=torch.float64)
    report = extract(files, ExtractOptions(rank=3, conv_rank=3, save_precision="float"))
    for module in report.modules:
        assert module.error_norm == pytest.approx(discarded(files.delta(module.name), module.rank), rel=1e-10)


@pytest.mark.parametrize(("precision", "limit"), [("float", 1e-6), ("fp16", 5e-4), ("bf16", 5e-3)])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-6])
def test_full_rank_loses_only_the_storage_rounding(
    make_model_pair: "MakePair", precision: str, limit: float, size: float
) -> None:
    files = make_model_pair(size=size)
    report = extract(files, ExtractOptions(9999, 9999, save_precision=precision))  # type: ignore[arg-type]
    for module in report.modules:
        delta = files.delta(module.name)
        assert (stored_matrix(report, module.name) - delta).norm() <= limit * delta.norm()
        assert module.rank == min(delta.shape)


def test_bf16_models_at_full_rank_come_back_within_half_a_per_cent(make_model_pair: "MakePair") -> None:
    report = extract(make_model_pair(dtype=torch.bfloat16), ExtractOptions(9999, 9999, save_precision="bf16"))
    assert max(module.relative_error for module in report.modules) <= 0.005


def test_factors_are_shaped_for_linear_and_convolution_layers(make_model_pair: "MakePair") -> None:
    tensors = load_file(extract(make_model_pair(), ExtractOptions(rank=4, conv_rank=2)).lora)
    assert tensors["denoiser.down_blocks.0.resnets.0.conv1.lora_up.weight"].shape == (8, 2, 1, 1)
    assert tensors["denoiser.down_blocks.0.resnets.0.conv1.lora_down.weight"].shape == (2, 8, 3, 3)
    assert tensors[f"{SHORTCUT}.lora_down.weight"].shape == (2, 8, 1, 1)
    assert tensors["denoiser.time_embedding.linear_1.lora_up.weight"].shape == (16, 4)
    assert tensors["denoiser.time_embedding.linear_1.lora_down.weight"].shape == (4, 8)


def test_alpha_is_the_rank_really_stored(make_model_pair: "MakePair") -> None:
    tensors = load_file(extract(make_model_pair(), ExtractOptions(rank=32, conv_rank=32)).lora)
    assert tensors["denoiser.conv_out.alpha"] == 4  # it has 4 output channels
    assert tensors["denoiser.conv_out.lora_down.weight"].shape[0] == 4


@pytest.mark.parametrize(
    ("precision", "dtype"), [("float", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_factors_are_stored_in_the_asked_precision(
    make_model_pair: "MakePair", precision: str, dtype: torch.dtype
) -> None:
    report = extract(make_model_pair(), ExtractOptions(save_precision=precision))  # type: ignore[arg-type]
    factors = [tensor for name, tensor in load_file(report.lora).items() if not name.endswith(".alpha")]
    assert {factor.dtype for factor in factors} == {dtype}


def unchanged_shortcut(base: "State", tuned: "State") -> None:
    tuned[f"{SHORTCUT}.weight"] = base[f"{SHORTCUT}.weight"].clone()


def test_an_unchanged_layer_needs_no_factors_and_is_listed(make_model_pair: "MakePair") -> None:
    report = extract(make_model_pair(edit=unchanged_shortcut))
    assert [(layer.name, layer.reason) for layer in report.left_out] == [(SHORTCUT, "unchanged")]
    assert f"{SHORTCUT}.alpha" not in load_file(report.lora)
    assert (report.total_lora_modules, report.total_analyzed_layers, report.coverage_percentage) == (
        9,
        10,
        90.0,
    )


def test_min_diff_leaves_out_layers_that_change_less(make_model_pair: "MakePair") -> None:
    def nudge(base: "State", tuned: "State") -> None:
        tuned[f"{SHORTCUT}.weight"] = base[f"{SHORTCUT}.weight"].clone()
        tuned[f"{SHORTCUT}.weight"][3, 2] += 1e-4

    files = make_model_pair(edit=nudge)
    report = extract(files, ExtractOptions(min_diff=1e-3))
    assert [(layer.name, layer.reason) for layer in report.left_out] == [(SHORTCUT, "below_min_diff")]
    assert report.left_out[0].largest_change == pytest.approx(1e-4, rel=1e-2)
    assert not extract(files, ExtractOptions(min_diff=1e-5)).left_out


ATTENTION = {
    "denoiser.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q",
    "denoiser.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_out.0",
}
EXTENDED = ATTENTION | {
    "denoiser.down_blocks.1.attentions.0.proj_in",
    "denoiser.down_blocks.1.attentions.0.transformer_blocks.0.ff.net.2",
}


@pytest.mark.parametrize(("coverage", "layers"), [("attention", ATTENTION), ("extended", EXTENDED)])
def test_coverage_keeps_its_layers_and_lists_the_others(
    make_model_pair: "MakePair", coverage: str, layers: set[str]
) -> None:
    report = extract(make_model_pair(), ExtractOptions(target_coverage=coverage))  # type: ignore[arg-type]
    assert {module.name for module in report.modules} == layers
    assert len(report.left_out) == 10 - len(layers)
    assert {layer.reason for layer in report.left_out} == {"outside_coverage"}


def test_what_is_left_out_counts_as_lost_in_the_overall_error(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    report = extract(files, ExtractOptions(9999, 9999, target_coverage="attention"))
    change = {layer: files.delta(layer).square().sum().item() for layer in files.layers}
    lost = sum(value for layer, value in change.items() if layer not in ATTENTION)
    assert report.relative_error == pytest.approx((lost / sum(change.values())) ** 0.5, rel=1e-5)


def test_relative_change_is_measured_against_the_base(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    module = extract(files).modules[0]
    base = files.base_state[f"{module.name}.weight"].double()
    assert module.relative_change == pytest.approx(
        (files.delta(module.name).norm() / base.norm()).item(), rel=1e-6
    )


def test_kept_energy_is_the_share_of_the_kept_singular_values(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    for module in extract(files, ExtractOptions(rank=4, conv_rank=4)).modules:
        energy = torch.linalg.svdvals(files.delta(module.name)).square()
        assert module.kept_energy == pytest.approx(
            (energy[: module.rank].sum() / energy.sum()).item(), rel=1e-5
        )


def test_the_side_car_has_exactly_the_contract_s_keys(make_model_pair: "MakePair") -> None:
    files = make_model_pair(edit=unchanged_shortcut)
    report = extract(files, ExtractOptions(rank=4, conv_rank=2, min_diff=1e-9))
    assert report.sidecar == files.base.with_name("lora_config.yaml")
    assert yaml.safe_load(report.sidecar.read_text(encoding="utf-8")) == {
        "base_model": "base.safetensors",
        "tuned_model": "tuned.safetensors",
        "extraction_method": "svd",
        "rank": 4,
        "conv_rank": 2,
        "architecture": "lbm",
        "native_naming": True,
        "total_analyzed_layers": 10,
        "total_lora_modules": 9,
        "change_threshold": 1e-9,
        "coverage_percentage": 90.0,
    }


def test_the_header_says_where_the_lora_comes_from(make_model_pair: "MakePair") -> None:
    report = extract(make_model_pair(), ExtractOptions(rank=4, conv_rank=2))
    with safe_open(report.lora, framework="pt") as file:
        header = file.metadata()
    assert header["lbm_native_naming"] == "true"
    assert (header["ss_network_dim"], header["ss_network_alpha"]) == ("4", "4")
    assert json.loads(header["ss_network_args"])["conv_dim"] == "2"
    assert (header["sigmascope_base"], header["sigmascope_tuned"]) == (
        "base.safetensors",
        "tuned.safetensors",
    )
    assert header["sigmascope_base_fingerprint"] != header["sigmascope_tuned_fingerprint"]
    assert header["modelspec.title"] == "lora"


def test_the_same_inputs_give_the_same_bytes(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    first = extract(files).lora.read_bytes()
    assert extract(files).lora.read_bytes() == first


def test_the_report_is_json(make_model_pair: "MakePair") -> None:
    report = extract(make_model_pair(edit=unchanged_shortcut))
    loaded = json.loads(json.dumps(report.as_dict()))
    assert loaded["total_lora_modules"] == 9
    assert loaded["modules"][0]["relative_error"] == report.modules[0].relative_error
    assert loaded["file_bytes"] == report.lora.stat().st_size


def test_progress_tells_each_layer_once(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    told: list[tuple[int, int, str]] = []
    extract_lora(
        files.base,
        files.tuned,
        files.base.with_name("lora.safetensors"),
        progress=lambda *step: told.append(step),
    )
    assert [done for done, _, _ in told] == list(range(1, 11))
    assert {total for _, total, _ in told} == {10}
    assert {what.split()[-1] for _, _, what in told} == set(files.layers)
    assert all(what.startswith("error ") for _, _, what in told)


def test_changed_biases_are_reported_with_their_share(make_model_pair: "MakePair") -> None:
    def shift(base: "State", tuned: "State") -> None:
        tuned["denoiser.conv_in.bias"] = base["denoiser.conv_in.bias"] + 0.5

    report = extract(make_model_pair(edit=shift))
    assert report.uncovered == {"denoiser.conv_in.bias": pytest.approx(0.5 * 8**0.5, rel=1e-5)}
    assert [finding.id for finding in report.findings] == ["lora.biases_and_norms_changed"]


def test_a_changed_vae_is_reported(make_model_pair: "MakePair") -> None:
    def shift(base: "State", tuned: "State") -> None:
        tuned["vae.vae_model.encoder.conv_in.weight"] = base["vae.vae_model.encoder.conv_in.weight"] + 1

    (finding,) = extract(make_model_pair(edit=shift)).findings
    assert finding.id == "lora.other_parts_changed"
    assert finding.evidence["key"] == "vae.vae_model.encoder.conv_in.weight"


def test_models_of_different_dtypes_are_extracted_with_a_warning(make_model_pair: "MakePair") -> None:
    def narrow(base: "State", tuned: "State") -> None:
        tuned.update({key: value.bfloat16() for key, value in tuned.items() if key.startswith("denoiser.")})

    report = extract(make_model_pair(edit=narrow), FULL)
    assert "lora.mixed_dtypes" in [finding.id for finding in report.findings]
    assert report.total_lora_modules == 10


def test_a_checkpoint_of_lightning_gives_the_same_lora(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    expected = load_file(extract(files).lora)
    state = {f"model.{key}": value for key, value in files.tuned_state.items()}
    lightning = files.tuned.with_suffix(".ckpt")
    torch.save({"state_dict": state, "epoch": 3}, lightning)
    report = extract_lora(files.base, lightning, files.base.with_name("second.safetensors"))
    found = load_file(report.lora)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_weight_of_other_dimensions_is_no_layer(make_model_pair: "MakePair") -> None:
    def add(base: "State", tuned: "State") -> None:
        base["denoiser.temporal.weight"], tuned["denoiser.temporal.weight"] = (
            torch.zeros(4, 4, 1, 1, 1, 1),
            torch.ones(4, 4, 1, 1, 1, 1),
        )

    report = extract(make_model_pair(edit=add))
    assert report.total_analyzed_layers == 10
    assert list(report.uncovered) == ["denoiser.temporal.weight"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_cuda_gives_what_the_cpu_gives(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    on_cpu = extract(files, ExtractOptions(rank=4, conv_rank=4, save_precision="float", device="cpu"))
    on_gpu = extract(files, ExtractOptions(rank=4, conv_rank=4, save_precision="float", device="cuda"))
    for cpu, gpu in zip(on_cpu.modules, on_gpu.modules, strict=True):
        assert gpu.error_norm == pytest.approx(cpu.error_norm, rel=1e-4)


def test_a_sharded_model_is_read(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    folder = files.base.with_name("sharded")
    folder.mkdir()
    keys = list(files.base_state)
    shards = {"one.safetensors": keys[::2], "two.safetensors": keys[1::2]}
    for name, held in shards.items():
        save_file({key: files.base_state[key] for key in held}, folder / name)
    index = {"weight_map": {key: name for name, held in shards.items() for key in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    report = extract_lora(folder, files.tuned, files.base.with_name("lora.safetensors"), FULL)
    assert report.total_lora_modules == 10
