"""HRA: a weight multiplied by a chain of Householder reflections (Yuan et al., arXiv 2405.17484; PEFT).

W' = W·H₁·H₂ … Hᵣ with Hᵢ = I − 2·uᵢ·uᵢᵀ of the normalised columns of `hra_u` (in·kh·kw, r). With PEFT's `apply_GS` the
columns are made orthogonal first.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sigmascope.lora.adapters import AdapterFacts, Shapes, shapes_error
from sigmascope.lora.kinds.base_change import BaseChange


class HraChange(BaseChange):
    """The vectors `hra_u`, a column for each reflection."""

    kind = "hra"
    roles = ("hra_u",)

    @classmethod
    def facts(cls, shapes: Shapes) -> AdapterFacts:
        """Nothing but that it is a matrix: it has the weight's inputs, and not its outputs."""
        if len(shapes["hra_u"]) != 2 or min(shapes["hra_u"]) < 1:
            raise shapes_error(shapes, "hra_u")
        return AdapterFacts((), None)

    def product(self, compute: torch.dtype, base: Tensor | None) -> Tensor:
        """W·H₁ … Hᵣ − W, one reflection after the other."""
        assert base is not None
        vectors, changed = self.part("hra_u", compute), base.flatten(1)
        self.require(len(vectors) == changed.shape[1], f"HRA of {len(vectors)} inputs", base)
        if self.setting("apply_GS", False):
            vectors, _ = torch.linalg.qr(vectors)  # Gram-Schmidt but for signs, which do not matter
        for vector in (vectors / torch.linalg.vector_norm(vectors, dim=0)).mT:
            changed = changed - 2.0 * torch.outer(changed @ vector, vector)
        return changed.reshape(base.shape) - base

    @property
    def is_identity(self) -> bool:
        """Where each reflection is done twice, as before training."""
        return super().is_identity or (
            not self.setting("apply_GS", False)
            and torch.equal(self.parts["hra_u"][:, ::2], self.parts["hra_u"][:, 1::2])
        )

    def of_rows(self, sizes: Sequence[int], index: int) -> "HraChange":
        """The same: each row is reflected by itself."""
        return self
