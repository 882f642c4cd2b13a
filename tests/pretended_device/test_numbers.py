"""What is computed from tensors of a device is what the CPU computes, and asks Metal for no float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.conftest import Pretend
from tests.lora.applied_patches import MakePatch, make_patch
from tests.pretend_device import Kind
from torch import Tensor, nn

from sigmascope.analysis.tensor_comparison import compare_tensors
from sigmascope.lora.adapters import LohaChange, LokrChange, TuckerChange
from sigmascope.lora.compare import ModuleSide, compare_deltas
from sigmascope.lora.decompose import decompose
from sigmascope.lora.effect import (
    Effect,
    delta_of,
    difference,
    effect_of,
    measured_effect,
    overlap,
    weight_norm,
)
from sigmascope.lora.factors import LoraFactors, difference_norm
from sigmascope.lora.file import LoraFile
from sigmascope.lora.linalg import (
    Spectrum,
    blocked_energy,
    blocked_norm,
    effective_rank,
    frobenius_norm,
    gram_in_double,
    in_dtype,
)
from sigmascope.lora.live_merge import merge_into_model
from sigmascope.lora.statistics import LayerStatistics, Moments, MomentSum, sketch_columns
from sigmascope.lora.writer import stored_factors
from sigmascope.pipeline.measure import image_of
from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.fingerprints import fingerprint
from sigmascope.probes.tensors import tensor_facts
from sigmascope.stages.weight_verdict import sampled_effect, with_unmerged_norm

__all__ = ["make_patch"]  # a fixture

Put = Callable[[Tensor], Tensor]
"""Gives a tensor's copy on the device."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def factors(put: Put, alpha: float = 2.0, seed: int = 0) -> LoraFactors:
    return LoraFactors(put(random(24, 4, seed=seed)), put(random(4, 40, seed=seed + 1)), alpha, (24, 40))


def metric_of_layer(put: Put, width: int) -> list[Tensor]:
    """A layer's change, weighed and back, by statistics that were summed up on the device."""
    place = put(torch.zeros(1)).device

    def moments(size: int, seed: int) -> Moments:
        summed = MomentSum(size, place, put(sketch_columns(size, 8, 0)) if size > 32 else None)
        summed.add(put(random(96, size, seed=seed)))
        assert summed.trace > 0
        return summed.result(96)

    metric = LayerStatistics(moments(width, 1), moments(24, 2), rows=96).metric(device=place)
    change = put(random(24, width))
    weighed = metric.weigh(change)
    back = metric.unweigh_up(metric.unweigh_down(weighed))
    assert weighed.device == back.device == place
    return [weighed, back]


def merged_in_float64(put: Put) -> list[Tensor]:
    layer = nn.Linear(40, 24)
    with torch.no_grad():
        layer.weight.copy_(random(24, 40, seed=5))
    layer = layer.to(put(torch.zeros(1)).device)
    before = layer.weight.detach().clone()
    lora = LoraFile({"layer": factors(lambda tensor: tensor)})
    model = nn.ModuleDict({"layer": layer})
    merged = merge_into_model(model, lora, compute_dtype=torch.float64)
    after = layer.weight.detach().clone()
    merged.unmerge()
    assert torch.equal(layer.weight, before)
    return [after]


COMPUTED: dict[str, Callable[[Put], object]] = {
    "frobenius norm": lambda put: frobenius_norm(put(random(700, 9))),
    "blocked norm": lambda put: blocked_norm(put(random(700, 9))),
    "blocked energy": lambda put: float(blocked_energy(put(random(1000)))),
    "blocked energy of small numbers": lambda put: float(blocked_energy(put(random(1000) * 1e-25))),
    "float64": lambda put: in_dtype(put(random(3)), torch.float64),
    "Gram matrix": lambda put: gram_in_double(put(random(30, 5))),
    "effective rank": lambda put: effective_rank(put(random(5).abs())),
    "spectrum": lambda put: (
        Spectrum(put(random(6).abs().sort(descending=True).values), 10.0, (24, 40)).values
    ),
    "sum of moments, whole": lambda put: metric_of_layer(put, 32),
    "sum of moments, sketched": lambda put: metric_of_layer(put, 40),
    "norm of factors": lambda put: factors(put).frobenius_norm(),
    "product of factors": lambda put: factors(put).inner(factors(put, seed=3)),
    "singular values": lambda put: factors(put).singular_values(),
    "distance of factors": lambda put: difference_norm(factors(put), factors(put, seed=3)),
    "factors in float64": lambda put: factors(put).to(device="cpu", dtype=torch.float64).delta(torch.float64),
    "stored factors": lambda put: [
        stored_factors(factors(put, alpha), dtype).up
        for alpha in (2.5, 4.0)
        for dtype in (None, torch.float16)
    ],
    "compared changes": lambda put: (
        compare_deltas("layer", side(), side(), put(random(24, 40)), put(random(24, 40, seed=1))).inner
    ),
    "LoHa": lambda put: LohaChange(
        {name: put(part) for name, part in loha("hada_").items()}, 1.0
    ).frobenius_norm(),
    "LoKr": lambda put: LokrChange(
        {"lokr_w1": put(random(4, 5)), "lokr_w2": put(random(6, 8))}, 1.0
    ).frobenius_norm(),
    "Tucker": lambda put: TuckerChange(
        {
            "lora_up.weight": put(random(24, 4)),
            "lora_mid.weight": put(random(4, 4, 3, 3)),
            "lora_down.weight": put(random(4, 10)),
        },
        1.0,
    ).frobenius_norm(),
    "distance of weights": lambda put: difference(put(random(24, 40)), put(random(24, 40, seed=1))),
    "distance from the CPU": lambda put: difference(random(24, 40), put(random(24, 40, seed=1))),
    "norm of a weight": lambda put: weight_norm(put(random(24, 40))),
    "measured effect": lambda put: numbers(measured_effect(put(random(9, 8)), put(random(9, 8, seed=1)))),
    "sampled effect": lambda put: numbers(sampled_effect((put(random(50)), put(random(50, seed=1))), 200)),
    "picture": lambda put: image_of({"images": put(random(1, 3, 8, 8))}),
    "bytes of a picture": lambda put: image_of({"images": put(random(1, 3, 8, 8).to(torch.uint8))}),
    "merged weight": merged_in_float64,
    "compared tensors": lambda put: relative_error(put(random(3, 40)), random(3, 40, seed=1)),
    "fingerprint": lambda put: digest(put(random(50, 40))),
    "facts": lambda put: facts(put(random(50, 40))),
}


def side() -> ModuleSide:
    return ModuleSide("layer", "loha", None, None, None, (24, 40), 1.0)


def relative_error(a: Tensor, b: Tensor) -> float | None:
    errors = compare_tensors(a, b).errors
    assert errors is not None
    return errors.relative_l2


def loha(prefix: str = "") -> dict[str, Tensor]:
    shapes = {"w1_a": (24, 3), "w1_b": (3, 40), "w2_a": (24, 3), "w2_b": (3, 40)}
    return {prefix + name: random(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}


def digest(tensor: Tensor) -> float:
    taken = fingerprint(tensor).value
    assert taken is not None
    return float(taken.digest % 2**53)


def facts(tensor: Tensor) -> list[float | None]:
    seen = tensor_facts(tensor, statistics=True)
    return [seen.mean, seen.std, seen.min, seen.max]


def numbers(effect: Effect | None) -> list[float | None]:
    assert effect is not None
    return [effect.delta_norm, effect.relative_change, effect.weight_norm]


def as_numbers(made: object) -> list[float]:
    """Everything in a result as one list."""
    if isinstance(made, Tensor):
        return [float(value) for value in made.detach().cpu().double().flatten().tolist()]
    if isinstance(made, list):
        return [number for part in made for number in as_numbers(part)]
    assert isinstance(made, int | float), made
    return [float(made)]


def assert_as_on_the_cpu(pretend: Pretend, kind: Kind, compute: Callable[[Put], object]) -> None:
    """Within float32's rounding: a device's sums are not cut where the CPU's are."""
    expected = as_numbers(compute(lambda tensor: tensor))
    with pretend(kind) as device:
        made = as_numbers(compute(lambda tensor: tensor.to(device.device)))
    assert made == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("kind", ["cuda", "mps"])
@pytest.mark.parametrize("name", COMPUTED)
def test_the_result_is_the_cpus(pretend: Pretend, kind: Kind, name: str) -> None:
    assert_as_on_the_cpu(pretend, kind, COMPUTED[name])


def test_a_decomposition_is_the_cpus(pretend: Pretend) -> None:
    """Extraction takes no `--device mps`, so there is none on Metal."""
    assert_as_on_the_cpu(
        pretend, "cuda", lambda put: decompose(put(random(24, 40)), 4, torch.float32).factors.delta()
    )


PATCHES: dict[str, dict[str, Any]] = {
    "lora": {"up": random(24, 4), "down": random(4, 40, seed=1), "alpha": 2.0},
    "dora": {"up": random(24, 4), "down": random(4, 40, seed=1), "dora_scale": random(24, 1, seed=2).abs()},
    "loha": loha(),
    "lokr": {"w1": random(4, 5), "w2": random(6, 8, seed=1)},
    "glora": {
        "a1": random(40, 4),
        "a2": random(4, 40, seed=1),
        "b1": random(24, 4, seed=2),
        "b2": random(4, 40, seed=3),
    },
    "oft": {"blocks": random(4, 6, 6), "alpha": 0.0},
    "boft": {"blocks": random(2, 4, 6, 6), "alpha": 0.0},
    "diff": {"diff": random(24, 40)},
    "set": {"set": random(24, 40)},
}


@pytest.mark.parametrize("weight_there", [True, False], ids=["weight there", "weight on the CPU"])
@pytest.mark.parametrize("kind", ["cuda", "mps"])
@pytest.mark.parametrize("adapter", PATCHES)
def test_the_effect_of_a_change_is_the_cpus(
    pretend: Pretend, make_patch: MakePatch, kind: Kind, adapter: str, weight_there: bool
) -> None:
    def compute(put: Put) -> object:
        given = {
            name: put(part) if isinstance(part, Tensor) else part for name, part in PATCHES[adapter].items()
        }
        patch = make_patch(adapter, strength=0.5, weight_shape=(24, 40), **given)
        weight = (put if weight_there else lambda tensor: tensor)(random(24, 40, seed=9))
        effect = effect_of([patch], weight)
        assert effect.delta_norm is not None, effect.unavailable
        return [numbers(effect), delta_of([patch], weight)]

    assert_as_on_the_cpu(pretend, kind, compute)


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_the_norm_of_an_unmerged_weight_is_the_cpus(
    pretend: Pretend, make_patch: MakePatch, kind: Kind
) -> None:
    """On Metal this was "the weight without the changes is gone"."""

    def compute(put: Put) -> object:
        up, down = random(24, 4), random(4, 40, seed=1)
        patch = make_patch("lora", up=put(up), down=put(down), strength=1.0, strength_model=1.0)
        merged = put(random(24, 40, seed=9) + up @ down)
        effect = with_unmerged_norm(effect_of([patch], None), merged, [patch])
        assert effect.weight_norm == pytest.approx(float(random(24, 40, seed=9).norm()), rel=1e-5)
        return numbers(effect)

    assert_as_on_the_cpu(pretend, kind, compute)


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_the_overlap_of_changes_is_the_cpus(pretend: Pretend, make_patch: MakePatch, kind: Kind) -> None:
    def compute(put: Put) -> object:
        one, other = (
            [
                make_patch(
                    "lora", up=put(random(24, 4, seed=s)), down=put(random(4, 40, seed=s + 1)), strength=1.0
                )
            ]
            for s in (0, 5)
        )
        return overlap(one, other).cosine

    assert_as_on_the_cpu(pretend, kind, compute)


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_what_a_host_keeps_on_two_devices_is_brought_together(
    pretend: Pretend, make_patch: MakePatch, kind: Kind
) -> None:
    """ComfyUI keeps a LoRA on the CPU or on the device, and may have moved the weight, or a part, since."""

    def compute(put: Put) -> object:
        def lora(up_there: bool, down_there: bool, seed: int) -> AppliedPatch:
            up, down = random(24, 4, seed=seed), random(4, 40, seed=seed + 1)
            return make_patch(
                "lora", up=put(up) if up_there else up, down=put(down) if down_there else down, strength=1.0
            )

        here, there, parted = lora(False, False, 0), lora(True, True, 5), lora(False, True, 9)
        weight = random(24, 40, seed=20)
        merged = with_unmerged_norm(effect_of([here, there], None), put(weight), [here, there])
        return [
            numbers(effect_of([here, there, parted], put(weight))),
            numbers(effect_of([there, parted], weight)),
            numbers(merged),
            delta_of([here, there], put(weight)),
            as_numbers(overlap([here, parted], [there]).cosine),
            difference(put(weight), random(24, 40, seed=21)),
            numbers(sampled_effect((put(random(50)), random(50, seed=1)), 100)),
        ]

    assert_as_on_the_cpu(pretend, kind, compute)
