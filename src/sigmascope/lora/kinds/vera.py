"""VeRA: two vectors a layer scale one random projection of all layers (Kopiczko et al., arXiv 2310.11454; PEFT).

ΔW = (λ_b · B[:out])·(λ_d · A[:, :in]), with `vera_lambda_b` (out), `vera_lambda_d` (r) and the shared `vera_A` (r, widest
input) and `vera_B` (widest output, r). The weight's values do not matter, but only its shape tells how much of A is used.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sigmascope.errors import LoraFormatError
from sigmascope.lora.adapters import AdapterFacts, Shapes, require_parts, shapes_error
from sigmascope.lora.kinds.base_change import BaseChange


class VeraChange(BaseChange):
    """The layer's vectors, and the projections of the whole file."""

    kind = "vera"
    roles = ("vera_lambda_b", "vera_lambda_d", "vera_A", "vera_B")
    shared = ("vera_A", "vera_B")

    @classmethod
    def facts(cls, shapes: Shapes) -> AdapterFacts:
        """No shape, since the vectors do not tell the inputs.

        Raises:
            LoraFormatError: The file lacks the projections, or they do not fit.
        """
        require_parts(shapes, "vera_lambda_b", "vera_lambda_d")
        if not all(name in shapes for name in cls.shared):
            raise LoraFormatError(
                "VeRA's projections vera_A and vera_B are not in the file.",
                hint="Save it again with PEFT's save_projection=True.",
            )
        if [len(shapes[name]) for name in cls.roles] != [1, 1, 2, 2]:
            raise shapes_error(shapes, *cls.roles)
        (rank, _), (outputs, rank_of_b) = shapes["vera_A"], shapes["vera_B"]
        if not rank == rank_of_b == shapes["vera_lambda_d"][0] or outputs < shapes["vera_lambda_b"][0]:
            raise shapes_error(shapes, *cls.roles)
        return AdapterFacts((), None)

    def product(self, compute: torch.dtype, base: Tensor | None) -> Tensor:
        """(λ_b · B)·(λ_d · A), with as much of both as the weight has."""
        assert base is not None
        outputs, rank, down, up = (self.part(name, compute) for name in self.roles)
        inputs = base[0].numel()
        fits = len(outputs) == len(base) and inputs <= down.shape[1]
        self.require(fits, f"VeRA of {len(outputs)} outputs and at most {down.shape[1]} inputs", base)
        product: Tensor = (outputs[:, None] * up[: len(base)]) @ (rank[:, None] * down[:, :inputs])
        return product.reshape(base.shape)

    @property
    def is_identity(self) -> bool:
        """Where one of the vectors is zero."""
        return super().is_identity or not all(bool(self.parts[name].any()) for name in self.roles[:2])

    @property
    def outputs(self) -> int:
        """How many λ_b there are."""
        return len(self.parts["vera_lambda_b"])

    def of_rows(self, sizes: Sequence[int], index: int) -> "VeraChange":
        """With these rows of λ_b and B."""
        rows = slice(sum(sizes[:index]), sum(sizes[: index + 1]))
        cut = {name: self.parts[name][rows] for name in ("vera_lambda_b", "vera_B")}
        return replace(self, parts={**self.parts, **cut}, weight_shape=())
