"""The rules of PyTorch's caching allocator (c10/cuda/CUDACachingAllocator.cpp), without a device.

Requests are rounded to 512 bytes and served by the smallest free block of their pool that fits; what is left of it is split
off. Where none fits, a segment is taken from the device. Freed blocks join their free neighbours; segments never go back.
"""

_MIB = 2**20
_SMALL = _MIB


class Block:
    """A part of a segment; `before` and `after` are its neighbours there."""

    __slots__ = ("after", "before", "is_free", "is_small", "size")

    def __init__(self, size: int, *, is_small: bool) -> None:
        self.size = size
        self.is_small = is_small
        self.is_free = True
        self.before: Block | None = None
        self.after: Block | None = None


class CachingAllocator:
    """Bytes given out and bytes taken from the device, with their peaks."""

    def __init__(self) -> None:
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self._free: dict[Block, None] = {}

    def allocate(self, nbytes: int) -> Block:
        """A block for so many bytes, at least 512."""
        size = max(512, -(-nbytes // 512) * 512)
        small = size <= _SMALL
        fitting = [one for one in self._free if one.is_small is small and one.size >= size]
        block = min(fitting, key=lambda one: one.size) if fitting else self._segment(size, small)
        self._free.pop(block, None)
        block.is_free = False
        if block.size - size >= (512 if small else _SMALL + 1):
            self._split(block, size)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Take it back."""
        self.allocated -= block.size
        block.is_free = True
        for left, right in ((block, block.after), (block.before, block)):
            if left is not None and right is not None and left.is_free and right.is_free:
                block = self._join(left, right)
        self._free[block] = None

    def reset_peaks(self) -> None:
        """Let them begin with what is in use."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def _segment(self, size: int, small: bool) -> Block:
        taken = 2 * _MIB if small else 20 * _MIB if size < 10 * _MIB else -(-size // (2 * _MIB)) * 2 * _MIB
        self.reserved += taken
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return Block(taken, is_small=small)

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.size - size, is_small=block.is_small)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._free[rest] = None

    def _join(self, left: Block, right: Block) -> Block:
        for one in (left, right):
            self._free.pop(one, None)
        left.size += right.size
        left.after = right.after
        if right.after is not None:
            right.after.before = left
        return left
