"""Convolutions as three factors: a kernel between two 1×1 convolutions (LoCon with a Tucker core)."""

import torch
from torch import Tensor

from sigmascope.lora.adapters.change import Adapter, AdapterFacts, Shapes, misfit, require_parts
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.precision import at_least_float32

UP = "lora_up.weight"
DOWN = "lora_down.weight"
MID = "lora_mid.weight"


def tucker_product(core: Tensor, out_factor: Tensor, in_factor: Tensor) -> Tensor:
    """Σₘₙ core[m, n, …]·out_factor[m, o]·in_factor[n, i], a kernel (out, in, …).

    Args:
        core: (m, n, kh, kw).
        out_factor: (m, out).
        in_factor: (n, in).
    """
    inner = torch.tensordot(core, in_factor, dims=([1], [0]))  # (m, kh, kw, in)
    whole: Tensor = torch.tensordot(out_factor, inner, dims=([0], [0]))  # (out, kh, kw, in)
    return whole.movedim(-1, 1).contiguous()


class TuckerChange(Adapter):
    """up (out, r) · lora_mid (r, r, kh, kw) · down (r, in); up and down may have axes of length 1 behind."""

    kind = "tucker"

    @classmethod
    def facts(cls, shapes: Shapes) -> AdapterFacts:
        """The kernel's shape, and the rows of `lora_down`."""
        require_parts(shapes, UP, DOWN, MID)
        up, down, mid = shapes[UP], shapes[DOWN], shapes[MID]
        flat = all(len(shape) >= 2 and set(shape[2:]) <= {1} for shape in (up, down))
        if not flat or len(mid) < 3 or mid[:2] != (up[1], down[0]) or min(*up, *down, *mid) < 1:
            raise misfit(shapes, UP, MID, DOWN)
        return AdapterFacts((up[0], down[1], *mid[2:]), down[0])

    def product(self, compute: torch.dtype, base: Tensor | None) -> Tensor:
        """The kernel (out, in, kh, kw)."""
        up, down = self.part(UP, compute).flatten(1), self.part(DOWN, compute).flatten(1)
        return tucker_product(self.part(MID, compute), up.mT, down)

    def factors(self) -> LoraFactors:
        """The same ΔW as plain factors, in float32 or wider: the core is multiplied into the down factor."""
        compute = at_least_float32(*(part.dtype for part in self.parts.values()))
        up, down = self.part(UP, compute).flatten(1), self.part(DOWN, compute).flatten(1)
        spread = torch.tensordot(self.part(MID, compute), down, dims=([1], [0])).movedim(-1, 1)
        return LoraFactors(up, spread.flatten(1), self.scale * up.shape[1], self.weight_shape)
