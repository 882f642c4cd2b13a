"""The change of a model is what it computes with now less what it computed with at the baseline."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

import pytest
import torch
from tests.families import FAMILIES, generate, make_pipeline
from tests.families.loras import lora_state
from torch import Tensor

from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline

pytestmark = pytest.mark.filterwarnings("ignore:Already", "ignore:Adapter", "ignore:.*peft_config")
State = Mapping[str, Tensor]
Factors = Mapping[str, float]  # how often each file is in the change


def norm_of(files: Mapping[str, State], factors: Factors) -> float:
    """‖Σ c·up·down‖ over all layers, in float64."""
    squares = 0.0
    for key in next(iter(files.values())):
        if key.endswith(".lora_A.weight"):
            up = key.replace("lora_A", "lora_B")
            delta = sum(
                c * files[name][up].double().flatten(1) @ files[name][key].double().flatten(1)
                for name, c in factors.items()
            )
            squares += float(torch.as_tensor(delta).pow(2).sum())
    return sqrt(squares)


class Host:
    """A pipeline with two LoRA files, and its denoiser."""

    def __init__(self, family: str) -> None:
        self.pipeline = make_pipeline(family)
        self.name = FAMILIES[family].denoiser
        self.model: Any = getattr(self.pipeline, self.name)
        only = "mid_block.attentions.0.transformer_blocks.0.attn" if self.name == "unet" else "attn"
        self.files = {
            name: lora_state(self.pipeline, (self.name,), only=only, size=0.3, seed=seed)
            for seed, name in enumerate("xy")
        }

    def load(self, file: str, adapter: str, **options: Any) -> None:
        state = {
            key: tensor.clone() for key, tensor in self.files[file].items()
        }  # hot-swapping writes into them
        self.pipeline.load_lora_weights(state, adapter_name=adapter, **options)

    def set(self, **strengths: float) -> None:
        self.pipeline.set_adapters(list(strengths), list(strengths.values()))


Act = Callable[[Host], object]


@dataclass(frozen=True)
class Row:
    """What is there before the baseline, what is done after it, and how often each file is in the change."""

    name: str
    before: Act
    act: Act
    change: Factors


def load(file: str, adapter: str, **options: Any) -> Act:
    return lambda host: host.load(file, adapter, **options)


def weigh(**strengths: float) -> Act:
    return lambda host: host.set(**strengths)


def call(method: str, *arguments: Any, **options: Any) -> Act:
    return lambda host: getattr(host.pipeline, method)(*arguments, **options)


def paint(scale: float) -> Act:
    return lambda host: generate(host.pipeline, "sd15", cross_attention_kwargs={"scale": scale})


def together(*acts: Act) -> Act:
    return lambda host: [act(host) for act in acts]


X = load("x", "a")
FUSE, UNFUSE, UNLOAD, DISABLE = map(call, ("fuse_lora", "unfuse_lora", "unload_lora_weights", "disable_lora"))
BOTH = together(X, load("y", "b"), weigh(a=1.0, b=0.5))
ROWS = (
    Row("loaded", together(), X, {"x": 1.0}),
    Row("1 to 0.25", X, weigh(a=0.25), {"x": -0.75}),
    Row("0.25 to 1", together(X, weigh(a=0.25)), weigh(a=1.0), {"x": 0.75}),
    Row("the same file again, half each", X, together(load("x", "b"), weigh(a=0.5, b=0.5)), {}),
    Row("exchanged for itself", X, together(UNLOAD, load("x", "c")), {}),
    Row("exchanged for another", X, together(UNLOAD, load("y", "c")), {"x": -1.0, "y": 1.0}),
    Row("deleted", X, call("delete_adapters", "a"), {"x": -1.0}),
    Row("disabled", together(X, weigh(a=0.5)), DISABLE, {"x": -0.5}),
    Row("unloaded", X, UNLOAD, {"x": -1.0}),
    Row("enabled", together(X, DISABLE), call("enable_lora"), {"x": 1.0}),
    Row("plus and minus", together(), together(X, load("x", "b"), weigh(a=0.8, b=-0.8)), {}),
    Row("several weighted anew", BOTH, weigh(a=0.5, b=1.5), {"x": -0.5, "y": 1.0}),
    Row("one of several", BOTH, weigh(b=0.5), {"x": -1.0}),
    Row("fused", X, FUSE, {}),
    Row("fused at another scale", X, call("fuse_lora", lora_scale=0.5), {"x": -0.5}),
    Row("fused, then unloaded", X, together(FUSE, UNLOAD), {}),
    Row("fused, then deleted", X, together(FUSE, call("delete_adapters", "a")), {}),
    Row("fused before, unloaded", together(X, FUSE), UNLOAD, {}),
    Row("unfused", together(X, FUSE), UNFUSE, {}),
    Row("unfused and unloaded", together(X, FUSE), together(UNFUSE, UNLOAD), {"x": -1.0}),
    Row("fused, then disabled", together(X, FUSE), DISABLE, {"x": -1.0}),
    Row("fused, then another: PEFT unmerges", together(X, FUSE), load("y", "b"), {"x": -1.0, "y": 1.0}),
    Row("hot-swapped", X, load("y", "a", hotswap=True), {"x": -1.0, "y": 1.0}),
    Row("hot-swapped for itself", X, load("x", "a", hotswap=True), {}),
    Row("another scale for one call", X, paint(0.25), {}),
    Row("scale 0 for one call: diffusers leaves 1", together(X, weigh(a=0.5)), paint(0.0), {"x": 0.5}),
    Row("one block weighed", X, call("set_adapters", "a", {"unet": {"mid": 0.25}}), {"x": -0.75}),
    Row("at scale 0", together(X, weigh(a=0.0)), UNLOAD, {}),
)
_KINDS = ("1 to 0.25", "fused, then unloaded", "unloaded", "plus and minus", "hot-swapped")
_IN_OTHERS = [
    pytest.param(row, marks=() if row.name in _KINDS[:2] else pytest.mark.slow, id=row.name)
    for row in ROWS
    if row.name in _KINDS
]


def _check(family: str, row: Row) -> None:
    host = Host(family)
    row.before(host)
    picture = generate(host.pipeline, family)
    baselines = [capture_lora_baseline(host.model, None, keys=keys) for keys in (None, "none")]
    row.act(host)
    analyses = [
        analyze_lora_application_results(baseline, host.model, None, host.pipeline) for baseline in baselines
    ]
    difference = float((generate(host.pipeline, family) - picture).abs().max())
    norm = norm_of(host.files, row.change) if row.change else 0.0
    assert (difference > 1e-4) is (norm > 0.0)
    for analysis in analyses:
        is_effective, found = analysis["effective"], analysis["unet_weight_changes"]
        assert is_effective is (norm > 0.0)
        assert found["delta_norm"] == pytest.approx(norm, rel=1e-3, abs=0.0)
        assert (len(found["keys_value_changed"]) > 0) is (norm > 0.0)
        told = {finding["id"] for finding in analysis["findings"]}
        wrong = {"lora_not_applied", "weights_changed_unexplained"}
        assert not told & (wrong | ({"lora_without_effect"} if norm else set()))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_change_is_after_minus_before(row: Row) -> None:
    _check("sd15", row)


@pytest.mark.parametrize("family", ["sdxl", "flux", "wan"])
@pytest.mark.parametrize("row", _IN_OTHERS)
def test_change_is_the_same_in_other_families(family: str, row: Row) -> None:
    _check(family, row)


@pytest.mark.parametrize("mends", [True, False], ids=["NaN to clean", "clean to NaN"])
def test_a_copy_that_differs_in_one_nan_is_another_change(mends: bool) -> None:
    host = Host("sd15")
    spoilt = {key: tensor.clone() for key, tensor in host.files["x"].items()}
    next(tensor for key, tensor in spoilt.items() if "to_v.lora_B." in key)[0, 0] = float("nan")
    files = {"spoilt": spoilt, "clean": host.files["x"]}
    first, second = ("spoilt", "clean") if mends else ("clean", "spoilt")
    host.files = {first: files[first], second: files[second]}
    host.load(first, "a")
    assert bool(generate(host.pipeline, "sd15").isnan().any()) is mends
    baseline = capture_lora_baseline(host.model, None)
    host.pipeline.unload_lora_weights()
    host.load(second, "a")
    analysis = analyze_lora_application_results(baseline, host.model, None, host.pipeline)
    assert bool(generate(host.pipeline, "sd15").isnan().any()) is not mends
    assert analysis["effective"] is True
    found = {finding["id"] for finding in analysis["findings"]}
    assert found == (set() if mends else {"lora_not_finite"})
    (reason,) = analysis["unet_weight_changes"]["keys_value_changed"].values()
    assert reason["delta_norm"] is None
    assert "NaN" in reason["unavailable"]["delta_norm"]


def test_nan_that_unfusing_left_in_the_weights_is_told_with_the_next_lora() -> None:
    """As a service met it that fused and unfused its users' files (diffusers' issue 5313)."""
    host = Host("sd15")
    next(tensor for key, tensor in host.files["x"].items() if "to_v.lora_B." in key)[0, 0] = float("nan")
    host.load("x", "a")
    host.pipeline.fuse_lora()
    host.pipeline.unfuse_lora()
    host.pipeline.unload_lora_weights()
    baseline = capture_lora_baseline(host.model, None)
    host.load("y", "b")
    assert generate(host.pipeline, "sd15").isnan().any()
    analysis = analyze_lora_application_results(baseline, host.model, None, host.pipeline)
    (finding,) = analysis["findings"]
    assert (finding["id"], finding["severity"]) == ("weights_not_finite", "error")
    assert finding["evidence"]["keys"] == 1
    assert "to_v.weight" in finding["message"]
    (spoilt,) = (
        change
        for key, change in analysis["unet_weight_changes"]["keys_value_changed"].items()
        if key == finding["evidence"]["example"]
    )
    assert spoilt["weight_norm"] is None
    check = analysis["unet_weight_changes"]["checked"][finding["evidence"]["example"]]
    assert (check["weight_norm"], check["rounding_norm"]) == (None, None)
    assert check["unavailable"]["weight_norm"] == "it holds NaN or Inf"
    assert not analysis["success"]
