"""GLoRA: ΔW = scale · (W·A + B), both of low rank (Chavan et al., arXiv 2306.07967; LyCORIS).

LyCORIS stores A = a1·a2 and B = b1·b2 today, and stored A = a2·a1 and B = b2·b1 at first; the shapes tell which. Of a
convolution, A mixes input channels.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.errors import ModelMismatchError
from sigmascope.lora.adapters import AdapterFacts, Shapes, require_parts, shapes_error
from sigmascope.lora.kinds.base_change import BaseChange


class GloraChange(BaseChange):
    """The four factors `a1`, `a2`, `b1` and `b2`."""

    kind = "glora"
    roles = ("a1.weight", "a2.weight", "b1.weight", "b2.weight")
    lycoris_keys = True

    @classmethod
    def facts(cls, shapes: Shapes) -> AdapterFacts:
        """The shape of B, and its rank."""
        require_parts(shapes, *cls.roles)
        a1, a2, b1, b2 = (shapes[name] for name in cls.roles)
        if min(map(len, (a1, a2, b1, b2))) < 2 or not (b1[1] == b2[0] or b2[1] == b1[0]):
            raise shapes_error(shapes, *cls.roles)
        if _is_first_left(b1, b2):
            return AdapterFacts((b1[0], *b2[1:]), b2[0])
        return AdapterFacts((b2[0], *b1[1:]), b1[0])

    def product(self, compute: torch.dtype, base: Tensor | None) -> Tensor:
        """W·A + B."""
        assert base is not None
        try:
            return glora_product(base, *(self.part(name, compute) for name in self.roles))
        except RuntimeError as error:
            raise ModelMismatchError(
                f"a glora change of a weight {self.weight_shape} does not fit a weight {tuple(base.shape)}.",
                hint="Use the LoRA with the model it was made for.",
            ) from error

    @property
    def is_identity(self) -> bool:
        """Where a factor of both products is zero."""
        return super().is_identity or not any(
            all(bool(self.parts[name].any()) for name in names) for names in (self.roles[:2], self.roles[2:])
        )

    def of_rows(self, sizes: Sequence[int], index: int) -> "GloraChange":
        """With these rows of B's left factor: W·A has the rows of W."""
        rows = slice(sum(sizes[:index]), sum(sizes[: index + 1]))
        left = (
            self.roles[2]
            if _is_first_left(*(self.parts[name].shape for name in self.roles[2:]))
            else self.roles[3]
        )
        return replace(self, parts={**self.parts, left: self.parts[left][rows]}, weight_shape=())


def _is_first_left(b1: Sequence[int], b2: Sequence[int]) -> bool:
    """Whether B is b1·b2; of a square weight both orders fit, and one would be a rank of all inputs."""
    return b1[1] == b2[0] and (b2[1] != b1[0] or b1[1] <= b1[0])


def glora_product(
    weight: Float[Tensor, "out ..."], a1: Tensor, a2: Tensor, b1: Tensor, b2: Tensor
) -> Float[Tensor, "out ..."]:
    """W·A + B, whichever order the factors have."""
    old = b2.shape[1] == b1.shape[0] == a1.shape[0] == a2.shape[1]
    new = b2.shape[0] == b1.shape[1] == a1.shape[1] == a2.shape[0]
    a1, a2, b1, b2 = (factor.flatten(1) for factor in (a1, a2, b1, b2))
    if old and (not new or a2.shape[0] == weight.shape[0] == weight.shape[1]):
        return (b2 @ b1 + weight.flatten(1) @ a2 @ a1).reshape(weight.shape)
    rows = weight.flatten(2) if weight.ndim > 2 else weight.unsqueeze(-1)
    turned: Tensor = torch.einsum("oix,ij->ojx", rows, a1 @ a2).reshape(weight.shape)
    return turned.add((b1 @ b2).reshape(weight.shape))
