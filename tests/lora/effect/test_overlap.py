from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy.linalg import subspace_angles

from sigmascope.lora.effect import angles_of, overlap, overlaps, principal_angles
from sigmascope.probes.applied_patch import AdapterType, AppliedPatch


def patch(
    kind: AdapterType = "lora", key: str = "a.weight", strength: float = 1.0, **parts: Any
) -> AppliedPatch:
    return AppliedPatch(
        key,
        kind,
        "unknown",
        "<class 'comfy.weight_adapter.lora.LoRAAdapter'>",
        "lazy",
        strength=strength,
        tensors=parts.get("tensors", parts),
    )


@pytest.fixture
def randn() -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return lambda *shape: torch.randn(*shape, generator=generator)


Randn = Callable[..., torch.Tensor]


def axes(rows: int, first: int, count: int) -> torch.Tensor:
    """`count` unit vectors of length `rows` as columns, from the axis `first` on."""
    return torch.eye(rows)[:, first : first + count]


def test_a_lora_overlaps_itself_wholly(randn: Randn) -> None:
    a = [patch(key=f"{name}.weight", up=randn(20, 4), down=randn(4, 16)) for name in "abc"]
    found = overlap(a, a)
    assert (found.overall, found.columns, found.rows, found.cosine) == pytest.approx((1.0,) * 4, abs=1e-12)
    assert max(angles_of(a[:1], a[:1])[0]) < 1e-5


def test_a_scaled_copy_of_it_does_too_and_an_opposite_one_has_cosine_minus_one(randn: Randn) -> None:
    up, down = randn(20, 4), randn(4, 16)
    found = overlap([patch(up=up, down=down)], [patch(up=up, down=down, strength=-0.3)])
    assert found.overall == pytest.approx(1.0)
    assert found.cosine == pytest.approx(-1.0)


def test_orthogonal_changes_do_not_overlap() -> None:
    a = patch(up=axes(20, 0, 3), down=axes(16, 0, 3).mT)
    b = patch(up=axes(20, 3, 3), down=axes(16, 3, 3).mT)
    found = overlap([a], [b])
    assert (found.overall, found.columns, found.rows, found.cosine) == (0.0, 0.0, 0.0, 0.0)
    assert angles_of([a], [b])[0] == pytest.approx((90.0,) * 3)


def test_one_shared_direction_of_three_is_a_third() -> None:
    a = patch(up=axes(20, 0, 3), down=axes(16, 0, 3).mT)
    b = patch(up=axes(20, 2, 3), down=axes(16, 8, 3).mT)
    found = overlap([a], [b])
    assert found.columns == pytest.approx(1 / 3)
    assert found.rows == 0.0
    assert found.overall == pytest.approx(1 / 6)
    assert found.chance == pytest.approx((3 / 20 + 3 / 16) / 2)


@pytest.mark.parametrize(("r", "s"), [(3, 5), (5, 3), (4, 4)])
def test_angles_are_scipys(randn: Randn, r: int, s: int) -> None:
    one, other = torch.linalg.qr(randn(30, r).double())[0], torch.linalg.qr(randn(30, s).double())[0]
    expected = sorted(subspace_angles(one.numpy(), other.numpy()))
    assert torch.deg2rad(principal_angles(one, other)).tolist() == pytest.approx(expected, abs=1e-12)


def test_loras_of_different_weights_share_nothing(randn: Randn) -> None:
    a, b = (patch(key=f"{name}.weight", up=randn(6, 2), down=randn(2, 6)) for name in "ab")
    found = overlap([a], [b])
    assert found.overall == 0.0
    assert (found.only_a, found.only_b) == (("a.weight",), ("b.weight",))


def test_what_half_of_a_lora_shares_counts_by_its_size(randn: Randn) -> None:
    up, down = randn(6, 2), randn(2, 6)
    shared = patch(key="a.weight", up=up, down=down)
    alone = patch(key="b.weight", up=up, down=down)
    assert overlap([shared, alone], [shared]).overall == pytest.approx(0.5**0.5)  # ‖Δ‖ / (√2·‖Δ‖)


def test_parts_of_a_fused_weight_are_one_change(randn: Randn) -> None:
    whole_up, down = randn(12, 2), randn(2, 8)
    whole = patch(up=whole_up, down=down)
    parts = [
        AppliedPatch(
            "a.weight",
            "lora",
            "unknown",
            "",
            "lazy",
            tensors={"up": whole_up[start : start + 4], "down": down},
            weight_shape=(12, 8),
            offset=(0, start, 4),
        )
        for start in (0, 4, 8)
    ]
    found = overlap([whole], parts)
    assert (found.overall, found.cosine) == pytest.approx((1.0, 1.0))


def test_loha_and_lokr_are_compared_by_their_products(randn: Randn) -> None:
    w = {
        name: randn(*shape)
        for name, shape in {"w1_a": (20, 2), "w1_b": (2, 16), "w2_a": (20, 2), "w2_b": (2, 16)}.items()
    }
    loha = patch("loha", tensors=w)
    dense = (w["w1_a"] @ w["w1_b"]) * (w["w2_a"] @ w["w2_b"])
    k = {"w1": randn(4, 2), "w2_a": randn(5, 1), "w2_b": randn(1, 8)}
    lokr = patch("lokr", tensors=k)
    kron = torch.kron(k["w1"], k["w2_a"] @ k["w2_b"])
    for change, product in ((loha, dense), (lokr, kron)):
        u, values, vh = torch.linalg.svd(product.double())
        rank = int((values > 1e-5 * values[0]).sum())
        found = overlap([change], [patch(up=u[:, :rank] * values[:rank], down=vh[:rank])])
        assert (found.overall, found.cosine) == pytest.approx((1.0, 1.0), abs=1e-6)


def test_a_difference_has_no_factors_and_says_so(randn: Randn) -> None:
    found = overlap([patch("diff", diff=randn(4, 4))], [patch(up=randn(4, 1), down=randn(1, 4))])
    assert found.overall is None
    assert found.unavailable["a.weight"].endswith("has no factors whose spaces could be compared.")


def test_a_change_of_strength_zero_overlaps_nothing(randn: Randn) -> None:
    a = patch(up=randn(4, 1), down=randn(1, 4))
    found = overlap([a], [patch(up=randn(4, 1), down=randn(1, 4), strength=0.0)])
    assert found.overall is None
    assert found.only_a == ("a.weight",)


def test_several_loras_on_layers_of_two_sizes_are_compared_as_their_whole_changes_say(randn: Randn) -> None:
    sizes = {"a": (20, 16), "b": (20, 16), "c": (12, 18), "d": (20, 16)}
    loras = []
    for number in range(3):
        up_of_one_rank_too_many = (
            randn(20, 3).double() @ randn(3, 4).double()
        )  # its Gram matrix cannot be inverted
        made = {
            name: (randn(rows, 2 + number), randn(2 + number, columns))
            for name, (rows, columns) in sizes.items()
        }
        made |= {"d": (up_of_one_rank_too_many, randn(4, 16).double())} if number == 1 else {}
        loras.append({name: (0.3 * number - 1.0, up, down) for name, (up, down) in made.items()})
    changes = [
        [patch(key=name, strength=strength, up=up, down=down) for name, (strength, up, down) in lora.items()]
        for lora in loras
    ]
    which = [(0, 1), (0, 2), (1, 2)]
    found = overlaps([(changes[one], changes[other]) for one, other in which])
    for (one, other), both in zip(which, found, strict=True):
        assert [weight.key for weight in both.keys] == list(sizes)
        for weight in both.keys:
            first, second = (
                strength * up.double() @ down.double()
                for strength, up, down in (loras[one][weight.key], loras[other][weight.key])
            )
            inner = float((first * second).sum() / (first.norm() * second.norm()))
            ranks = [int(torch.linalg.matrix_rank(change)) for change in (first, second)]
            (u, _, vh), (other_u, _, other_vh) = map(torch.linalg.svd, (first, second))
            columns = float((u[:, : ranks[0]].mT @ other_u[:, : ranks[1]]).square().sum()) / min(ranks)
            rows = float((vh[: ranks[0]] @ other_vh[: ranks[1]].mT).square().sum()) / min(ranks)
            assert weight.ranks == tuple(ranks)
            assert (weight.cosine, weight.columns, weight.rows) == pytest.approx(
                (inner, columns, rows), abs=1e-6
            )
            assert weight.norms == pytest.approx((float(first.norm()), float(second.norm())), rel=1e-6)
