"""XXH3 by torch against the xxhash package."""

import pytest
import torch
import xxhash

from sigmascope.probes.fingerprints import PIECE_BYTES, block_sums, digests


def reference(words: torch.Tensor) -> list[int]:
    return [xxhash.xxh3_64_intdigest(piece.numpy().tobytes()) for piece in words]


@pytest.mark.parametrize("pieces", [1, 3])
def test_random_bytes_hash_as_the_xxhash_package_says(pieces: int) -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (pieces, PIECE_BYTES // 8))
    assert digests(block_sums(words)).tolist() == reference(words)


@pytest.mark.parametrize("value", [0, -1, 2**63 - 1, -(2**63)])
def test_words_at_the_ends_of_their_range_hash_as_the_xxhash_package_says(value: int) -> None:
    words = torch.full((1, PIECE_BYTES // 8), value)
    assert digests(block_sums(words)).tolist() == reference(words)


def test_more_pieces_than_are_summed_at_once_hash_alike() -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (65, PIECE_BYTES // 8))
    assert digests(block_sums(words)).tolist() == reference(words)
