"""What a plan says of a size is what an extraction of that size gives, and what LAPACK says of its error."""

import json
import math
import shutil
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image, ImageColor
from tests.conftest import LAYER_SHAPES, MakePair, ModelPair

from sigmascope.errors import ConfigError, ModelMismatchError
from sigmascope.lbm.pocket import BASE_PATH, TUNED_PATH
from sigmascope.lora.budget import Budget
from sigmascope.lora.extract import ExtractOptions, extract_lora
from sigmascope.lora.ranks import FixedRank, RankRules
from sigmascope.lora.size_plan import knee_of, plan_lora, save_plan_picture


@pytest.fixture
def pair(make_model_pair: MakePair) -> ModelPair:
    return make_model_pair()


def test_a_fixed_rank_has_the_error_that_lapack_finds(pair: ModelPair) -> None:
    plan = plan_lora(pair.base, pair.tuned, ExtractOptions(save_precision="float"), most_rank=4)
    assert [one.rank for one in plan.fixed] == [1, 2, 4]
    assert plan.changed == len(LAYER_SHAPES)
    for one in plan.fixed:
        assert one.rank is not None
        lost = change = relative_lost = relative_change = 0.0
        for layer in pair.layers:
            squares = torch.linalg.svdvals(pair.delta(layer)).square()
            weight = 1 / float(pair.base_state[f"{layer}.weight"].double().square().sum())
            left, whole = float(squares[one.rank :].sum()), float(squares.sum())
            lost, change = lost + left, change + whole
            relative_lost, relative_change = relative_lost + weight * left, relative_change + weight * whole
        assert one.error == pytest.approx(math.sqrt(lost / change), rel=1e-3)
        assert one.weighted_error == pytest.approx(math.sqrt(relative_lost / relative_change), rel=1e-3)


def test_an_extraction_of_that_rank_gives_what_was_planned(pair: ModelPair) -> None:
    plan = plan_lora(pair.base, pair.tuned, most_rank=4)
    for one in plan.fixed:
        assert one.rank is not None
        options = ExtractOptions(rank=one.rank, conv_rank=one.rank)
        made = extract_lora(pair.base, pair.tuned, pair.base.with_name("lora.safetensors"), options)
        assert made.relative_error == pytest.approx(one.error, rel=1e-3)
        assert one.bytes == made.file_bytes


def test_an_extraction_of_that_size_gives_what_was_planned(pair: ModelPair) -> None:
    plan = plan_lora(pair.base, pair.tuned, most_rank=16)  # to the full rank of each layer
    for fixed, one in zip(plan.fixed[:3], plan.budget, strict=False):
        options = ExtractOptions(budget=Budget(max_bytes=fixed.bytes))
        made = extract_lora(pair.base, pair.tuned, pair.base.with_name("made.safetensors"), options)
        assert made.file_bytes <= one.bytes <= fixed.bytes
        ranks = {module.name: module.rank for module in made.modules}
        assert (
            sum(abs(ranks.get(layer, 0) - rank) for layer, rank in one.ranks.items()) <= 2
        )  # for some bytes
        assert made.relative_error == pytest.approx(one.error, rel=0.02)
        assert made.weighted_error == pytest.approx(one.weighted_error, rel=0.02)


@pytest.mark.slow
def test_the_best_ranks_are_never_worse_than_one_rank_of_the_same_bytes() -> None:
    half = ExtractOptions(rules=RankRules(FixedRank(4, 4), (), ("up_blocks",)))
    plan = plan_lora(BASE_PATH, TUNED_PATH, half, most_rank=4)
    for fixed, best in zip(plan.fixed, plan.budget, strict=True):
        assert best.bytes <= fixed.bytes
        assert best.weighted_error < fixed.weighted_error
        enough = plan.bytes_for(fixed.weighted_error)
        assert enough is not None
        assert enough < fixed.bytes
    assert plan.bytes_for(0.0) is None
    competing = plan_lora(
        BASE_PATH, TUNED_PATH, replace(half, budget=Budget(max_bytes=1), budget_weights="plain"), most_rank=4
    )
    errors = [one.error for one in competing.curve]
    assert errors == sorted(errors, reverse=True)
    for smaller, larger in pairwise(plan.curve):  # a higher least rank leaves less to compete for
        has_higher_floor = min(larger.ranks.values()) > min(smaller.ranks.values())
        assert has_higher_floor or larger.weighted_error <= smaller.weighted_error


def test_layers_are_named_by_their_share_of_the_whole_change(pair: ModelPair) -> None:
    plan = plan_lora(pair.base, pair.tuned, most_rank=2)
    parts = {
        layer: float(pair.delta(layer).square().sum() / pair.base_state[f"{layer}.weight"].square().sum())
        for layer in pair.layers
    }
    expected = sorted(parts, key=lambda layer: -parts[layer])
    assert [one.name for one in plan.layers] == expected
    assert plan.layers[0].share == pytest.approx(parts[expected[0]] / sum(parts.values()), rel=1e-3)


@pytest.mark.parametrize("end", [100, 10_000])
def test_the_knee_of_a_hyperbola_is_where_its_slope_is_that_of_the_chord(end: int) -> None:
    sizes = list(range(1, end + 1))
    assert sizes[knee_of(sizes, [1 / size for size in sizes])] == math.isqrt(end)  # by calculus: √(1 · end)


def test_a_curve_without_a_bend_has_its_knee_at_an_end() -> None:
    assert knee_of([5], [0.2]) == 0
    assert knee_of([5, 6, 7], [0.2, 0.2, 0.2]) == 2


def test_layers_that_are_left_out_are_not_planned_for(pair: ModelPair) -> None:
    rules = RankRules(FixedRank(4, 4), (), ("conv_in",))
    plan = plan_lora(pair.base, pair.tuned, ExtractOptions(rules=rules), most_rank=2)
    assert plan.changed == len(LAYER_SHAPES) - 1
    plan = plan_lora(pair.base, pair.tuned, ExtractOptions(target_coverage="attention"), most_rank=2)
    assert plan.changed == 2


def test_a_model_and_itself_leave_nothing_to_plan(pair: ModelPair) -> None:
    same = shutil.copy(pair.base, pair.base.with_name("same.safetensors"))
    with pytest.raises(ModelMismatchError, match="nothing to plan"):
        plan_lora(pair.base, same)
    with pytest.raises(ConfigError, match="--max_rank 0 is not a rank"):
        plan_lora(pair.base, pair.tuned, most_rank=0)


@pytest.mark.slow
def test_the_picture_and_the_json_hold_what_was_planned(pair: ModelPair) -> None:
    plan = plan_lora(pair.base, pair.tuned, most_rank=4)
    target = pair.base.with_name("plan.svg")
    save_plan_picture(target, plan)
    drawn = ElementTree.fromstring(target.read_text(encoding="utf-8"))
    texts = [element.text or "" for element in drawn.iter() if element.tag.endswith("text")]
    assert {"rank 1", "rank 2", "rank 4"} <= set(texts)
    dots = [element for element in drawn.iter() if element.tag.endswith("circle")]
    assert len(dots) == len(plan.fixed) + len(plan.curve) + 1
    raster = pair.base.with_name("plan.PNG")
    save_plan_picture(raster, plan)
    with Image.open(raster) as image:
        assert (image.format, image.size) == ("PNG", (1920, 920))
        blue, grey = ImageColor.getrgb("#1565c0"), ImageColor.getrgb("#9e9e9e")
        colours = {colour for _, colour in image.getcolors(1 << 20) or ()}
    assert {blue, grey} <= colours
    told = json.loads(json.dumps(plan.as_dict()))
    assert told["fixed"][1]["bytes"] == plan.fixed[1].bytes
    assert told["knee"]["layers"] == sum(rank > 0 for rank in plan.knee.ranks.values())
