"""The growing basis K of a block Krylov iteration, its image A·K, and what lies in it."""

from typing import Final

import torch
from torch import Tensor

from sigmascope.lora.numerics.small_matrices import orthonormal_rows, symmetric_eigen, whitening

_DEPENDENT: Final = 0.02
"""A new block that leans on the old ones more than this is made orthogonal again."""


class KrylovBasis:
    """Blocks of orthonormal vectors, their images under A, and the Gram matrices of both in float32.

    The blocks are rounded to A's dtype before A is applied, and those rounded blocks are the basis: what is
    computed from it holds for it exactly, however far from orthogonal rounding has brought it. Vectors are kept
    as rows, which lie together in memory.

    Args:
        matrix: A, (m, n), in the dtype of the iterations.
        most: The largest number of vectors that will be added.
    """

    def __init__(self, matrix: Tensor, most: int) -> None:
        rows, columns = matrix.shape
        self._matrix = matrix
        wide = torch.promote_types(matrix.dtype, torch.float32)
        self._vectors = torch.empty(most, columns, dtype=wide, device=matrix.device)
        self._images = torch.empty(most, rows, dtype=wide, device=matrix.device)
        self._gram = torch.zeros(most, most, dtype=wide, device=matrix.device)
        self._image_gram = torch.zeros_like(self._gram)
        self.size = 0
        self._found: tuple[int, Tensor, Tensor] | None = None

    @property
    def room(self) -> int:
        """How many more vectors fit."""
        return self._vectors.shape[0] - self.size

    def add(self, block: Tensor) -> Tensor:
        """Take orthonormal rows (b, n) in and give their images under A as rows, (b, m)."""
        new = slice(self.size, self.size + block.shape[0])
        rounded = block.to(self._matrix.dtype)
        self._vectors[new] = rounded
        self._images[new] = (self._matrix @ rounded.mT).mT
        self.size = new.stop
        for gram, rows in ((self._gram, self._vectors), (self._image_gram, self._images)):
            products = rows[new] @ rows[: self.size].mT
            gram[new, : self.size] = products
            gram[: self.size, new] = products.mT
        return self._images[new]

    def next_block(self, images: Tensor) -> Tensor:
        """Aᵀ·images without what the basis already holds, orthonormal rows; fewer where little is new."""
        left = orthonormal_rows(images).to(self._matrix.dtype)
        # Uᵀ·A and not Aᵀ·U: up to twice as fast in bfloat16 on a CPU, where A lies row by row.
        grown = (left @ self._matrix).to(self._vectors.dtype)
        held = self._vectors[: self.size]
        block = orthonormal_rows(torch.addmm(grown, grown @ held.mT, held, alpha=-1.0))
        overlap = block @ held.mT
        if bool((overlap.abs() > _DEPENDENT).any()):
            block = orthonormal_rows(torch.addmm(block, overlap, held, alpha=-1.0))
        return block[: self.room]

    def captured(self, rank: int) -> float:
        """Σ of the `rank` largest squared singular values of A restricted to the basis."""
        values, _ = self._ritz()
        return float(values[:rank].double().sum())

    def best(self, rank: int) -> tuple[Tensor, Tensor]:
        """The `rank` vectors (n, r) of the basis with the largest images, orthonormal, and the images (m, r)."""
        _, coefficients = self._ritz()
        chosen = coefficients[:, :rank].mT
        return (chosen @ self._vectors[: self.size]).mT, (chosen @ self._images[: self.size]).mT

    def _ritz(self) -> tuple[Tensor, Tensor]:
        """Maximise ‖A·Kx‖² / ‖Kx‖²: the values, falling, and coefficients x as columns; once for each size."""
        if self._found is None or self._found[0] != self.size:
            used = slice(0, self.size)
            white = whitening(self._gram[used, used])
            projected = white.mT @ self._image_gram[used, used] @ white
            values, turn = symmetric_eigen((projected + projected.mT) / 2)
            self._found = self.size, values.clamp_min(0.0), white @ turn
        return self._found[1:]
