"""Extraction that knows what the model does with its weights, and budgets that weigh layers without knowing it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import LAYER_SHAPES, MakePair, ModelPair
from torch import Tensor

from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import ConfigError, ModelMismatchError
from sigmascope.lora.budget import Budget
from sigmascope.lora.extract import ExtractionReport, ExtractOptions, extract_lora
from sigmascope.lora.fingerprint import denoiser_fingerprint
from sigmascope.lora.linalg import matrix_shape
from sigmascope.lora.ranks import MethodRank, RankRules
from sigmascope.lora.reader import load_lora
from sigmascope.lora.statistics import LayerStatistics, ModelStatistics, Moments


def moments(size: int, seed: int, scale: float = 1.0) -> Moments:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(2 * size, size, generator=generator) * torch.arange(1, size + 1) ** -0.7
    full = scale * rows.mT @ rows
    return Moments(full.diagonal().clone(), full=full)


def path_of(layer: str) -> str:
    return layer.removeprefix("denoiser.")


@pytest.fixture
def pair(make_model_pair: MakePair) -> ModelPair:
    return make_model_pair()


def statistics_of(pair: ModelPair, *, without: str = "", scale: dict[str, float] | None = None) -> Path:
    """Some statistics of the base, written beside it."""
    layers = {}
    for number, (layer, shape) in enumerate(LAYER_SHAPES.items()):
        rows, columns = matrix_shape(shape)
        if layer != without:
            strength = (scale or {}).get(layer, 1.0)
            layers[path_of(layer)] = LayerStatistics(
                moments(columns, 2 * number, strength), moments(rows, 2 * number + 1), 10
            )
    with open_checkpoint(pair.base) as checkpoint:
        fingerprint = denoiser_fingerprint(checkpoint)
    target = pair.base.with_name("stats.safetensors")
    ModelStatistics(layers, fingerprint, {"calls": 1}).save(target)
    return target


def extract(pair: ModelPair, name: str = "lora", **options: Any) -> ExtractionReport:
    options = {"save_precision": "float"} | options
    return extract_lora(
        pair.base, pair.tuned, pair.base.with_name(f"{name}.safetensors"), ExtractOptions(**options)
    )


def root(moments: Moments) -> Tensor:
    assert moments.full is not None
    matrix = moments.full.double()
    matrix = matrix + 1e-3 * matrix.trace() / len(matrix) * torch.eye(len(matrix))
    values, vectors = torch.linalg.eigh(matrix)
    symmetric: Tensor = (vectors * values.sqrt()) @ vectors.mT
    return symmetric


def weighed(pair: ModelPair, layer: str, change: Tensor) -> Tensor:
    number = list(LAYER_SHAPES).index(layer)
    rows, columns = matrix_shape(LAYER_SHAPES[layer])
    product: Tensor = root(moments(rows, 2 * number + 1)) @ change @ root(moments(columns, 2 * number))
    return product


def test_each_layer_has_the_least_weighted_error_of_its_rank(pair: ModelPair) -> None:
    report = extract(pair, rank=3, conv_rank=3, statistics=statistics_of(pair))
    lora = load_lora(report.lora)
    lost = whole = 0.0
    for layer in pair.layers:
        delta = pair.delta(layer)
        factors = lora.modules[layer]
        assert hasattr(factors, "up")
        product = factors.up.double().flatten(1) @ factors.down.double().flatten(1)
        values = torch.linalg.svdvals(weighed(pair, layer, delta))
        error = float(weighed(pair, layer, delta - product).norm())
        assert error <= 1.001 * float(values[3:].norm()) + 1e-5 * float(values.norm())
        lost, whole = lost + error**2, whole + float(values.square().sum())
    assert report.weighted_error == pytest.approx(math.sqrt(lost / whole), rel=1e-3)
    (module,) = [module for module in report.modules if module.name.endswith("proj_in")]
    plain = extract(pair, "plain", rank=3, conv_rank=3)
    (least,) = [module for module in plain.modules if module.name.endswith("proj_in")]
    assert module.relative_error > least.relative_error  # of the weights: that is what it pays
    assert plain.weighted_error is None


def test_models_in_float64_are_weighed_in_float64(make_model_pair: MakePair) -> None:
    pair = make_model_pair(dtype=torch.float64)
    report = extract(pair, rank=2, conv_rank=2, statistics=statistics_of(pair))
    assert report.total_lora_modules == len(LAYER_SHAPES)


def test_the_file_says_what_its_statistics_were_made_from(pair: ModelPair) -> None:
    report = extract(pair, rank=2, conv_rank=2, statistics=statistics_of(pair))
    with open_checkpoint(report.lora) as lora:
        assert json.loads(lora.metadata["sigmascope_statistics"]) == {"calls": 1, "ridge": 1e-3}


def test_a_layer_that_the_output_feels_more_gets_more_of_the_budget(pair: ModelPair) -> None:
    dear = "denoiser.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
    budget = Budget(max_bytes=9_000)

    def rank(path: Path) -> int:
        report = extract(pair, budget=budget, statistics=path)
        return next((module.rank for module in report.modules if module.name == dear), 0)

    assert rank(statistics_of(pair, scale={dear: 100.0})) > rank(statistics_of(pair, scale={dear: 0.01}))


def test_a_layer_without_statistics_is_extracted_as_one_of_the_others(pair: ModelPair) -> None:
    left = "denoiser.down_blocks.1.attentions.0.proj_in"
    report = extract(pair, rank=2, conv_rank=2, statistics=statistics_of(pair, without=left))
    values = torch.linalg.svdvals(pair.delta(left))
    (module,) = [module for module in report.modules if module.name == left]
    assert module.error_norm == pytest.approx(float(values[2:].norm()), rel=1e-3)


def test_statistics_of_another_model_are_refused(pair: ModelPair) -> None:
    path = statistics_of(pair)
    with open_checkpoint(path) as checkpoint:
        tensors = {key: checkpoint.tensor(key) for key in checkpoint}
        metadata = dict(checkpoint.metadata) | {"fingerprint": "0" * 64}
    from safetensors.torch import save_file

    save_file(tensors, path, metadata)
    with pytest.raises(ModelMismatchError, match=r"made with another model: its weights differ"):
        extract(pair, statistics=path)


def test_statistics_of_other_shapes_name_the_layer(pair: ModelPair) -> None:
    layer = LayerStatistics(moments(5, 0), moments(4, 1), 3)
    path = pair.base.with_name("other.safetensors")
    ModelStatistics({"conv_in": layer}).save(path)
    with pytest.raises(ConfigError, match=r"denoiser\.conv_in has a weight of 8×36, .* 4×5"):
        extract(pair, statistics=path)


def test_nothing_is_written_where_statistics_are_refused(pair: ModelPair) -> None:
    target = pair.base.with_name("lora.safetensors")
    target.write_bytes(b"what was there")
    layer = LayerStatistics(moments(5, 0), moments(4, 1), 3)
    ModelStatistics({"nothing.of.it": layer}).save(pair.base.with_name("other.safetensors"))
    with pytest.raises(ModelMismatchError, match="they cover none of the 10 layers"):
        extract(pair, statistics=pair.base.with_name("other.safetensors"))
    assert target.read_bytes() == b"what was there"


@pytest.mark.parametrize("ridge", [0.0, -1.0, math.nan, math.inf])
def test_a_ridge_that_makes_no_sense_is_refused(ridge: float) -> None:
    with pytest.raises(ConfigError, match="--ridge"):
        ExtractOptions(ridge=ridge)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budget_weights": "plain"}, "--budget_weights plain applies only to a budget"),
        (
            {
                "budget": Budget(max_bytes=9_000),
                "budget_weights": "plain",
                "statistics": Path("s.safetensors"),
            },
            "--budget_weights plain applies only to a budget without statistics",
        ),
        (
            {"rules": RankRules(MethodRank("threshold", 0.05)), "statistics": Path("s.safetensors")},
            "threshold compares singular values",
        ),
    ],
)
def test_what_would_have_no_effect_or_another_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ExtractOptions(**options)


def ranks(report: ExtractionReport) -> dict[str, int]:
    return {module.name: module.rank for module in report.modules}


def test_equal_weights_in_a_file_are_plain_ones(pair: ModelPair, tmp_path: Path) -> None:
    weights = tmp_path / "weights.json"
    weights.write_text(json.dumps(dict.fromkeys(LAYER_SHAPES, 3.0)))
    budget = Budget(max_bytes=9_000)
    plain = extract(pair, "plain", budget=budget, budget_weights="plain")
    given = extract(pair, "given", budget=budget, budget_weights=str(weights))
    assert ranks(given) == ranks(plain)


def test_a_layer_of_small_weights_gets_more_where_errors_are_relative(make_model_pair: MakePair) -> None:
    small = "denoiser.mid_block.resnets.0.conv_shortcut"

    def shrink(base: dict[str, Tensor], tuned: dict[str, Tensor]) -> None:
        change = tuned[f"{small}.weight"] - base[f"{small}.weight"]
        base[f"{small}.weight"] *= 0.02
        tuned[f"{small}.weight"] = base[f"{small}.weight"] + change

    pair = make_model_pair(edit=shrink)
    budget = Budget(max_bytes=6_000)
    relative = extract(pair, "relative", budget=budget)
    plain = extract(pair, "plain", budget=budget, budget_weights="plain")
    assert ranks(relative).get(small, 0) > ranks(plain).get(small, 0)


def test_the_error_that_is_limited_is_the_weighted_one(pair: ModelPair) -> None:
    report = extract(pair, budget=Budget(max_error=0.4))
    weights = {
        layer: float(pair.base_state[f"{layer}.weight"].double().norm()) ** -2 for layer in pair.layers
    }
    lost = sum(weights[module.name] * module.error_norm**2 for module in report.modules)
    lost += sum(weights[layer.name] * layer.delta_norm**2 for layer in report.left_out)
    whole = sum(weights[layer] * float(pair.delta(layer).norm()) ** 2 for layer in pair.layers)
    assert report.weighted_error == pytest.approx(math.sqrt(lost / whole), rel=1e-4)
    assert math.sqrt(lost / whole) <= 0.4 * (1 + 1e-6)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "is not a JSON object"),
        ("{", "budget_weights"),
        ('{"denoiser.conv_inn": 1}', "Did you mean"),
        ('{"denoiser.conv_in": -1}', "is not a weight"),
        ('{"denoiser.conv_in": true}', "is not a weight"),
    ],
)
def test_a_file_of_weights_that_makes_no_sense_is_refused(
    text: str, says: str, pair: ModelPair, tmp_path: Path
) -> None:
    weights = tmp_path / "weights.json"
    weights.write_text(text)
    with pytest.raises(ConfigError) as caught:
        extract(pair, budget=Budget(max_bytes=9_000), budget_weights=str(weights))
    assert says in f"{caught.value.message} {caught.value.hint}"


def test_a_word_that_is_neither_is_told_what_there_is(pair: ModelPair) -> None:
    with pytest.raises(ConfigError, match="--budget_weights relativ") as caught:
        extract(pair, budget=Budget(max_bytes=9_000), budget_weights="relativ")
    assert "relative, plain" in str(caught.value.hint)
