"""The growing basis K of a block Krylov iteration, its image A·K, and what lies in it."""

from typing import Final

import torch
from torch import Tensor

from sigmascope.lora.small_matrices import orthonormal, symmetric_eigen, whitening

_DEPENDENT: Final = 0.02
"""A new block that leans on the old ones more than this is made orthogonal again."""


class KrylovBasis:
    """Blocks of orthonormal columns, their images under A, and the Gram matrices of both in float32.

    The blocks are rounded to A's dtype before A is applied, and those rounded blocks are the basis: what is
    computed from it holds for it exactly, however far from orthogonal rounding has brought it.

    Args:
        matrix: A, (m, n), in the dtype of the iterations.
        most: The largest number of columns that will be added.
    """

    def __init__(self, matrix: Tensor, most: int) -> None:
        rows, columns = matrix.shape
        self._matrix = matrix
        self._wide = torch.promote_types(matrix.dtype, torch.float32)
        self._columns = torch.empty(columns, most, dtype=self._wide, device=matrix.device)
        self._images = torch.empty(rows, most, dtype=self._wide, device=matrix.device)
        self._gram = torch.zeros(most, most, dtype=self._wide, device=matrix.device)
        self._image_gram = torch.zeros_like(self._gram)
        self.size = 0

    @property
    def room(self) -> int:
        """How many more columns fit."""
        return self._columns.shape[1] - self.size

    def add(self, block: Tensor) -> Tensor:
        """Take orthonormal columns (n, b) in and give their images A·block, (m, b)."""
        new = slice(self.size, self.size + block.shape[1])
        rounded = block.to(self._matrix.dtype)
        self._columns[:, new] = rounded
        self._images[:, new] = self._matrix @ rounded
        self.size = new.stop
        for gram, vectors in ((self._gram, self._columns), (self._image_gram, self._images)):
            products = vectors[:, new].mT @ vectors[:, : self.size]
            gram[new, : self.size] = products
            gram[: self.size, new] = products.mT
        return self._images[:, new]

    def next_block(self, image: Tensor) -> Tensor:
        """Aᵀ·image without what the basis already holds, orthonormal; fewer columns where little is new."""
        left = orthonormal(image).to(self._matrix.dtype)
        # (Uᵀ A)ᵀ and not Aᵀ U: several times as fast in bfloat16 on a CPU, where A lies row by row.
        grown = (left.mT @ self._matrix).mT.to(self._wide)
        held = self._columns[:, : self.size]
        block = orthonormal(grown - held @ (held.mT @ grown))
        overlap = held.mT @ block
        if float(overlap.abs().max()) > _DEPENDENT:
            block = orthonormal(block - held @ overlap)
        return block[:, : self.room]

    def captured(self, rank: int) -> float:
        """Σ of the `rank` largest squared singular values of A restricted to the basis."""
        values, _ = self._ritz()
        return float(values[:rank].double().sum())

    def best(self, rank: int) -> tuple[Tensor, float]:
        """The `rank` vectors (n, r) of the basis with the largest images, orthonormal, and their energy."""
        values, coefficients = self._ritz()
        vectors: Tensor = self._columns[:, : self.size] @ coefficients[:, :rank]
        return vectors, float(values[:rank].double().sum())

    def _ritz(self) -> tuple[Tensor, Tensor]:
        """Maximise ‖A K x‖² / ‖K x‖² over the basis K: values, falling, and coefficients x as columns."""
        used = slice(0, self.size)
        white = whitening(self._gram[used, used])
        projected = white.mT @ self._image_gram[used, used] @ white
        values, vectors = symmetric_eigen((projected + projected.mT) / 2)
        return values.clamp_min(0.0), white @ vectors
