"""Rotations of a weight's rows: OFT (Qiu et al., arXiv 2306.07280) and BOFT (Liu et al., arXiv 2311.06243).

A block's rotation is the Cayley transform of a skew matrix, R = (I + Q)(I − Q)⁻¹ with Q = B − Bᵀ, whose length is
limited by the stored alpha. ComfyUI's way of applying them is followed, strengths included.
"""

import torch
from jaxtyping import Float
from torch import Tensor

_LEAST = 1e-8  # ComfyUI's guard against a division by zero


def cayley(blocks: Float[Tensor, "... b b"], limit: float) -> Float[Tensor, "... b b"]:
    """The rotation of each block.

    Args:
        blocks: Any matrices B; only their skew part counts.
        limit: Of ‖Q‖ over all blocks; none if it is not above 0.
    """
    skew = blocks - blocks.mT
    length = float(torch.linalg.vector_norm(skew)) + _LEAST
    if 0.0 < limit < length:
        skew = skew * (limit / length)
    identity = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)
    rotation: Tensor = torch.linalg.solve(identity - skew, identity + skew, left=False)
    return rotation


def oft_change(
    weight: Float[Tensor, "out ..."], blocks: Float[Tensor, "k b b"], limit: float, strength: float
) -> Float[Tensor, "out ..."]:
    """s·(Rᵀ − I)·W, block by block of b rows, before the strength that all kinds are multiplied with.

    ComfyUI lets the strength into the rotation and multiplies the change with it again; a stored rescale is not
    looked at there.
    """
    count, size = blocks.shape[:2]
    rotation = cayley(blocks, limit)
    identity = torch.eye(size, dtype=blocks.dtype, device=blocks.device)
    rows = weight.reshape(count, size, -1)
    turned: Tensor = (strength * (rotation - identity)).mT @ rows
    return turned.reshape(weight.shape)


def boft_change(
    weight: Float[Tensor, "out ..."],
    blocks: Float[Tensor, "m k b b"],
    rescale: Tensor | None,
    limit: float,
    strength: float,
) -> Float[Tensor, "out ..."]:
    """(Π Rᵢ)·W − W over m butterfly stages, in which rows are regrouped, before the strength of all kinds.

    Each stage's rotation is s·R + (1 − s)·I.
    """
    stages, _, size, _ = blocks.shape
    rotations = cayley(blocks, limit)
    identity = torch.eye(size, dtype=blocks.dtype, device=blocks.device)
    rows = weight.reshape(weight.shape[0], -1)
    for stage in range(stages):
        apart = 2**stage * (size // 2)
        grouped = rows.reshape(-1, 2, apart, rows.shape[1]).transpose(1, 2).reshape(-1, size, rows.shape[1])
        turned = (strength * rotations[stage] + (1.0 - strength) * identity) @ grouped
        rows = turned.reshape(-1, apart, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
    changed = rows.reshape(weight.shape)
    return (changed if rescale is None else changed * rescale) - weight
