"""XXH3 (64 bits, no seed) of many pieces of equal length at once, by integer operations of torch.

What the `xxhash` package computes on the CPU, for bytes that lie on an accelerator and shall stay there. XXH3 reads
a piece in blocks of 1 KiB, 16 stripes of eight 64-bit words each. Within a block it only adds, so that all blocks
of all pieces are summed side by side; only their eight sums a block are then scrambled one after another.

Y. Collet, xxHash fast digest algorithm, XXH3 for inputs longer than 240 bytes:
https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from typing import Final

import numpy as np
import torch
from jaxtyping import Int64, UInt64
from torch import Tensor

PIECE_BYTES: Final = 1 << 18
"""Long enough for the CPU's hash to run at the speed of memory, short enough for many to a layer."""

_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64: Final = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_AVALANCHE: Final = 0x165667919E3779F9
_START: Final = (_PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0])
_LOW: Final = 0xFFFFFFFF
_WORDS, _STRIPES, _BLOCK_WORDS = 8, 16, 128
_BLOCKS: Final = PIECE_BYTES // (8 * _BLOCK_WORDS)
_LAST_STRIPE: Final = 192 - 64 - 7
_PIECES_AT_ONCE: Final = 64  # 16 MiB of weights, and a few times that for what is computed of them


def block_sums(words: Int64[Tensor, "pieces words"]) -> Int64[Tensor, "pieces blocks 8"]:
    """What each block of each piece adds to the eight accumulators, modulo 2⁶⁴.

    Args:
        words: (pieces, PIECE_BYTES / 8), the little-endian words of each piece, on any device.
    """
    parts = range(0, words.shape[0], _PIECES_AT_ONCE)
    return torch.cat([_piece_sums(words[start : start + _PIECES_AT_ONCE]) for start in parts])


def digests(sums: Int64[Tensor, "pieces blocks 8"]) -> UInt64[np.ndarray, " pieces"]:
    """The hash of each piece from its blocks' sums. Copies eight numbers a piece to the CPU."""
    device = sums.device
    state = torch.tensor([_signed(one) for one in _START], device=device).repeat(sums.shape[0], 1)
    secret = torch.tensor([_signed(_word(128 + 8 * i)) for i in range(_WORDS)], device=device)
    for block in range(_BLOCKS - 1):
        state = state + sums[:, block]
        state = (state ^ ((state >> 47) & 0x1FFFF) ^ secret) * _PRIME32[0]
    state = state + sums[:, -1]
    return _merged(state.cpu().numpy().view(np.uint64))


def _piece_sums(words: Tensor) -> Tensor:
    blocks = words.reshape(-1, _BLOCKS, _STRIPES, _WORDS)
    usual, final = _keys(words.device)
    return torch.cat([_sums(blocks[:, :-1], usual), _sums(blocks[:, -1:], final)], dim=1)


def _sums(blocks: Tensor, keys: Tensor) -> Tensor:
    keyed = blocks ^ keys
    products = (keyed & _LOW) * ((keyed >> 32) & _LOW)
    plain = blocks.sum(2)
    neighbours = plain.view(*plain.shape[:2], _WORDS // 2, 2).flip(-1).view(plain.shape)
    return neighbours + products.sum(2)


def _keys(device: torch.device) -> Tensor:
    """(2, 16, 8): the secret for any block of a piece, and for its last one, whose last stripe has its own."""
    usual = [[_signed(_word(8 * stripe + 8 * i)) for i in range(_WORDS)] for stripe in range(_STRIPES)]
    final = [_signed(_word(_LAST_STRIPE + 8 * i)) for i in range(_WORDS)]
    return torch.tensor([usual, [*usual[:-1], final]], device=device)


def _merged(state: UInt64[np.ndarray, "pieces 8"]) -> UInt64[np.ndarray, " pieces"]:
    result = np.full(len(state), PIECE_BYTES * _PRIME64[0] & (1 << 64) - 1, np.uint64)
    for pair in range(4):
        one = state[:, 2 * pair] ^ np.uint64(_word(11 + 16 * pair))
        other = state[:, 2 * pair + 1] ^ np.uint64(_word(19 + 16 * pair))
        result += _folded_product(one, other)
    result ^= result >> np.uint64(37)
    result *= np.uint64(_AVALANCHE)
    mixed: UInt64[np.ndarray, " pieces"] = result ^ (result >> np.uint64(32))
    return mixed


def _folded_product(
    one: UInt64[np.ndarray, " pieces"], other: UInt64[np.ndarray, " pieces"]
) -> UInt64[np.ndarray, " pieces"]:
    """The two halves of the 128-bit product, combined by exclusive or."""
    low, shift = np.uint64(_LOW), np.uint64(32)
    a, b, c, d = one >> shift, one & low, other >> shift, other & low
    middle = (b * d >> shift) + (a * d & low) + b * c
    high = a * c + (a * d >> shift) + (middle >> shift)
    folded: UInt64[np.ndarray, " pieces"] = (one * other) ^ high
    return folded


def _word(offset: int) -> int:
    return int.from_bytes(_SECRET[offset : offset + 8], "little")


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
