from typing import Any

import pytest
import torch
from tests.comfy_shapes import adapters
from tests.comfy_shapes.adapters import lora_adapter, lora_parts, lora_tuple, random

from sigmascope.probes.comfyui_weight_adapter import read_value

FOUR = tuple(random(*shape) for shape in ((8, 2), (2, 8), (6, 2), (2, 8)))
LOHA = adapters.loha_parts()
LOKR = (random(2, 2), None, 3.0, None, None, random(4, 3), random(3, 4), None, None)
GLORA = (*FOUR, 1.0, None)
BLOCKS = (random(2, 4, 4), None, 0.5, None)
STAGES = (random(3, 2, 4, 4), None, 0.5, None)


@pytest.mark.parametrize(
    ("value", "adapter_type"),
    [
        (lora_adapter(), "lora"),
        (lora_tuple(), "lora"),
        (lora_tuple(parts=6), "lora"),
        (lora_parts()[:4], "lora"),
        (adapters.LoHaAdapter(set(), LOHA), "loha"),
        (("loha", LOHA), "loha"),
        (LOHA[:7], "loha"),
        (adapters.LoKrAdapter(set(), LOKR), "lokr"),
        (("lokr", LOKR), "lokr"),
        (LOKR[:8], "lokr"),
        (adapters.GLoRAAdapter(set(), GLORA), "glora"),
        (("glora", GLORA), "glora"),
        (adapters.OFTAdapter(set(), BLOCKS), "oft"),
        (adapters.BOFTAdapter(set(), STAGES), "boft"),
        (("diff", (FOUR[0],)), "diff"),
        ((FOUR[0],), "diff"),
        (("set", (FOUR[0],)), "set"),
    ],
)
def test_every_form_that_a_version_keeps_is_recognised(value: object, adapter_type: str) -> None:
    assert read_value(value).adapter_type == adapter_type


def test_a_lora_with_magnitudes_is_a_dora() -> None:
    assert read_value(("lora", (*lora_parts()[:4], random(8, 1)))).adapter_type == "dora"


def test_a_loha_with_magnitudes_stays_a_loha() -> None:
    assert read_value(("loha", (*LOHA[:7], random(8, 1)))).adapter_type == "loha"


def test_tensors_are_the_hosts_own() -> None:
    value = lora_adapter()
    assert read_value(value).tensors["up"] is value.weights[0]


def test_parts_that_are_not_there_are_left_out() -> None:
    assert read_value(lora_adapter()).tensors.keys() == {"up", "down"}


def test_a_lora_is_scaled_by_alpha_over_rank() -> None:
    change = read_value(lora_adapter(8, 4, 8, alpha=2.0))
    assert (change.rank, change.alpha, change.scale) == (4, 2.0, 0.5)


def test_without_alpha_the_scale_is_one() -> None:
    assert read_value(lora_adapter(alpha=None)).scale == 1.0


def test_an_alpha_that_is_a_tensor_is_a_number() -> None:
    assert read_value(("lora", (*FOUR[:2], torch.tensor(1.0), None, None))).scale == 0.5


def test_an_alpha_of_another_kind_is_unavailable() -> None:
    change = read_value(("lora", (*FOUR[:2], "one", None, None)))
    assert change.unavailable == {"alpha": "is str, not a number"}


@pytest.mark.parametrize(
    ("parts", "rank", "scale"),
    [
        (LOKR, 3, 1.0),
        ((None, random(4, 4), 3.0, random(2, 2), random(2, 2), None, None, None, None), 2, 1.5),
        ((random(2, 2), random(4, 4), 3.0, None, None, None, None, None, None), None, 1.0),
    ],
    ids=["low-rank second", "low-rank first", "two whole factors"],
)
def test_a_lokr_is_scaled_by_the_rank_of_its_low_rank_factor(
    parts: Any, rank: int | None, scale: float
) -> None:
    change = read_value(adapters.LoKrAdapter(set(), parts))
    assert (change.rank, change.scale) == (rank, scale)


def test_a_newer_glora_has_its_rank_in_the_columns_of_a1() -> None:
    assert read_value(("glora", GLORA)).rank == 2


def test_an_older_glora_has_its_rank_in_the_rows_of_a1() -> None:
    factors = (random(2, 8), random(8, 2), random(2, 8), random(6, 2))
    assert read_value(("glora", (*factors, 1.0, None))).rank == 2


def test_alpha_bounds_a_rotation_and_scales_nothing() -> None:
    change = read_value(adapters.OFTAdapter(set(), BLOCKS))
    assert (change.alpha, change.scale, change.rank) == (0.5, 1.0, None)


def test_a_lora_may_enlarge_the_weight() -> None:
    assert read_value(("lora", (*lora_parts()[:5], [10, 8]))).reshape == (10, 8)


@pytest.mark.parametrize("value", [("fooocus", ()), object(), 3.0, ()])
def test_what_is_not_known_is_unknown_with_the_reason(value: object) -> None:
    change = read_value(value)
    assert change.adapter_type == "unknown"
    assert "is not a known kind of change" in change.unavailable["adapter_type"]


def test_a_tuple_with_an_unknown_name_is_called_by_it() -> None:
    assert read_value(("fooocus", ())).unavailable["adapter_type"].startswith("fooocus")
