"""LoKr: the Kronecker product of two smaller matrices (KronA, Edalati et al., arXiv 2212.10650; LyCORIS)."""

from math import prod

import torch
from torch import Tensor

from sigmascope.lora.adapters.change import Adapter, AdapterFacts, Shapes, inner_size, misfit, require_parts
from sigmascope.lora.adapters.tucker import tucker_product
from sigmascope.lora.norms import frobenius_norm

_W1, _W1_A, _W1_B = "lokr_w1", "lokr_w1_a", "lokr_w1_b"
_W2, _W2_A, _W2_B = "lokr_w2", "lokr_w2_a", "lokr_w2_b"
_CORE = "lokr_t2"


class LokrChange(Adapter):
    """ΔW = scale · w1 ⊗ w2.

    w1 (a, b) is `lokr_w1`, or `lokr_w1_a`·`lokr_w1_b`. w2 (c, d[, kh, kw]) is `lokr_w2`, or
    `lokr_w2_a`·`lokr_w2_b` (c, d·kh·kw), or with a core `lokr_t2` (r, r, kh, kw) the Tucker product of factors
    (r, c) and (r, d). The rank is that of w2 where it is decomposed, else that of w1; with both whole there is
    none, and an alpha means nothing.
    """

    kind = "lokr"

    @classmethod
    def facts(cls, shapes: Shapes) -> AdapterFacts:
        """(a·c, b·d[, kh, kw]), and the inner dimension of w2 or w1."""
        first, first_rank = _left(shapes)
        second, second_rank = _right(shapes)
        shape = (first[0] * second[0], first[1] * second[1], *second[2:])
        return AdapterFacts(shape, first_rank if second_rank is None else second_rank)

    def product(self, compute: torch.dtype, base: Tensor | None) -> Tensor:
        """The Kronecker product; a kernel's axes belong to w2."""
        first, second = self._first(compute), self._second(compute)
        return torch.kron(first.reshape(*first.shape, *(1 for _ in second.shape[2:])), second)

    def frobenius_norm(self, base: Tensor | None = None) -> float:
        """‖w1 ⊗ w2‖ = ‖w1‖·‖w2‖, without forming the product."""
        if base is not None and tuple(base.shape) != self.weight_shape:
            self.shaped(base.shape)
        norms = (frobenius_norm(side) for side in (self._first(torch.float32), self._second(torch.float32)))
        return abs(self.scale) * prod(norms)

    def _first(self, compute: torch.dtype) -> Tensor:
        if _W1 in self.parts:
            return self.part(_W1, compute)
        return self.part(_W1_A, compute) @ self.part(_W1_B, compute)

    def _second(self, compute: torch.dtype) -> Tensor:
        if _W2 in self.parts:
            return self.part(_W2, compute)
        left, right = self.part(_W2_A, compute), self.part(_W2_B, compute)
        if _CORE in self.parts:
            return tucker_product(self.part(_CORE, compute), left, right)
        return left @ right


def _left(shapes: Shapes) -> tuple[tuple[int, ...], int | None]:
    if _W1 in shapes:
        if len(shapes[_W1]) != 2 or min(shapes[_W1]) < 1:
            raise misfit(shapes, _W1)
        return shapes[_W1], None
    rank = inner_size(shapes, _W1_A, _W1_B)
    return (shapes[_W1_A][0], shapes[_W1_B][1]), rank


def _right(shapes: Shapes) -> tuple[tuple[int, ...], int | None]:
    if _W2 in shapes:
        if len(shapes[_W2]) < 2 or min(shapes[_W2]) < 1:
            raise misfit(shapes, _W2)
        return shapes[_W2], None
    if _CORE not in shapes:
        rank = inner_size(shapes, _W2_A, _W2_B)
        return (shapes[_W2_A][0], shapes[_W2_B][1]), rank
    require_parts(shapes, _W2_A, _W2_B)
    core, left, right = shapes[_CORE], shapes[_W2_A], shapes[_W2_B]
    fits = len(core) >= 3 and len(left) == len(right) == 2 and core[:2] == (left[0], right[0])
    if not fits or min(*core, *left, *right) < 1:
        raise misfit(shapes, _CORE, _W2_A, _W2_B)
    return (left[1], right[1], *core[2:]), right[0]
