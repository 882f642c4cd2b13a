"""Extraction into every format: the same change under other names, sizes that hold, refusals before any work."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from sigmascope.errors import CheckpointError, LoraFormatError, ModelMismatchError, NonFiniteError
from sigmascope.lora.budget import Budget
from sigmascope.lora.extract import ExtractionReport, ExtractOptions, extract_lora
from sigmascope.lora.loadable import loads_in_words
from sigmascope.lora.pairs import PairOptions
from sigmascope.lora.ranks import FixedRank, RankRules
from sigmascope.lora.reader import load_lora
from sigmascope.lora.validate import validate_lora

if TYPE_CHECKING:
    from tests.conftest import MakePair, ModelPair

State = dict[str, Tensor]
FORMATS = ["native", "kohya", "peft", "comfyui"]
WIDTH = 48


def flux(naming: str) -> dict[str, tuple[int, ...]]:
    """Layers of a small FLUX: three projections of a block, and four of a single one, are one matrix originally."""
    if naming == "original":
        return {
            "img_in": (WIDTH, 16),
            "vector_in.in_layer": (WIDTH, 20),
            "double_blocks.0.img_attn.qkv": (3 * WIDTH, WIDTH),
            "double_blocks.0.img_mlp.0": (4 * WIDTH, WIDTH),
            "single_blocks.0.linear1": (7 * WIDTH, WIDTH),
            "single_blocks.0.linear2": (WIDTH, 5 * WIDTH),
            "final_layer.adaLN_modulation.1": (2 * WIDTH, WIDTH),
        }
    attention, single = "transformer_blocks.0.attn", "single_transformer_blocks.0"
    return {
        "x_embedder": (WIDTH, 16),
        "time_text_embed.text_embedder.linear_1": (WIDTH, 20),
        **{f"{attention}.{name}": (WIDTH, WIDTH) for name in ("to_q", "to_k", "to_v", "to_out.0")},
        "transformer_blocks.0.ff.net.0.proj": (4 * WIDTH, WIDTH),
        **{f"{single}.attn.{name}": (WIDTH, WIDTH) for name in ("to_q", "to_k", "to_v")},
        f"{single}.proj_mlp": (4 * WIDTH, WIDTH),
        f"{single}.proj_out": (WIDTH, 5 * WIDTH),
        "norm_out.linear": (2 * WIDTH, WIDTH),
    }


def change(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Some strong directions above noise."""
    left, right = torch.randn(shape[0], 6, generator=generator), torch.randn(6, shape[1], generator=generator)
    return 0.05 * (left @ right) + 0.02 * torch.randn(shape, generator=generator)


def save_pair(folder: Path, shapes: dict[str, tuple[int, ...]], prefix: str = "") -> tuple[Path, Path]:
    generator = torch.Generator().manual_seed(0)
    base = {
        f"{prefix}{path}.weight": torch.randn(shape, generator=generator) for path, shape in shapes.items()
    }
    tuned = {key: weight + change(tuple(weight.shape), generator) for key, weight in base.items()}
    paths = folder / "base.safetensors", folder / "tuned.safetensors"
    save_file(base, paths[0])
    save_file(tuned, paths[1])
    return paths


def extract(models: tuple[Path, Path], **options: Any) -> ExtractionReport:
    return extract_lora(*models, models[0].with_name("lora.safetensors"), ExtractOptions(**options))


def paths_of(files: "ModelPair") -> tuple[Path, Path]:
    return files.base, files.tuned


def assert_validates(report: ExtractionReport) -> None:
    """What a reader of the file finds, whatever its format, is what the report says."""
    proved = validate_lora(report.base, report.tuned, report.lora)
    assert proved.success_rate == 100.0
    found = {module.name: module.error_norm for module in proved.modules}
    assert found.keys() == {module.name for module in report.modules}
    for module in report.modules:
        # Joined and divided factors are the same numbers, but summed in another order.
        assert found[module.name] == pytest.approx(module.error_norm, rel=1e-3, abs=1e-6 * module.delta_norm)


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_holds_the_change_of_an_lbm(make_model_pair: "MakePair", format: str) -> None:
    report = extract(paths_of(make_model_pair()), format=format, rank=5, conv_rank=3)
    assert report.format == load_lora(report.lora).format == format
    assert_validates(report)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("naming", ["diffusers", "original"])
def test_every_format_holds_the_change_of_fused_layers_exactly(
    tmp_path: Path, naming: str, format: str
) -> None:
    report = extract(save_pair(tmp_path, flux(naming)), format=format, rank=5)
    assert report.architecture == "flux"
    assert len(report.modules) == len(flux(naming))
    assert_validates(report)


@pytest.mark.slow
@pytest.mark.parametrize("size", [30_000, 90_000])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("naming", ["diffusers", "original"])
def test_a_size_is_kept_where_layers_are_joined_or_divided(
    tmp_path: Path, naming: str, format: str, size: int
) -> None:
    report = extract(save_pair(tmp_path, flux(naming)), format=format, budget=Budget(max_bytes=size))
    assert 0.7 * size < report.lora.stat().st_size <= size


def test_a_part_of_a_fused_layer_may_be_left_out(tmp_path: Path) -> None:
    rules = RankRules(FixedRank(4, 4), excluded=("attn.to_k",))
    report = extract(save_pair(tmp_path, flux("diffusers")), format="comfyui", rules=rules)
    tensors = load_file(report.lora)
    up = tensors["diffusion_model.double_blocks.0.img_attn.qkv.lora_up.weight"]
    assert up.shape == (3 * WIDTH, 8)
    assert not up[WIDTH : 2 * WIDTH].any()
    proved = validate_lora(report.base, report.tuned, report.lora)
    assert proved.relative_error == pytest.approx(report.relative_error, rel=1e-4)


# Names and headers


def header(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata())


def test_without_a_word_each_model_gets_the_format_that_its_tools_read(
    make_model_pair: "MakePair", tmp_path: Path
) -> None:
    assert extract(paths_of(make_model_pair()), rank=2, conv_rank=2).format == "native"
    assert extract(save_pair(tmp_path, flux("diffusers")), rank=2).format == "peft"
    assert extract(save_pair(tmp_path, flux("original")), rank=2).format == "comfyui"
    single = save_pair(tmp_path, flux("original"), "model.diffusion_model.")
    assert extract(single, rank=2).format == "comfyui"


@pytest.mark.parametrize("is_folder", [True, False])
@pytest.mark.parametrize("start", ["", "diffusion_model.", "transformer."])
def test_a_model_of_no_known_family_gets_the_prefix_of_the_host_that_reads_such_a_model(
    is_folder: bool, start: str, tmp_path: Path
) -> None:
    """And once only, where its own keys have it; the result is unverified."""
    if is_folder:
        (tmp_path / "config.json").write_text('{"_diffusers_version": "0.42.1"}')
    report = extract(save_pair(tmp_path, {"my_layers.0.fc": (9, 8)}, start), rank=2)
    host, prefix = ("peft", "transformer.") if is_folder else ("comfyui", "diffusion_model.")
    assert report.format == host
    own = "" if start == prefix else start
    assert load_lora(report.lora).names == (f"{prefix}{own}my_layers.0.fc",)
    assert loads_in_words(report.lora).startswith(
        "diffusers unverified (the file does not tell its model family)"
    )


@pytest.mark.parametrize("format", FORMATS)
def test_every_module_has_an_alpha_equal_to_its_rank_or_none(
    make_model_pair: "MakePair", format: str
) -> None:
    # This model has fewer attention projections than convolutions, whose alpha diffusers would give to all
    conv_rank = 5 if format == "kohya" else 3
    report = extract(paths_of(make_model_pair()), format=format, rank=5, conv_rank=conv_rank)
    tensors = load_file(report.lora)
    alphas = {key: float(tensor) for key, tensor in tensors.items() if key.endswith(".alpha")}
    if format == "peft":
        assert alphas == {}
    for key, alpha in alphas.items():
        assert alpha == tensors[key.replace(".alpha", ".lora_down.weight")].shape[0]
    assert all(factors.scale == 1.0 for factors in load_lora(report.lora).modules.values())


@pytest.mark.parametrize("format", FORMATS)
def test_the_header_says_where_it_comes_from_and_what_it_is(make_model_pair: "MakePair", format: str) -> None:
    report = extract(paths_of(make_model_pair()), format=format, rank=5, conv_rank=3)
    alpha = "3" if format == "kohya" else "5"  # one for all there: see the formats
    texts = header(report.lora)
    assert (texts["sigmascope_base"], texts["sigmascope_tuned"]) == ("base.safetensors", "tuned.safetensors")
    assert texts["sigmascope_rank"] == "fixed:5,conv=3"
    assert len(texts["sigmascope_base_fingerprint"]) == 64
    assert texts["ss_network_module"] == "networks.lora"
    assert (texts["ss_network_dim"], texts["ss_network_alpha"]) == ("5", alpha)
    assert texts["modelspec.title"] == "lora"
    assert ("lbm_native_naming" in texts) == (format == "native")
    facts = yaml.safe_load(report.sidecar.read_text(encoding="utf-8"))
    assert facts["native_naming"] == (format == "native")
    assert (facts["rank"], facts["conv_rank"]) == (5, 3)


def test_ranks_that_were_chosen_layer_by_layer_are_told_as_such(make_model_pair: "MakePair") -> None:
    report = extract(paths_of(make_model_pair()), budget=Budget(max_error=0.3))
    texts = header(report.lora)
    assert texts["sigmascope_rank"] == '{"budget": {"max_error": 0.3}}'
    assert texts["ss_network_dim"] == "Dynamic"
    facts = yaml.safe_load(report.sidecar.read_text(encoding="utf-8"))
    assert facts["rank"] == texts["sigmascope_rank"]


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        (Budget(max_bytes=30_000), "size:30000"),
        (
            Budget(max_bytes=30_000, max_rank=8),
            '{"budget": {"max_size": 30000, "max_rank": 8, "max_conv_rank": 8}}',
        ),
    ],
)
def test_a_size_is_told_in_few_letters_where_nothing_else_is_set(
    make_model_pair: "MakePair", budget: Budget, text: str
) -> None:
    report = extract(paths_of(make_model_pair()), budget=budget)
    assert header(report.lora)["sigmascope_rank"] == text


# Refusals


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*rest: Any, **more: Any) -> None:
        raise AssertionError("a layer was read")

    monkeypatch.setattr("sigmascope.lora.layer_extraction.extract_layer", work)


@pytest.mark.parametrize("format", ["kohya", "comfyui"])
@pytest.mark.usefixtures("no_work")
def test_a_format_without_names_for_a_part_is_refused(make_model_pair: "MakePair", format: str) -> None:
    files = make_model_pair(
        edit=lambda base, tuned: tuned.update(
            {key: value + 1 for key, value in tuned.items() if key.startswith("vae.")}
        )
    )
    with pytest.raises(LoraFormatError, match=r"encoder\.conv_in of the part vae.*native"):
        extract(paths_of(files), format=format, pairing=PairOptions(parts=("denoiser", "vae")))
    assert not files.base.with_name("lora.safetensors").exists()


@pytest.mark.usefixtures("no_work")
def test_a_format_that_is_not_known_is_refused_with_those_that_are(make_model_pair: "MakePair") -> None:
    with pytest.raises(LoraFormatError, match=r"no LoRA format 'diffusers'.*native"):
        extract(paths_of(make_model_pair()), format="diffusers")


@pytest.mark.usefixtures("no_work")
def test_a_damaged_bias_is_found_before_any_layer_is_decomposed(make_model_pair: "MakePair") -> None:
    def damage(base: State, tuned: State) -> None:
        tuned["denoiser.conv_in.bias"][0] = float("nan")

    with pytest.raises(NonFiniteError, match=r"tuned\.safetensors: denoiser\.conv_in\.bias holds 1 NaN"):
        extract(paths_of(make_model_pair(edit=damage)))


# Models that do not fit each other

CONV_IN = "denoiser.conv_in.weight"


def lose(base: State, tuned: State) -> None:
    del tuned[CONV_IN]


def widen(base: State, tuned: State) -> None:
    tuned[CONV_IN] = torch.zeros(8, 9, 3, 3)


def quantise(base: State, tuned: State) -> None:
    tuned[CONV_IN] = tuned[CONV_IN].to(torch.int8)


def narrow(base: State, tuned: State) -> None:
    tuned[CONV_IN] = tuned[CONV_IN].bfloat16()


@pytest.mark.parametrize(
    ("edit", "flag", "finding"),
    [
        (lose, "on_missing", "lora.missing_keys"),
        (widen, "on_shape_change", "lora.shapes_changed"),
        (quantise, "on_integer", "lora.integer_tensors_changed"),
        (narrow, "on_mixed_dtypes", "lora.mixed_dtypes"),
    ],
)
def test_what_does_not_fit_is_refused_or_left_out_and_named(
    make_model_pair: "MakePair", edit: Callable[[State, State], None], flag: str, finding: str
) -> None:
    files = make_model_pair(edit=edit)
    refuse, skip = (PairOptions(**{flag: decision}) for decision in ("error", "skip"))  # type: ignore[arg-type]
    with pytest.raises((ModelMismatchError, CheckpointError), match=r"denoiser\.conv_in\.weight"):
        extract(paths_of(files), rank=2, conv_rank=2, pairing=refuse)
    assert {path.name for path in files.base.parent.iterdir()} == {"base.safetensors", "tuned.safetensors"}
    report = extract(paths_of(files), rank=2, conv_rank=2, pairing=skip)
    assert {module.name for module in report.modules} == set(files.layers) - {"denoiser.conv_in"}
    (found,) = report.findings
    assert found.id == finding
    assert CONV_IN in found.message


# Files in the original models' own naming


ORIGINAL: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "sd15": (
        "model.diffusion_model.",
        {
            "input_blocks.0.0": (8, 4, 3, 3),
            "input_blocks.1.0.in_layers.2": (8, 8, 3, 3),
            "input_blocks.1.1.transformer_blocks.0.attn1.to_q": (8, 8),
            "input_blocks.1.1.transformer_blocks.0.attn2.to_k": (8, 768),
            "middle_block.1.transformer_blocks.0.attn1.to_q": (8, 8),
            "time_embed.0": (16, 8),
            "out.2": (4, 8, 3, 3),
        },
    ),
    "flux": (
        "",
        {
            "img_in": (16, 4),
            "double_blocks.0.img_attn.qkv": (48, 16),
            "double_blocks.0.txt_mlp.0": (64, 16),
            "single_blocks.0.linear1": (112, 16),
            "vector_in.in_layer": (16, 8),
            "txt_in": (16, 8),
            "final_layer.linear": (4, 16),
        },
    ),
    "wan": (
        "",
        {
            "patch_embedding": (12, 16, 1, 2, 2),
            "blocks.0.self_attn.q": (12, 12),
            "blocks.0.cross_attn.k": (12, 12),
            "blocks.0.ffn.0": (16, 12),
            "text_embedding.0": (12, 8),
            "time_projection.1": (72, 12),
            "head.head": (64, 12),
        },
    ),
}
TOLD_BY = {"wan": {"head.modulation": torch.zeros(1, 2, 12)}}


@pytest.mark.parametrize("family", ORIGINAL)
def test_single_files_become_comfyui_loras_of_the_same_names(tmp_path: Path, family: str) -> None:
    prefix, shapes = ORIGINAL[family]
    generator = torch.Generator().manual_seed(0)
    base = {
        f"{prefix}{path}.weight": torch.randn(shape, generator=generator) for path, shape in shapes.items()
    }
    tuned = {
        key: weight + 0.1 * torch.randn(weight.shape, generator=generator) for key, weight in base.items()
    }
    save_file(base | TOLD_BY.get(family, {}), tmp_path / "base.safetensors")
    save_file(tuned | TOLD_BY.get(family, {}), tmp_path / "tuned.safetensors")
    models = tmp_path / "base.safetensors", tmp_path / "tuned.safetensors"
    report = extract(models, rank=9999, conv_rank=9999, save_precision="float")
    assert (report.architecture, report.format) == (family, "comfyui")
    modules = load_lora(report.lora).modules
    assert set(modules) == {f"diffusion_model.{path}" for path in shapes}
    for path in shapes:
        key = f"{prefix}{path}.weight"
        found = modules[f"diffusion_model.{path}"].delta()
        torch.testing.assert_close(found, tuned[key] - base[key], rtol=1e-6, atol=1e-7)
