"""Intruder dimensions: strong singular vectors that a LoRA brings into a weight and that the weight did not have.

Of the `EXAMINED` strongest left singular vectors y of W + ΔW, those are intruders whose cosine to every left singular
vector u of W is below `THRESHOLD` (Shuttleworth et al., arXiv 2410.21228, algorithm 1 with k = 10 and ε = 0.5). The paper
finds that LoRAs with many of them forget more of what the model knew.

No full decomposition is needed to tell. The strongest vectors of both matrices come from block Lanczos iteration. What of y
is not in those of W, y', is spread over the others with masses (u·y')². No mass at an eigenvalue x of WWᵀ exceeds the
Christoffel function 1 / Σⱼ pⱼ(x)² of the polynomials pⱼ that are orthonormal in these masses, which Lanczos iteration from
y' gives (Golub and Meurant, Matrices, Moments and Quadrature, 2010). So a few steps prove an intruder. Where they prove
neither, both matrices are decomposed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.checkpoints import Checkpoint
from sigmascope.errors import NonFiniteError, SigmascopeError
from sigmascope.lora.adapters import form_delta
from sigmascope.lora.arrival import changed_matrices
from sigmascope.lora.layer_names import WEIGHT, block_of_module, block_position
from sigmascope.lora.parallel import run_layers_in_order
from sigmascope.lora.reader import open_lora
from sigmascope.progress import Progress, no_progress

__all__ = [
    "EXAMINED",
    "THRESHOLD",
    "Intruders",
    "by_block",
    "intruder_dimensions",
    "intruders_of",
    "together",
]

EXAMINED: Final = 10
"""How many of the strongest singular vectors are looked at."""
THRESHOLD: Final = 0.5
"""The cosine below which a vector is new."""
_DECOMPOSED_SIDE: Final = 512
"""Up to this shorter side, the full decomposition is as quick."""
_BLOCK: Final = 16
_MOST_BLOCKS: Final = 24
_COMPARED: Final = 24
"""Singular vectors of W that are compared directly."""
_RESOLVED: Final = 0.02
"""The largest residual of a vector, as a share of the gap between its eigenvalue and the next, that is taken for exact."""
_MOST_STEPS: Final = 96
_EXACT: Final = 1e-5
"""The largest residual of a Ritz vector, as a share of WWᵀ's eigenvalues, that is taken for a singular vector."""
_ROUNDING: Final = 1e-6
_BETWEEN_NODES: Final = 16


@dataclass(frozen=True, slots=True)
class Intruders:
    """What a LoRA brings into one weight, or into several.

    Attributes:
        count: How many intruders there are.
        examined: Of how many of the strongest singular vectors.
        energy: Σσ² of the intruders.
        of_energy: Σσ² of all those examined.
        unavailable: Why nothing is known, if so, and what to do.
    """

    count: int = 0
    examined: int = 0
    energy: float = 0.0
    of_energy: float = 0.0
    unavailable: str | None = None

    @property
    def share(self) -> float | None:
        """The intruders' share of the energy of the strongest directions, 0 to 1; None if nothing is known."""
        return self.energy / self.of_energy if self.of_energy > 0.0 else None

    def as_dict(self) -> dict[str, Any]:
        """The figures as JSON values."""
        known = self.unavailable is None
        return {
            "intruders": self.count if known else None,
            "examined": self.examined if known else None,
            "share": self.share,
            "unavailable": self.unavailable,
        }


def together(several: Iterable[Intruders]) -> Intruders:
    """The sums over weights of which something is known."""
    known = [one for one in several if one.unavailable is None]
    return Intruders(
        sum(one.count for one in known),
        sum(one.examined for one in known),
        sum(one.energy for one in known),
        sum(one.of_energy for one in known),
        None if known else "no weight could be read",
    )


def by_block(intruders: Mapping[str, Intruders]) -> dict[str, Intruders]:
    """The sums over each block's weights, in the order in which a latent passes the blocks."""
    blocks: dict[str, list[Intruders]] = {}
    for key, one in intruders.items():
        blocks.setdefault(block_of_module(key.removesuffix(WEIGHT)), []).append(one)
    return {name: together(blocks[name]) for name in sorted(blocks, key=block_position)}


def intruder_dimensions(
    lora: str | PathLike[str], base: Checkpoint, *, strength: float = 1.0, progress: Progress = no_progress
) -> Mapping[str, Intruders]:
    """Count the intruder dimensions of each weight that a LoRA changes, by the weight's key.

    Args:
        lora: A file of any format.
        base: The open checkpoint; only the weights that the LoRA changes are read, a few at a time.
        strength: Of the LoRA.
        progress: Told after each weight.

    Raises:
        CheckpointError: The file is missing, damaged, or no file of tensors.
        LoraFormatError: It follows no known format.
    """
    found: dict[str, Intruders] = {}
    with open_lora(Path(lora), allow_broken=True) as file:
        changed = changed_matrices(file, base)

        def counted(name: str) -> Intruders:
            try:
                weight = base.tensor(changed.keys[name]).to(torch.float32)
                delta = form_delta(name, changed.lora.change(name), weight).reshape(len(weight), -1)
                return intruders_of(weight.reshape(delta.shape), delta.mul_(strength))
            except (SigmascopeError, ImportError) as error:
                return Intruders(unavailable=str(error).rstrip("."))

        for name, one in run_layers_in_order(changed.sizes, counted):
            found[changed.keys[name]] = one
            progress(len(found), len(changed.sizes), changed.keys[name])
    return found


def intruders_of(weight: Float[Tensor, "m n"], delta: Float[Tensor, "m n"]) -> Intruders:
    """Count the intruder dimensions of one change of one weight.

    Args:
        weight: W in float32.
        delta: ΔW in float32.

    Raises:
        NonFiniteError: W + ΔW holds NaN or Inf.
    """
    changed = weight + delta
    if not bool(torch.isfinite(changed).all()):
        raise NonFiniteError("W + ΔW holds NaN or Inf.")
    if min(weight.shape) > _DECOMPOSED_SIDE:
        found = _told_by_lanczos(weight, changed)
        if found is not None:
            return found
    return _told_by_decomposing(weight, changed)


def _told_by_decomposing(weight: Float[Tensor, "m n"], changed: Float[Tensor, "m n"]) -> Intruders:
    own, _, _ = torch.linalg.svd(weight, full_matrices=False)
    vectors, values, _ = torch.linalg.svd(changed, full_matrices=False)
    cosines = (own.mT @ vectors[:, :EXAMINED]).abs().amax(dim=0)
    return _summed(values[:EXAMINED].square(), cosines < THRESHOLD)


def _told_by_lanczos(weight: Float[Tensor, "m n"], changed: Float[Tensor, "m n"]) -> Intruders | None:
    """The same without a full decomposition; None if the iterations do not tell."""
    new = _leading(changed, EXAMINED)
    if not bool(new.resolved.all()):
        return None
    own = _leading(weight, _COMPARED)
    known = own.vectors[:, own.resolved]
    inner = known.mT @ new.vectors
    alike = (inner.abs() >= THRESHOLD).any(dim=0)
    told = alike.tolist()
    for position, is_alike in enumerate(told):
        rest = new.vectors[:, position] - known @ inner[:, position]
        if not is_alike and float(rest.square().sum()) >= THRESHOLD**2:
            is_spread = _is_spread(weight, rest)
            if is_spread is None:
                return None
            told[position] = not is_spread
    return _summed(new.values.square(), ~torch.tensor(told))


def _summed(energies: Float[Tensor, " k"], is_new: Tensor) -> Intruders:
    energies = energies.to(torch.float64)
    is_new = is_new.to(energies.device)
    return Intruders(int(is_new.sum()), len(energies), float(energies[is_new].sum()), float(energies.sum()))


class _Leading(NamedTuple):
    """The strongest left singular vectors of a matrix.

    Attributes:
        values: (k,), falling.
        vectors: (m, k).
        resolved: (k,), whether each is told from its neighbours.
    """

    values: Tensor
    vectors: Tensor
    resolved: Tensor


def _leading(matrix: Float[Tensor, "m n"], count: int) -> _Leading:
    """The `count` strongest left singular vectors by block Lanczos iteration with A = MMᵀ and full orthogonalisation."""
    rows = matrix.shape[0]
    generator = torch.Generator().manual_seed(0)  # the same bits in each run
    block = torch.linalg.qr(torch.randn(rows, _BLOCK, generator=generator).to(matrix)).Q
    basis, images = matrix.new_empty(rows, 0), matrix.new_empty(matrix.shape[1], 0)
    found = None
    for number in range(min(_MOST_BLOCKS, min(matrix.shape) // _BLOCK)):
        image = matrix.mT @ block
        basis, images = torch.cat([basis, block], dim=1), torch.cat([images, image], dim=1)
        if basis.shape[1] >= 2 * count and number % 4 == 3:
            found = _ritz(matrix, basis, images, count)
            if bool(found.resolved.all()):
                break
        block = matrix @ image
        for _ in range(2):  # the second time takes out what rounding has left
            block = block - basis @ (basis.mT @ block)
        block = torch.linalg.qr(block).Q
    return _ritz(matrix, basis, images, count) if found is None else found


def _ritz(matrix: Tensor, basis: Tensor, images: Tensor, count: int) -> _Leading:
    energies, turn = torch.linalg.eigh((images.mT @ images).to(torch.float64))
    energies, turn = energies.flip(0), turn.flip(1)[:, :count].to(basis)
    vectors = basis @ turn
    strong = energies[:count].clamp_min(0.0).to(basis)
    residual = torch.linalg.vector_norm(matrix @ (images @ turn) - vectors * strong, dim=0)
    falls = (energies[:count] - energies[1 : count + 1]).to(basis)
    gaps = torch.minimum(falls, torch.cat([falls.new_full((1,), torch.inf), falls[:-1]]))
    return _Leading(strong.sqrt(), vectors, residual <= _RESOLVED * gaps)


def _is_spread(weight: Float[Tensor, "m n"], start: Float[Tensor, " m"]) -> bool | None:
    """Whether a vector's cosine to every left singular vector is below the threshold; None if the steps do not tell.

    Args:
        weight: W.
        start: The vector, or the part of it that is in question. Its length counts.
    """
    length = float(torch.linalg.vector_norm(start))
    basis = (start / length).unsqueeze(0)
    diagonal: list[float] = []
    beside: list[float] = []
    for step in range(1, _MOST_STEPS + 1):
        image = weight @ (weight.mT @ basis[-1])
        diagonal.append(float(image @ basis[-1]))
        for _ in range(2):
            image = image - basis.mT @ (basis @ image)
        beside.append(float(torch.linalg.vector_norm(image)))
        exhausted = beside[-1] <= _ROUNDING * max(diagonal)
        if exhausted:
            return _masses(diagonal, beside).heaviest < (THRESHOLD / length) ** 2
        if step % 4 == 0:
            masses = _masses(diagonal, beside)
            if length * masses.most**0.5 < THRESHOLD:
                return True
            if length * masses.heaviest**0.5 >= THRESHOLD and masses.residual <= _EXACT * max(diagonal):
                return False
        basis = torch.cat([basis, (image / beside[-1]).unsqueeze(0)])
    return None


class _Masses(NamedTuple):
    """How a vector is spread over the eigenvectors of a matrix, as far as some steps of Lanczos iteration tell.

    Attributes:
        most: What no eigenvector exceeds.
        heaviest: The mass of the Ritz vector that has the most.
        residual: Of that Ritz vector.
    """

    most: float
    heaviest: float
    residual: float


def _masses(diagonal: list[float], beside: list[float]) -> _Masses:
    """The masses of a start of length 1. What has the eigenvalue 0 is no singular vector's, and is left out.

    Args:
        diagonal: Of the tridiagonal matrix that Lanczos iteration gives.
        beside: The values beside the diagonal; the last leads out of the matrix.
    """
    size = len(diagonal)
    tridiagonal = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    steps = torch.tensor(beside[: size - 1], dtype=torch.float64)
    nodes, vectors = torch.linalg.eigh(tridiagonal + torch.diag(steps, 1) + torch.diag(steps, -1))
    residuals = beside[-1] * vectors[-1].abs()
    # Between a node of all the mass at 0 and the next there is no more than the next one's (Chebyshev, Markov, Stieltjes).
    first = int(bool((nodes[0] <= 3.0 * _EXACT * nodes[-1]) & (residuals[0] <= _EXACT * nodes[-1])))
    if first == size:
        return _Masses(0.0, 0.0, 0.0)
    masses = vectors[0, first:].square()
    shares = torch.linspace(0.0, 1.0, _BETWEEN_NODES + 1, dtype=torch.float64)[:-1]
    between = nodes[first:-1, None] + nodes[first:].diff()[:, None] * shares
    points = torch.cat([between.flatten(), nodes[-1:]])
    before, last = torch.zeros_like(points), torch.ones_like(points)
    total = last.square()
    for index in range(size - 1):
        back = beside[index - 1] * before if index else 0.0
        before, last = last, ((points - diagonal[index]) * last - back) / beside[index]
        total += last.square()
    heaviest = int(masses.argmax())
    most = max(float((1.0 / total).max()), float(masses[heaviest]))
    return _Masses(most, float(masses[heaviest]), float(residuals[first + heaviest]))
