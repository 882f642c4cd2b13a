"""LoHa, LoKr and DoRA against PEFT's own layers; Tucker cores against PyTorch's convolutions."""

from math import nan
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from sigmascope.errors import LoraFormatError, ModelMismatchError, NonFiniteError
from sigmascope.lora import adapters
from sigmascope.lora.adapters import (
    Adapter,
    DiffChange,
    DoraChange,
    LohaChange,
    LokrChange,
    SetChange,
    TuckerChange,
    WeightChange,
    form_delta,
    scale_of,
)
from sigmascope.lora.factors import LoraFactors
from sigmascope.records import MemorySnapshot

LAYERS = ["linear", "conv", "pointwise"]
peft = pytest.importorskip("peft")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 20)
        self.conv = nn.Conv2d(6, 8, 3)
        self.pointwise = nn.Conv2d(6, 8, 1)


def adapted(config: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """PEFT's tensors by short key, and its layers by name."""
    torch.manual_seed(0)
    model = peft.get_peft_model(Model(), config)
    state = peft.get_peft_model_state_dict(model)
    layers = {name: getattr(model.base_model.model, name) for name in LAYERS}
    return {key.removeprefix("base_model.model."): value for key, value in state.items()}, layers


def parts_of(state: dict[str, Tensor], layer: str) -> dict[str, Tensor]:
    return {
        key.removeprefix(f"{layer}."): value for key, value in state.items() if key.startswith(f"{layer}.")
    }


@pytest.mark.parametrize("tucker", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
def test_loha_is_what_peft_makes_of_it(layer: str, tucker: bool) -> None:
    state, layers = adapted(
        peft.LoHaConfig(r=3, alpha=2, target_modules=LAYERS, init_weights=False, use_effective_conv2d=tucker)
    )
    change = LohaChange(parts_of(state, layer), scale_of(2.0, 3))
    weight = layers[layer].get_base_layer().weight
    torch.testing.assert_close(change.delta(weight), layers[layer].get_delta_weight("default").detach())
    assert change.rank == 3


LOKR = {
    "both whole": {"r": 9},
    "w2 decomposed": {"r": 1},
    "both decomposed": {"r": 1, "decompose_both": True},
    "Tucker core": {"r": 1, "use_effective_conv2d": True},
    "another factor": {"r": 1, "decompose_factor": 2},
}


@pytest.mark.parametrize("form", LOKR)
@pytest.mark.parametrize("layer", LAYERS)
def test_lokr_is_what_peft_makes_of_it(layer: str, form: str) -> None:
    options = LOKR[form]
    state, layers = adapted(peft.LoKrConfig(alpha=3, target_modules=LAYERS, init_weights=False, **options))
    change = LokrChange(parts_of(state, layer), 3 / options["r"])
    expected = layers[layer].get_delta_weight("default").detach()
    torch.testing.assert_close(change.delta(layers[layer].get_base_layer().weight), expected)
    assert change.frobenius_norm() == pytest.approx(float(expected.double().norm()), rel=1e-6)


def test_the_rank_of_lokr_is_that_of_the_decomposed_side() -> None:
    whole = {"lokr_w1": torch.ones(2, 2), "lokr_w2": torch.ones(3, 3)}
    second = {"lokr_w1": torch.ones(2, 2), "lokr_w2_a": torch.ones(3, 1), "lokr_w2_b": torch.ones(1, 3)}
    first = {"lokr_w2": torch.ones(3, 3), "lokr_w1_a": torch.ones(4, 2), "lokr_w1_b": torch.ones(2, 4)}
    assert [LokrChange(parts).rank for parts in (whole, second, first)] == [None, 1, 2]


@pytest.mark.parametrize("layer", ["linear", "conv"])
def test_dora_is_what_peft_computes_with_it(layer: str) -> None:
    state, layers = adapted(
        peft.LoraConfig(r=2, lora_alpha=3, target_modules=LAYERS, use_dora=True, init_lora_weights=False)
    )
    parts = parts_of(state, layer)
    magnitude = parts["lora_magnitude_vector"] * torch.linspace(
        0.5, 2.0, layers[layer].weight.shape[0]
    ).view_as(parts["lora_magnitude_vector"])
    layers[layer].lora_magnitude_vector["default"].weight.data = magnitude
    base = layers[layer].get_base_layer()
    up, down = parts["lora_B.weight"].flatten(1), parts["lora_A.weight"].flatten(1)
    change = DoraChange(LoraFactors(up, down, 3.0, tuple(base.weight.shape)), magnitude)
    x = torch.randn(2, 12) if layer == "linear" else torch.randn(2, 6, 5, 5)
    expected = layers[layer].eval()(x)
    base.weight.data += change.delta(base.weight)
    torch.testing.assert_close(base(x), expected, rtol=1e-4, atol=1e-5)


def test_magnitudes_per_input_give_every_input_that_norm() -> None:
    weight, magnitude = torch.randn(4, 6, 3, 3), torch.rand(1, 6, 1, 1) + 0.5
    direction = LoraFactors(torch.randn(4, 2), torch.randn(2, 54), 1.0, (4, 6, 3, 3))
    change = DoraChange(direction, magnitude, per_output=False)
    norms = (weight + change.delta(weight)).transpose(0, 1).flatten(1).norm(dim=1)
    torch.testing.assert_close(norms, magnitude.flatten())


def test_a_dora_of_lokr_has_the_magnitudes_it_says() -> None:
    direction = LokrChange({"lokr_w1": torch.randn(2, 3), "lokr_w2": torch.randn(4, 2, 3, 3)})
    magnitude = torch.rand(8, 1, 1, 1) + 0.5
    weight = torch.randn(8, 6, 3, 3)
    changed = weight + DoraChange(direction, magnitude).delta(weight)
    torch.testing.assert_close(changed.flatten(1).norm(dim=1), magnitude.flatten())


def test_dora_keeps_a_row_of_zeros() -> None:
    direction = LoraFactors(torch.zeros(2, 1), torch.ones(1, 3), 1.0, (2, 3))
    change = DoraChange(direction, torch.ones(2))
    assert torch.equal(change.delta(torch.zeros(2, 3)), torch.zeros(2, 3))


def tucker_parts(kernel: tuple[int, ...] = (3, 3)) -> dict[str, Tensor]:
    ones = (1,) * len(kernel)
    return {
        "lora_up.weight": torch.randn(5, 2, *ones),
        "lora_down.weight": torch.randn(2, 4, *ones),
        "lora_mid.weight": torch.randn(2, 2, *kernel),
    }


def test_a_tucker_core_acts_as_three_convolutions() -> None:
    parts, x = tucker_parts(), torch.randn(1, 4, 7, 7)
    hidden = functional.conv2d(functional.conv2d(x, parts["lora_down.weight"]), parts["lora_mid.weight"])
    expected = 0.5 * functional.conv2d(hidden, parts["lora_up.weight"])
    change = TuckerChange(parts, 0.5)
    torch.testing.assert_close(functional.conv2d(x, change.delta()), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(change.factors().delta(), change.delta())


def test_a_tucker_core_may_be_for_video() -> None:
    change = TuckerChange(tucker_parts((3, 1, 1)))
    assert change.weight_shape == (5, 4, 3, 1, 1)
    torch.testing.assert_close(change.factors().delta(), change.delta())


def test_a_difference_is_the_change_itself() -> None:
    values = torch.randn(6).bfloat16()
    change = DiffChange({"diff_b": values})
    assert torch.equal(change.delta(), values.float())
    assert change.frobenius_norm() == pytest.approx(float(values.double().norm()))


def test_a_set_weight_takes_the_place_of_the_base() -> None:
    values, base = torch.randn(3, 4), torch.randn(3, 4)
    assert torch.equal(base + SetChange({"set_weight": values}).delta(base), base + (values - base))


@pytest.mark.parametrize(
    "change",
    [
        SetChange({"set_weight": torch.ones(2, 3)}),
        DoraChange(LoraFactors(torch.ones(2, 1), torch.ones(1, 3), 1.0, (2, 3)), torch.ones(2)),
    ],
)
def test_a_change_that_depends_on_the_base_asks_for_it(change: WeightChange) -> None:
    with pytest.raises(LoraFormatError, match=r"depends on the weight.*Give the base"):
        change.delta()


def test_every_kind_is_a_weight_change() -> None:
    loha = {f"hada_w{side}_{end}": torch.ones(2, 2) for side in (1, 2) for end in "ab"}
    changes: list[Any] = [
        LohaChange(loha),
        LokrChange({"lokr_w1": torch.ones(1, 2), "lokr_w2": torch.ones(3, 3)}),
        TuckerChange(tucker_parts()),
        DiffChange({"diff": torch.ones(2)}),
        SetChange({"set_weight": torch.ones(2)}),
        DoraChange(LohaChange(loha), torch.ones(2)),
    ]
    assert all(isinstance(change, WeightChange) for change in changes)
    assert [change.parameters for change in changes] == [16, 11, 10 + 8 + 36, 2, 2, 18]


def test_a_change_without_its_kernels_axes_takes_the_layers_shape() -> None:
    change = DiffChange({"diff": torch.arange(24.0).reshape(2, 12)})
    assert change.delta(torch.zeros(2, 3, 2, 2)).shape == (2, 3, 2, 2)
    assert torch.equal(change.delta(torch.zeros(2, 3, 2, 2)).flatten(1), change.delta())


def test_a_change_of_another_weight_is_refused() -> None:
    with pytest.raises(ModelMismatchError, match=r"\(2, 12\) does not fit a weight \(3, 8\)"):
        DiffChange({"diff": torch.ones(2, 12)}).delta(torch.zeros(3, 8))


def test_a_scale_that_is_no_number_is_refused() -> None:
    with pytest.raises(NonFiniteError, match="nan"):
        DiffChange({"diff": torch.ones(2)}, nan)


BROKEN: dict[str, tuple[type[Adapter], dict[str, tuple[int, ...]], str]] = {
    "a part missing": (LohaChange, {"hada_w1_a": (2, 2), "hada_w1_b": (2, 2)}, "no hada_w2_a"),
    "two ranks": (
        LohaChange,
        {"hada_w1_a": (4, 2), "hada_w1_b": (3, 5), "hada_w2_a": (4, 2), "hada_w2_b": (2, 5)},
        "do not fit",
    ),
    "two shapes": (
        LohaChange,
        {"hada_w1_a": (4, 2), "hada_w1_b": (2, 5), "hada_w2_a": (4, 2), "hada_w2_b": (2, 6)},
        "do not fit",
    ),
    "a core of another rank": (
        LokrChange,
        {"lokr_w1": (2, 2), "lokr_w2_a": (2, 4), "lokr_w2_b": (2, 4), "lokr_t2": (3, 3, 3, 3)},
        "do not fit",
    ),
    "an empty factor": (LokrChange, {"lokr_w1": (2, 0), "lokr_w2": (2, 2)}, "do not fit"),
    "a vector": (LokrChange, {"lokr_w1": (4,), "lokr_w2": (2, 2)}, "do not fit"),
    "a core without kernel": (
        TuckerChange,
        {"lora_up.weight": (4, 2), "lora_down.weight": (2, 5), "lora_mid.weight": (2, 2)},
        "do not fit",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_parts_that_do_not_fit_together_are_refused(case: str) -> None:
    kind, shapes, said = BROKEN[case]
    with pytest.raises(LoraFormatError, match=said):
        kind({name: torch.zeros(shape) for name, shape in shapes.items()})


def test_magnitudes_of_another_number_are_refused() -> None:
    with pytest.raises(LoraFormatError, match=r"3 magnitudes for a weight \(2, 3\), expected 2"):
        DoraChange(LoraFactors(torch.ones(2, 1), torch.ones(1, 3), 1.0, (2, 3)), torch.ones(3))


@pytest.mark.parametrize("stabilised", [False, True])
def test_the_scale_is_alpha_by_rank(stabilised: bool) -> None:
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["linear"], use_rslora=stabilised)
    layer = peft.get_peft_model(Model(), config).base_model.model.linear
    assert scale_of(6.0, 4, rank_stabilised=stabilised) == pytest.approx(layer.scaling["default"])
    assert scale_of(None, 4, rank_stabilised=stabilised) == 1.0


@settings(deadline=None, max_examples=25)
@given(
    out=st.integers(1, 5),
    inner=st.integers(1, 5),
    rank=st.integers(1, 4),
    kernel=st.sampled_from([(), (1, 1), (3, 3), (2,)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 100),
)
def test_loha_of_any_shape_is_the_product_of_its_sides(
    out: int, inner: int, rank: int, kernel: tuple[int, ...], dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    flat = inner * torch.Size(kernel).numel()
    sizes = {"hada_w1_a": (out, rank), "hada_w1_b": (rank, flat)} | {
        "hada_w2_a": (out, rank),
        "hada_w2_b": (rank, flat),
    }
    parts = {name: torch.randn(size, generator=generator).to(dtype) for name, size in sizes.items()}
    wide = {name: part.double() for name, part in parts.items()}
    expected = (wide["hada_w1_a"] @ wide["hada_w1_b"]) * (wide["hada_w2_a"] @ wide["hada_w2_b"]) * 0.25
    change = LohaChange(parts, 0.25).shaped((out, inner, *kernel))
    torch.testing.assert_close(change.delta(dtype=torch.float64), expected.reshape(out, inner, *kernel))


def randn(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


def loha_core_parts(prefix: str, rows: int, columns: int) -> dict[str, Tensor]:
    return {
        f"hada_t{prefix}": randn(rows, columns, 3, 2),
        f"hada_w{prefix}_a": randn(rows, 30),
        f"hada_w{prefix}_b": randn(columns, 50),
    }


NORMED: dict[str, Adapter] = {
    "loha of few ranks": LohaChange(
        {
            "hada_w1_a": randn(90, 2),
            "hada_w1_b": randn(2, 70),
            "hada_w2_a": randn(90, 2),
            "hada_w2_b": randn(2, 70),
        },
        0.5,
    ),
    "loha of many ranks": LohaChange(
        {
            "hada_w1_a": randn(9, 6),
            "hada_w1_b": randn(6, 7),
            "hada_w2_a": randn(9, 5),
            "hada_w2_b": randn(5, 7),
        }
    ),
    "loha with cores": LohaChange(loha_core_parts("1", 2, 2) | loha_core_parts("2", 3, 3)),
    "loha with large cores": LohaChange(loha_core_parts("1", 12, 12) | loha_core_parts("2", 11, 11)),
    "loha with a row and a column": LohaChange(loha_core_parts("1", 1, 4) | loha_core_parts("2", 5, 1)),
    "loha with a column and a row": LohaChange(loha_core_parts("1", 4, 1) | loha_core_parts("2", 1, 5)),
    "lokr": LokrChange({"lokr_w1": randn(3, 4), "lokr_w2": randn(5, 6, 3, 3)}, 2.0),
    "lokr of factors": LokrChange(
        {
            "lokr_w1_a": randn(3, 2),
            "lokr_w1_b": randn(2, 4),
            "lokr_w2_a": randn(5, 2),
            "lokr_w2_b": randn(2, 6),
        }
    ),
    "lokr with a core": LokrChange(
        {
            "lokr_w1": randn(3, 4),
            "lokr_t2": randn(2, 2, 3, 3),
            "lokr_w2_a": randn(2, 5),
            "lokr_w2_b": randn(2, 6),
        }
    ),
    "lokr with a core of more rows": LokrChange(
        {
            "lokr_w1": randn(3, 4),
            "lokr_t2": randn(3, 1, 3, 3),
            "lokr_w2_a": randn(3, 5),
            "lokr_w2_b": randn(1, 6),
        }
    ),
    "tucker": TuckerChange(
        {
            "lora_up.weight": randn(9, 3, 1, 1),
            "lora_down.weight": randn(2, 8, 1, 1),
            "lora_mid.weight": randn(3, 2, 3, 3),
        },
        0.1,
    ),
}


@pytest.mark.parametrize("case", NORMED)
def test_the_norm_is_that_of_the_formed_change(case: str) -> None:
    change = NORMED[case]
    expected = float(change.delta(dtype=torch.float64).norm())
    assert change.frobenius_norm() == pytest.approx(expected, rel=1e-6)


SIDE = 1 << 17
GIANTS: dict[str, Adapter] = {  # 1 MB each, and a weight of 64 GiB or more
    "loha": LohaChange(
        {
            f"hada_w{side}_{end}": torch.ones(size, dtype=torch.float16)
            for side in (1, 2)
            for end, size in {"a": (SIDE, 1), "b": (1, SIDE)}.items()
        }
    ),
    "lokr": LokrChange(
        {"lokr_w1": torch.ones(512, 512), "lokr_w2_a": torch.ones(SIDE, 1), "lokr_w2_b": torch.ones(1, SIDE)}
    ),
    "tucker": TuckerChange(
        {
            "lora_up.weight": torch.ones(SIDE, 1, 1, 1),
            "lora_down.weight": torch.ones(1, SIDE, 1, 1),
            "lora_mid.weight": torch.ones(1, 1, 31, 31),
        }
    ),
}


@pytest.mark.parametrize("case", NORMED)
def test_a_change_has_no_more_singular_values_than_it_says(case: str) -> None:
    change = NORMED[case]
    if len(change.weight_shape) > 1:
        matrix = change.delta(dtype=torch.float64).flatten(1)
        assert torch.linalg.matrix_rank(matrix) <= change.most_values <= min(matrix.shape)


@pytest.mark.parametrize("case", GIANTS)
def test_small_factors_of_a_giant_weight_are_measured_and_not_formed(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    giant = GIANTS[case]
    entries = float(torch.Size(giant.weight_shape).numel())  # all of them are 1
    assert giant.frobenius_norm() == pytest.approx(entries**0.5)
    monkeypatch.setattr(
        "sigmascope.probes.host.system_memory", lambda: MemorySnapshot(ram_available_bytes=16 * 2**30)
    )
    with pytest.raises(
        LoraFormatError, match=r"the\.layer: its tensors declare .* GB to form; 16 GB are free"
    ):
        form_delta("the.layer", giant)


def test_a_refusal_of_the_allocator_names_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Tensor:
        raise RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 68719476736 bytes."
        )

    monkeypatch.setattr(TuckerChange, "product", refuse)
    with pytest.raises(
        LoraFormatError, match=r"the\.layer: there is not enough memory for a weight \(9, 8, 3, 3\)"
    ):
        form_delta("the.layer", NORMED["tucker"])


def test_a_product_that_overflows_is_refused_with_its_layer() -> None:
    huge = {"lokr_w1": torch.full((2, 2), 3e38), "lokr_w2": torch.full((4, 4), 3e38)}
    with pytest.raises(NonFiniteError, match=r"the\.layer: .* too large for float32"):
        form_delta("the.layer", adapters.LokrChange(huge, 1.0))


@pytest.mark.parametrize(
    "shapes", [((1 << 17, 1), (1, 1 << 17)), ((1, 1 << 17), (1 << 17, 1)), ((1 << 9, 1 << 9), (4, 3))]
)
def test_tucker_factors_of_any_shape_take_memory_like_their_values(
    shapes: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    """A core (m, n) of ones between factors of ones: every value of the kernel is m·n, and the scale is 1."""
    (m, n), (out, inner) = shapes
    parts = {
        "lora_up.weight": torch.ones(out, m),
        "lora_mid.weight": torch.ones(m, n, 1, 1),
        "lora_down.weight": torch.ones(n, inner),
    }
    change = TuckerChange(parts)
    assert set(change.delta().flatten().tolist()) == {m * n}
    assert change.frobenius_norm() == pytest.approx(m * n * (out * inner) ** 0.5)
