"""LoHa: the elementwise product of two low-rank matrices (FedPara, Hyeon-Woo et al., arXiv 2108.06098)."""

import torch
from torch import Tensor

from sigmascope.lora.adapters.change import Adapter, AdapterFacts, Shapes, inner_size, misfit, require_parts
from sigmascope.lora.adapters.tucker import tucker_product


class LohaChange(Adapter):
    """ΔW = scale · (w1_a·w1_b) ⊙ (w2_a·w2_b), parts `hada_w1_a` … `hada_w2_b`.

    With cores `hada_t1` and `hada_t2` (r, r, kh, kw) either side is a Tucker product, and the `_a` factors are
    (r, out) instead of (out, r).
    """

    kind = "loha"

    @classmethod
    def facts(cls, shapes: Shapes) -> AdapterFacts:
        """The shape of either side, and the rows of `hada_w1_b`."""
        names = [f"hada_w{side}_{end}" for side in (1, 2) for end in "ab"]
        require_parts(shapes, *names)
        cores = [name for name in ("hada_t1", "hada_t2") if name in shapes]
        if cores:
            require_parts(shapes, "hada_t1", "hada_t2")
            sides = [_tucker_shape(shapes, f"hada_t{side}", f"hada_w{side}") for side in (1, 2)]
        else:
            for side in (1, 2):
                inner_size(shapes, f"hada_w{side}_a", f"hada_w{side}_b")
            sides = [(shapes[f"hada_w{side}_a"][0], shapes[f"hada_w{side}_b"][1]) for side in (1, 2)]
        if sides[0] != sides[1]:
            raise misfit(shapes, *names)
        return AdapterFacts(sides[0], shapes["hada_w1_b"][0])

    def product(self, compute: torch.dtype, base: Tensor | None) -> Tensor:
        """The elementwise product of the two sides."""
        return self._side(1, compute) * self._side(2, compute)

    def _side(self, side: int, compute: torch.dtype) -> Tensor:
        left, right = (self.part(f"hada_w{side}_{end}", compute) for end in "ab")
        if f"hada_t{side}" in self.parts:
            return tucker_product(self.part(f"hada_t{side}", compute), left, right)
        return left @ right


def _tucker_shape(shapes: Shapes, core: str, factors: str) -> tuple[int, ...]:
    left, right = f"{factors}_a", f"{factors}_b"
    sizes = shapes[core], shapes[left], shapes[right]
    if len(sizes[0]) < 3 or len(sizes[1]) != 2 or len(sizes[2]) != 2 or min(map(min, sizes)) < 1:
        raise misfit(shapes, core, left, right)
    if sizes[0][:2] != (sizes[1][0], sizes[2][0]):
        raise misfit(shapes, core, left, right)
    return (sizes[1][1], sizes[2][1], *sizes[0][2:])
