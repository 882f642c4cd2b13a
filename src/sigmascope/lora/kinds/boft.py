"""BOFT: a weight turned by a butterfly of rotations (Liu et al., arXiv 2311.06243).

Each of m stages regroups the rows or columns and rotates blocks of b of them, so that few values reach every pair. As with
OFT (`sigmascope.lora.kinds.oft`), LyCORIS rotates rows and PEFT columns:

    LyCORIS  W' = rescale · (Π Rᵢ)·W,  `oft_blocks` (m, blocks, b, b); alpha limits as for OFT
    PEFT     W' = s · W·Rᵀ,  R = Rₘ … R₁,  Rᵢ = Pᵢ·diag(Cayley(`boft_R`))·Pᵢᵀ,  s = `boft_s`
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.lora.adapters import AdapterFacts, Shapes, require_parts, shapes_error
from sigmascope.lora.kinds.base_change import BaseChange
from sigmascope.lora.kinds.oft import (
    cayley,
    is_ones,
    limited_blocks,
    rescale_of_rows,
    rescaled,
    turns_nothing,
)


class BoftChange(BaseChange):
    """Rotations of rows: `oft_blocks` of four axes, and `rescale` (out, 1, …)."""

    kind = "boft"
    roles = ("oft_blocks", "rescale")
    lycoris_keys = True

    @classmethod
    def fits(cls, shapes: Shapes) -> bool:
        """Four axes; OFT's blocks have three."""
        return len(shapes.get("oft_blocks", ())) == 4

    @classmethod
    def facts(cls, shapes: Shapes) -> AdapterFacts:
        """Nothing but that the blocks are square."""
        return _checked(shapes, "oft_blocks")

    def product(self, compute: torch.dtype, base: Tensor | None) -> Tensor:
        """Rescale · (Π Rᵢ)·W − W."""
        assert base is not None
        blocks = self.part("oft_blocks", compute)
        rows = prod(blocks.shape[1:3])
        self.require(rows == len(base), f"BOFT of {rows} outputs", base)
        rotations = cayley(blocks, (self.alpha or 0.0) * len(base))
        change = butterfly(base, rotations, 1.0) - base
        return rescaled(self, compute, base, change)

    @property
    def is_identity(self) -> bool:
        """Where no block turns and no row is rescaled."""
        return super().is_identity or (
            turns_nothing(self.parts["oft_blocks"]) and is_ones(self.parts, "rescale")
        )

    @property
    def outputs(self) -> int:
        """Blocks times their rows."""
        return prod(self.parts["oft_blocks"].shape[1:3])

    def of_rows(self, sizes: Sequence[int], index: int) -> "BoftChange | None":
        """The blocks of these rows; None if the last stage, whose blocks reach farthest, has one with rows of two parts."""
        blocks = self.parts["oft_blocks"]
        stages, _, size, _ = blocks.shape
        first, reach = sum(sizes[:index]), size * 2 ** (stages - 1)
        if first % reach or sizes[index] % reach:
            return None
        rows = slice(first, first + sizes[index])
        limited = limited_blocks(blocks, (self.alpha or 0.0) * self.outputs)
        parts = {"oft_blocks": limited[:, first // size : rows.stop // size].clone()}
        return replace(self, parts=parts | rescale_of_rows(self.parts, rows), alpha=None, weight_shape=())


class PeftBoftChange(BaseChange):
    """Rotations of columns: `boft_R` (stages, blocks, b, b), and a factor `boft_s` for each output."""

    kind = "boft"
    roles = ("boft_R", "boft_s")

    @classmethod
    def facts(cls, shapes: Shapes) -> AdapterFacts:
        """Nothing but that the blocks are square."""
        return _checked(shapes, "boft_R")

    def product(self, compute: torch.dtype, base: Tensor | None) -> Tensor:
        """S · W·Rᵀ − W."""
        assert base is not None
        blocks, weight = self.part("boft_R", compute), base.flatten(1)
        stages, count, size, _ = blocks.shape
        self.require(count * size == weight.shape[1], f"BOFT of {count * size} inputs", base)
        skew = (blocks - blocks.mT) / 2.0
        identity = torch.eye(size, dtype=compute, device=blocks.device)
        rotations = torch.linalg.solve(identity + skew, identity - skew, left=False)
        changed = weight.mT
        for stage in range(stages):
            order = _regrouped(count * size, size, stage, stages)
            rows = changed[order.argsort()].reshape(count, size, -1)
            changed = (rotations[stage] @ rows).reshape(changed.shape)[order]
        changed = changed.mT
        if "boft_s" in self.parts:
            factors = self.part("boft_s", compute).flatten()
            self.require(len(factors) == len(base), f"a scale of {len(factors)} outputs", base)
            changed = changed * factors[:, None]
        return changed.reshape(base.shape) - base

    @property
    def is_identity(self) -> bool:
        """Where no block turns and no output is scaled."""
        return super().is_identity or (turns_nothing(self.parts["boft_R"]) and is_ones(self.parts, "boft_s"))

    @property
    def outputs(self) -> int | None:
        """How many factors there are."""
        return self.parts["boft_s"].numel() if "boft_s" in self.parts else None

    def of_rows(self, sizes: Sequence[int], index: int) -> "PeftBoftChange":
        """The same rotations, and the factors of these rows."""
        rows = slice(sum(sizes[:index]), sum(sizes[: index + 1]))
        cut = {name: part.flatten()[rows, None] for name, part in self.parts.items() if name == "boft_s"}
        return replace(self, parts={**self.parts, **cut}, weight_shape=())


def _regrouped(inputs: int, block: int, stage: int, stages: int) -> Tensor:
    """PEFT's order of the columns in a stage: of each group of b·2ⁱ, half blocks of even number, then those of odd."""
    if stages == 1:
        return torch.arange(inputs)
    halves = torch.arange(inputs).reshape(-1, 2 ** (stage + 1), block // 2)
    return torch.cat([halves[:, ::2], halves[:, 1::2]], dim=1).flatten()


def butterfly(
    weight: Float[Tensor, "out ..."], rotations: Float[Tensor, "m k b b"], strength: float
) -> Float[Tensor, "out ..."]:
    """(Π Rᵢ)·W over m stages, in which rows are regrouped. Each stage's rotation is s·R + (1 − s)·I."""
    stages, _, size, _ = rotations.shape
    identity = torch.eye(size, dtype=rotations.dtype, device=rotations.device)
    rows = weight.reshape(weight.shape[0], -1)
    for stage in range(stages):
        apart = 2**stage * (size // 2)
        grouped = rows.reshape(-1, 2, apart, rows.shape[1]).transpose(1, 2).reshape(-1, size, rows.shape[1])
        turned = (strength * rotations[stage] + (1.0 - strength) * identity) @ grouped
        rows = turned.reshape(-1, apart, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
    return rows.reshape(weight.shape)


def _checked(shapes: Shapes, name: str) -> AdapterFacts:
    require_parts(shapes, name)
    shape = shapes[name]
    if len(shape) != 4 or shape[2] != shape[3] or min(shape) < 1 or (shape[0] > 1 and shape[3] % 2):
        raise shapes_error(shapes, name)
    return AdapterFacts((), None)
