"""Every kind of change against what it is, multiplied out in float64 as its host does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sigmascope.lora.effect import effect_of
from sigmascope.probes.applied_patch import AppliedPatch

Randn = Callable[..., Tensor]
MakePatch = Callable[..., AppliedPatch]
S = 0.7


def norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


def check(patch: AppliedPatch, weight: Tensor, expected: Tensor) -> None:
    effect = effect_of([patch], weight)
    assert effect.unavailable == {}
    assert effect.delta_norm == pytest.approx(norm(expected), rel=1e-7)


def wide(**tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.double() for tensor in tensors.values())


@pytest.mark.parametrize("kernel", [(), (3, 3)])
def test_loha(randn: Randn, make_patch: MakePatch, kernel: tuple[int, ...]) -> None:
    weight = randn(12, 8, *kernel)
    inner = weight[0].numel()
    t = {"w1_a": randn(12, 2), "w1_b": randn(2, inner), "w2_a": randn(12, 2), "w2_b": randn(2, inner)}
    a, b, c, d = wide(**t)
    check(make_patch("loha", **t, strength=S, scale=0.5), weight, S * 0.5 * (a @ b) * (c @ d))


def test_loha_with_cores(randn: Randn, make_patch: MakePatch) -> None:
    t = {"w1_a": randn(2, 12), "w1_b": randn(2, 8), "w2_a": randn(2, 12), "w2_b": randn(2, 8)}
    t |= {"t1": randn(2, 2, 3, 3), "t2": randn(2, 2, 3, 3)}
    a, b, c, d, e, f = wide(**t)
    sides = [
        torch.einsum("ijkl,jr,ip->prkl", core, right, left) for core, right, left in ((e, b, a), (f, d, c))
    ]
    check(make_patch("loha", **t, strength=S), randn(12, 8, 3, 3), S * sides[0] * sides[1])


def test_lokr(randn: Randn, make_patch: MakePatch) -> None:
    t = {"w1": randn(4, 2), "w2_a": randn(3, 2), "w2_b": randn(2, 4)}
    a, b, c = wide(**t)
    check(make_patch("lokr", **t, strength=S, scale=0.5), randn(12, 8), S * 0.5 * torch.kron(a, b @ c))


def test_lokr_of_a_kernel(randn: Randn, make_patch: MakePatch) -> None:
    t = {"w1": randn(4, 2), "w2": randn(3, 4, 3, 3)}
    a, b = wide(**t)
    check(make_patch("lokr", **t, strength=S), randn(12, 8, 3, 3), S * torch.kron(a[:, :, None, None], b))


def test_a_lora_with_a_core(randn: Randn, make_patch: MakePatch) -> None:
    t = {"up": randn(12, 2, 1, 1), "mid": randn(2, 2, 3, 3), "down": randn(2, 8, 1, 1)}
    up, mid, down = wide(**t)
    expected = torch.einsum("mnkl,im,nj->ijkl", mid, up[:, :, 0, 0], down[:, :, 0, 0])
    check(make_patch("lora", **t, strength=S, scale=2.0), randn(12, 8, 3, 3), S * 2.0 * expected)


@pytest.mark.parametrize("kernel", [(), (3, 3)])
def test_glora(randn: Randn, make_patch: MakePatch, kernel: tuple[int, ...]) -> None:
    weight = randn(12, 8, *kernel)
    t = {"a1": randn(8, 2), "a2": randn(2, 8), "b1": randn(12, 2), "b2": randn(2, weight[0].numel())}
    a1, a2, b1, b2 = wide(**t)
    turned = torch.einsum("oi...,ij->oj...", weight.double(), a1 @ a2)
    expected = S * 0.5 * (turned + (b1 @ b2).reshape(weight.shape))
    check(make_patch("glora", **t, strength=S, scale=0.5), weight, expected)


def test_glora_as_lycoris_wrote_it_first(randn: Randn, make_patch: MakePatch) -> None:
    weight = randn(12, 8)
    t = {"a1": randn(2, 8), "a2": randn(8, 2), "b1": randn(2, 8), "b2": randn(12, 2)}
    a1, a2, b1, b2 = wide(**t)
    check(make_patch("glora", **t, strength=S), weight, S * (weight.double() @ a2 @ a1 + b2 @ b1))


def in_blocks(blocks: Tensor) -> Tensor:
    size = blocks.shape[1]
    whole = torch.zeros(len(blocks) * size, len(blocks) * size, dtype=blocks.dtype)
    for number, block in enumerate(blocks):
        start = number * size
        whole[start : start + size, start : start + size] = block
    return whole


def rotations(blocks: Tensor) -> Tensor:
    """Cayley's transform, written as the inverse that it is."""
    skew = blocks - blocks.mT
    one = torch.eye(blocks.shape[-1], dtype=torch.float64).expand_as(skew)
    turned: Tensor = (one + skew) @ torch.linalg.inv(one - skew)
    return turned


def test_oft_turns_rows_in_blocks(randn: Randn, make_patch: MakePatch) -> None:
    weight, blocks = randn(12, 8), randn(3, 4, 4)
    whole = in_blocks(rotations(blocks.double()).mT)
    expected = whole @ weight.double() - weight.double()
    check(make_patch("oft", blocks=blocks, scale=1.0), weight, expected)


def test_a_turn_by_oft_is_limited_by_its_alpha(randn: Randn, make_patch: MakePatch) -> None:
    weight, blocks, limit = randn(12, 8), randn(3, 4, 4), 0.1
    skew = blocks.double() - blocks.double().mT
    limited = blocks.double() * limit / torch.linalg.vector_norm(skew)
    expected = in_blocks(rotations(limited).mT) @ weight.double() - weight.double()
    check(make_patch("oft", blocks=blocks, alpha=limit), weight, expected)


def test_boft_of_one_stage_turns_pairs_of_halves(randn: Randn, make_patch: MakePatch) -> None:
    weight, blocks = randn(8, 6), randn(1, 2, 4, 4)
    rows = [0, 2, 1, 3, 4, 6, 5, 7]  # halves of two rows each, row by row
    order = torch.eye(8, dtype=torch.float64)[rows]
    whole = order.T @ in_blocks(rotations(blocks[0].double())) @ order
    check(make_patch("boft", blocks=blocks), weight, whole @ weight.double() - weight.double())


def test_rotations_leave_the_length_of_a_weight(randn: Randn, make_patch: MakePatch) -> None:
    from sigmascope.lora.kinds.boft import butterfly
    from sigmascope.lora.kinds.oft import cayley

    weight = randn(16, 6).double()
    turned = butterfly(weight, cayley(randn(2, 4, 4, 4).double(), 0.0), 1.0)
    assert norm(turned) == pytest.approx(norm(weight), rel=1e-12)
    assert norm(turned - weight) > 0.1 * norm(weight)


def test_dora_by_outputs_as_comfyui_applies_it(randn: Randn, make_patch: MakePatch) -> None:
    """By the norm of the unchanged weight, where the paper has that of the changed one."""
    weight, t = randn(12, 8), {"up": randn(12, 2), "down": randn(2, 8), "dora_scale": randn(12, 1).abs()}
    up, down, magnitude = wide(**t)
    base = weight.double()
    changed = (base + 0.5 * up @ down) * magnitude / base.norm(dim=1, keepdim=True)
    check(make_patch("dora", **t, strength=S, scale=0.5), weight, S * (changed - base))


def test_dora_by_inputs_as_comfyui_applies_it(randn: Randn, make_patch: MakePatch) -> None:
    weight, t = randn(12, 8), {"up": randn(12, 2), "down": randn(2, 8), "dora_scale": randn(1, 8).abs()}
    up, down, magnitude = wide(**t)
    moved = weight.double() + up @ down
    changed = moved * magnitude / moved.norm(dim=0, keepdim=True)
    check(make_patch("dora", **t, strength=S), weight, S * (changed - weight.double()))


def test_loha_with_magnitudes(randn: Randn, make_patch: MakePatch) -> None:
    weight = randn(12, 8)
    t = {"w1_a": randn(12, 2), "w1_b": randn(2, 8), "w2_a": randn(12, 2), "w2_b": randn(2, 8)}
    magnitude = randn(1, 8).abs()
    a, b, c, d, m = wide(**t, m=magnitude)
    moved = weight.double() + (a @ b) * (c @ d)
    expected = moved * m / moved.norm(dim=0, keepdim=True) - weight.double()
    check(make_patch("loha", **t, dora_scale=magnitude), weight, expected)


def test_a_difference(randn: Randn, make_patch: MakePatch) -> None:
    diff = randn(7)
    check(make_patch("diff", diff=diff, strength=-S), randn(7), S * diff.double())


def test_what_is_set_is_set_whatever_the_strength(randn: Randn, make_patch: MakePatch) -> None:
    weight, value = randn(12, 8), randn(12, 8)
    check(make_patch("set", set=value, strength=0.0), weight, value.double() - weight.double())


def test_one_change_comes_after_the_other(randn: Randn, make_patch: MakePatch) -> None:
    """A rotation turns what a LoRA before it left."""
    weight, up, down, blocks = randn(12, 8), randn(12, 2), randn(2, 8), randn(3, 4, 4)
    patches = [make_patch("oft", blocks=blocks, index=1), make_patch("lora", up=up, down=down, index=0)]
    moved = weight.double() + up.double() @ down.double()
    expected = in_blocks(rotations(blocks.double()).mT) @ moved - weight.double()
    assert effect_of(patches, weight).delta_norm == pytest.approx(norm(expected), rel=1e-7)


@pytest.mark.parametrize("kind", ["glora", "oft", "set", "dora"])
def test_what_depends_on_the_weight_is_no_guess_without_it(make_patch: MakePatch, kind: Any) -> None:
    effect = effect_of([make_patch(kind, weight_shape=(4, 4))], None)
    assert effect.delta_norm is None
    assert effect.unavailable["delta_norm"].startswith("the weight was not given")


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        ("loha", {"w1_a": (1 << 17, 1), "w1_b": (1, 1 << 17), "w2_a": (1 << 17, 1), "w2_b": (1, 1 << 17)}),
        ("lokr", {"w1": (512, 512), "w2": (512, 512)}),
    ],
)
def test_small_tensors_that_declare_a_giant_are_not_formed(
    make_patch: MakePatch, kind: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    """A host makes a weight larger for a change that is; here that would take 256 and 1024 GB."""
    patch = make_patch(kind, **{name: torch.ones(shape) for name, shape in shapes.items()}, strength=S)
    effect = effect_of([patch], torch.zeros(4, 4))
    assert effect.delta_norm is None
    assert "which takes" in effect.unavailable["delta_norm"]
    assert "GB to form" in effect.unavailable["delta_norm"]


def test_loha_needs_no_weight(randn: Randn, make_patch: MakePatch) -> None:
    t = {"w1_a": randn(12, 2), "w1_b": randn(2, 8), "w2_a": randn(12, 2), "w2_b": randn(2, 8)}
    a, b, c, d = wide(**t)
    effect = effect_of([make_patch("loha", **t)], None)
    assert effect.delta_norm == pytest.approx(norm((a @ b) * (c @ d)), rel=1e-7)


def test_an_unknown_kind_says_what_is_known(make_patch: MakePatch) -> None:
    patch = make_patch(
        "unknown", weight_shape=(4, 4), unavailable={"adapter_type": "Tensor is no kind of change"}
    )
    effect = effect_of([patch], torch.zeros(4, 4))
    assert effect.delta_norm is None
    assert "Tensor is no kind of change" in effect.unavailable["delta_norm"]
