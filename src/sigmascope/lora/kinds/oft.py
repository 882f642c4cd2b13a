"""OFT: a weight turned by rotations of blocks (Qiu et al., arXiv 2306.07280).

A block's rotation is the Cayley transform of a skew matrix. LyCORIS (Diag-OFT) and kohya rotate the weight's rows,
PEFT its columns, and the files of one are not those of the other:

    LyCORIS, kohya   W' = rescale · Rᵀ·W,  R = (I + Q)(I − Q)⁻¹,  Q = B − Bᵀ of `oft_blocks` (blocks, b, b)
    LyCORIS at first the rotations themselves: `oft_diag`
    kohya for FLUX   the same part by part of a fused matrix: `oft_blocks.0`, `oft_blocks.1`, … for query, key, value, …
    PEFT             W' = W·Rᵀ,  R ≈ (I − Q)(I + Q)⁻¹, Q with the upper triangle `oft_R` (blocks, b·(b − 1) / 2)

LyCORIS and kohya train with ‖Q‖ limited to alpha · out over all blocks, and without a limit if alpha is 0. ComfyUI (as of
0.33) takes alpha itself for the limit and ignores `rescale`, so it shows files with either a little differently. PEFT's
`use_cayley_neumann`, its default, cuts the transform's series off; `coft` limits each block's ‖Q‖.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isqrt, prod, sqrt

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.lora.adapters import AdapterFacts, Shapes, require_parts, shapes_error
from sigmascope.lora.kinds.base_change import BaseChange
from sigmascope.lora.linalg import at_least_float32

_SKEW_EPSILON = 1e-8  # the guard of LyCORIS and ComfyUI against a division by zero
_PEFT_TERMS = 5  # PEFT's default for `num_cayley_neumann_terms`
_PEFT_EPS = 6e-5  # and for `eps`
_MOST_PARTS = 4  # of a fused matrix: query, key, value and feed-forward


class OftChange(BaseChange):
    """Rotations of rows: `oft_blocks` or `oft_diag`, and `rescale` (out, 1, …)."""

    kind = "oft"
    roles = ("oft_blocks", "oft_diag", "rescale")
    lycoris_keys = True

    @classmethod
    def fits(cls, shapes: Shapes) -> bool:
        """Three axes; BOFT's blocks have four."""
        return "oft_diag" in shapes or len(shapes.get("oft_blocks", ())) != 4

    @classmethod
    def facts(cls, shapes: Shapes) -> AdapterFacts:
        """Nothing but that the blocks are square: they tell the weight's rows, and not its shape."""
        names = [name for name in ("oft_blocks", "oft_diag") if name in shapes]
        require_parts(shapes, *(names or ["oft_blocks"]))
        _require_square(shapes, 3, *names)
        return AdapterFacts((), None)

    def product(self, compute: torch.dtype, base: Tensor | None) -> Tensor:
        """Rescale · Rᵀ·W − W."""
        assert base is not None
        if "oft_diag" in self.parts:
            rotations = self.part("oft_diag", compute)
        else:
            rotations = cayley(self.part("oft_blocks", compute), (self.alpha or 0.0) * len(base))
        self.require(
            prod(rotations.shape[:2]) == len(base), f"OFT of {prod(rotations.shape[:2])} outputs", base
        )
        change = turned_rows(base, rotations, 1.0)
        return rescaled(self, compute, base, change)

    @property
    def is_identity(self) -> bool:
        """Where no block turns and no row is rescaled."""
        return super().is_identity or (
            turns_nothing(self._blocks, is_rotation="oft_diag" in self.parts)
            and is_ones(self.parts, "rescale")
        )

    @property
    def outputs(self) -> int:
        """Blocks times their rows."""
        return prod(self._blocks.shape[:2])

    @property
    def _blocks(self) -> Tensor:
        return self.parts["oft_diag" if "oft_diag" in self.parts else "oft_blocks"]

    def of_rows(self, sizes: Sequence[int], index: int) -> "OftChange | None":
        """The blocks of these rows, with the limit that they have among all; None if a block has rows of two parts."""
        blocks = self._blocks
        first, size = sum(sizes[:index]), blocks.shape[1]
        if first % size or sizes[index] % size:
            return None
        if "oft_blocks" in self.parts:
            blocks = limited_blocks(blocks, (self.alpha or 0.0) * self.outputs)
        rows = slice(first, first + sizes[index])
        name = "oft_diag" if "oft_diag" in self.parts else "oft_blocks"
        parts = {name: blocks[first // size : rows.stop // size].clone()} | rescale_of_rows(self.parts, rows)
        return replace(self, parts=parts, alpha=None, weight_shape=())


class SplitOftChange(BaseChange):
    """Rotations of the rows of each part of a fused matrix: `oft_blocks.0` and on, each with its own limit."""

    kind = "oft"
    roles = tuple(f"oft_blocks.{part}" for part in range(_MOST_PARTS))

    @classmethod
    def facts(cls, shapes: Shapes) -> AdapterFacts:
        """Nothing but that the blocks are square, and no part is missing."""
        _require_square(shapes, 3, *(name for name in cls.roles if name in shapes))
        require_parts(shapes, *cls.roles[: len(shapes)])
        return AdapterFacts((), None)

    def product(self, compute: torch.dtype, base: Tensor | None) -> Tensor:
        """Rᵀ·W − W in each part's rows."""
        assert base is not None
        parts = [self.part(name, compute) for name in self.roles if name in self.parts]
        rows = [prod(blocks.shape[:2]) for blocks in parts]
        self.require(sum(rows) == len(base), f"OFT of {sum(rows)} outputs", base)
        limits = [(self.alpha or 0.0) * count for count in rows]
        return torch.cat(
            [
                turned_rows(weight, cayley(blocks, limit), 1.0)
                for weight, blocks, limit in zip(torch.split(base, rows), parts, limits, strict=True)
            ]
        )

    @property
    def is_identity(self) -> bool:
        """Where no block of any part turns."""
        return super().is_identity or all(map(turns_nothing, self.parts.values()))

    @property
    def outputs(self) -> int:
        """Of all parts."""
        return sum(self._heights)

    @property
    def _heights(self) -> list[int]:
        return [prod(self.parts[name].shape[:2]) for name in self.roles if name in self.parts]

    def of_rows(self, sizes: Sequence[int], index: int) -> OftChange | None:
        """The part's own blocks and limit."""
        if self._heights != list(sizes):
            return None
        return OftChange({"oft_blocks": self.parts[self.roles[index]]}, self.scale, alpha=self.alpha)


class PeftOftChange(BaseChange):
    """Rotations of columns: `oft_R`, one for each block or one for all of them."""

    kind = "oft"
    roles = ("oft_R",)

    @classmethod
    def facts(cls, shapes: Shapes) -> AdapterFacts:
        """Nothing but that there are as many values as a triangle has."""
        shape = shapes["oft_R"]
        if len(shape) != 2 or _side(shape[1]) * (_side(shape[1]) - 1) // 2 != shape[1] or not shape[0]:
            raise shapes_error(shapes, "oft_R")
        return AdapterFacts((), None)

    def product(self, compute: torch.dtype, base: Tensor | None) -> Tensor:
        """W·Rᵀ − W."""
        assert base is not None
        triangles = self.part("oft_R", compute)
        blocks, size = len(triangles), _side(triangles.shape[1])
        columns = base.flatten(1)
        shares = blocks == 1 and columns.shape[1] % size == 0
        self.require(shares or blocks * size == columns.shape[1], f"OFT of {blocks * size} inputs", base)
        upper = torch.zeros(blocks, size, size, dtype=compute, device=triangles.device)
        rows, columns_of = torch.triu_indices(size, size, 1)
        upper[:, rows, columns_of] = triangles
        rotations = self._rotations(upper - upper.mT)
        turned = columns.reshape(len(base), -1, size)
        whole: Tensor = torch.einsum("obk,bck->obc", turned, rotations.expand(turned.shape[1], -1, -1))
        return whole.reshape(base.shape) - base

    @property
    def is_identity(self) -> bool:
        """Where all triangles are zero."""
        return super().is_identity or not bool(self.parts["oft_R"].any())

    def of_rows(self, sizes: Sequence[int], index: int) -> "PeftOftChange":
        """The same: each row is turned by itself."""
        return self

    def _rotations(self, skew: Float[Tensor, "k b b"]) -> Float[Tensor, "k b b"]:
        if self.setting("coft", False):
            limit = self.setting("eps", _PEFT_EPS) / sqrt(len(skew))
            lengths = torch.linalg.vector_norm(skew, dim=(1, 2), keepdim=True)
            skew = torch.where(lengths <= limit, skew, skew * (limit / lengths))
        identity = torch.eye(skew.shape[-1], dtype=skew.dtype, device=skew.device)
        if not self.setting("use_cayley_neumann", True):
            exact: Tensor = torch.linalg.solve(identity + skew, identity - skew, left=False)
            return exact
        return _neumann(skew, identity, int(self.setting("num_cayley_neumann_terms", _PEFT_TERMS)))


def _neumann(
    skew: Float[Tensor, "k b b"], identity: Float[Tensor, "b b"], terms: int
) -> Float[Tensor, "k b b"]:
    """I + 2Q + 2Q² + … + Qⁿ⁻¹ for n terms, as PEFT (0.21) sums it: three terms are four there."""
    if terms < 2:
        return identity.expand_as(skew)
    last = 1 if terms == 2 else max(terms - 1, 3)
    total, power = identity + 2.0 * skew, skew
    for exponent in range(2, last + 1):
        power = power @ skew
        total = total + (1.0 if exponent == last else 2.0) * power
    return total


def _side(triangle: int) -> int:
    """The side of a matrix whose upper triangle has that many values."""
    return (1 + isqrt(1 + 8 * triangle)) // 2


def cayley(blocks: Float[Tensor, "... b b"], limit: float) -> Float[Tensor, "... b b"]:
    """The rotation of each block.

    Args:
        blocks: Any matrices B; only their skew part counts.
        limit: The largest ‖Q‖ over all blocks; no limit if it is not above 0.
    """
    skew = blocks - blocks.mT
    skew = skew * _limited(skew, limit)
    identity = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)
    rotation: Tensor = torch.linalg.solve(identity - skew, identity + skew, left=False)
    return rotation


def _limited(skew: Float[Tensor, "... b b"], limit: float) -> float:
    """What a limit of ‖Q‖ multiplies Q by; 1 if it is not above 0."""
    length = float(torch.linalg.vector_norm(skew)) + _SKEW_EPSILON
    return limit / length if 0.0 < limit < length else 1.0


def limited_blocks(blocks: Float[Tensor, "... b b"], limit: float) -> Float[Tensor, "... b b"]:
    """Blocks that need no limit on ‖Q‖ any more."""
    wide = blocks.to(at_least_float32(blocks.dtype))
    return wide * _limited(wide - wide.mT, limit)


def rescale_of_rows(parts: Mapping[str, Tensor], rows: slice) -> dict[str, Tensor]:
    """A change's `rescale` of some rows, where it has one."""
    return {name: part.flatten()[rows, None] for name, part in parts.items() if name == "rescale"}


def turned_rows(
    weight: Float[Tensor, "out ..."], rotations: Float[Tensor, "k b b"], strength: float
) -> Float[Tensor, "out ..."]:
    """Strength · (Rᵀ − I)·W, block by block of b rows."""
    count, size = rotations.shape[:2]
    identity = torch.eye(size, dtype=rotations.dtype, device=rotations.device)
    turned: Tensor = (strength * (rotations - identity)).mT @ weight.reshape(count, size, -1)
    return turned.reshape(weight.shape)


def turns_nothing(blocks: Float[Tensor, "... b b"], *, is_rotation: bool = False) -> bool:
    """Whether blocks are those of no turn: only their skew part counts, unless they are the rotations themselves."""
    if is_rotation:
        return bool((blocks == torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)).all())
    return torch.equal(blocks, blocks.mT)


def is_ones(parts: Mapping[str, Tensor], name: str) -> bool:
    """Whether a part is all ones, or is not there."""
    return name not in parts or bool((parts[name] == 1).all())


def rescaled(change: BaseChange, compute: torch.dtype, weight: Tensor, delta: Tensor) -> Tensor:
    """ΔW once the rows of W + ΔW are multiplied by a change's `rescale`, where it has one."""
    if "rescale" not in change.parts:
        return delta
    factors = change.part("rescale", compute).flatten()
    change.require(len(factors) == len(weight), f"a rescale of {len(factors)} outputs", weight)
    return (weight + delta) * factors.reshape(-1, *(1 for _ in weight.shape[1:])) - weight


def _require_square(shapes: Shapes, axes: int, *names: str) -> None:
    for name in names:
        shape = shapes[name]
        if len(shape) != axes or shape[-1] != shape[-2] or min(shape) < 1:
            raise shapes_error(shapes, name)
