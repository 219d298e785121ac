"""Blocks of the key/value cache, and the table of each sequence: which blocks hold its tokens. Host numbers only.

A sequence is identified by its row in the tables. A fork shares its parent's full blocks by reference count, and gets a
block of its own for the last, partial one. Blocks are handed out lowest number first, so that those in use stay dense.
"""

import heapq
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
Number = TypeVar("Number", int, IntArray)


def ceil_div(a: Number, b: int) -> Number:
    """a / b, rounded up."""
    return -(-a // b)


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens.

    lengths int64 [rows]: how many tokens each sequence has space for.
    tables int32 [rows, columns]: the blocks of each sequence, in its first columns; unused columns hold garbage.
    references int64 [num_blocks]: how many sequences have each block. free: a heap of the blocks that none has.
    version: how often a table has changed.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self.lengths = np.zeros(0, np.int64)
        self.tables = np.zeros((0, 8), np.int32)
        self.references = np.zeros(num_blocks, np.int64)
        self.free = list(range(num_blocks))
        self.version = 0
        self._free_rows: list[int] = []

    def blocks_of(self, row: int) -> list[int]:
        """The blocks of a sequence, in its order."""
        num_blocks = ceil_div(int(self.lengths[row]), self.block_size)
        return self.tables[row, :num_blocks].tolist()

    def block_at(self, rows: IntArray, positions: IntArray) -> IntArray:
        """The blocks [n] of tokens at these positions [n] of the sequences in these rows [n]."""
        return self.tables[rows, positions // self.block_size].astype(np.int64)

    def num_spare(self, num_tokens: int) -> int:
        """Number of blocks that would stay free if a sequence were added; negative if it does not fit."""
        return len(self.free) - ceil_div(num_tokens, self.block_size)

    def num_more(self, length: Number, num_tokens: Number) -> Number:
        """Number of further blocks that sequences of this length need for `num_tokens` more."""
        return ceil_div(length + num_tokens, self.block_size) - ceil_div(length, self.block_size)

    def is_full(self, rows: IntArray) -> NDArray[np.bool_]:
        """Whether the last block of each sequence [n] is full, so that the next token begins another one."""
        return self.lengths[rows] % self.block_size == 0

    def can_extend(self, rows: IntArray) -> bool:
        """Whether there are blocks for one more token of each of these sequences [n]."""
        return int(self.is_full(rows).sum()) <= len(self.free)

    def add(self, num_tokens: int) -> int:
        """Make a sequence of `num_tokens`, for which there must be blocks; returns its row."""
        row = self._take_row(num_tokens)
        self._set_blocks(row, 0, [self._take() for _ in range(ceil_div(num_tokens, self.block_size))])
        return row

    def fork(self, parent: int) -> int:
        """Make a second sequence with the same tokens; returns its row.

        Full blocks are never written again, so both sequences read the same ones. Each writes its next tokens into the
        partial block, so the fork gets another one, which must be free, for a copy of its parent's.
        """
        length = int(self.lengths[parent])
        blocks = self.blocks_of(parent)
        num_full = length // self.block_size
        self.references[blocks[:num_full]] += 1
        blocks[num_full:] = [self._take() for _ in blocks[num_full:]]
        row = self._take_row(length)
        self._set_blocks(row, 0, blocks)
        return row

    def extend(self, rows: IntArray) -> None:
        """Add space for one more token of each of these sequences [n], if there are blocks (`can_extend`)."""
        for row in rows[self.is_full(rows)].tolist():
            self._set_blocks(row, int(self.lengths[row]) // self.block_size, [self._take()])
        self.lengths[rows] += 1

    def remove(self, row: int) -> None:
        """Remove a sequence, and free the blocks that no other one has."""
        for block in self.blocks_of(row):
            self.references[block] -= 1
            if self.references[block] == 0:
                heapq.heappush(self.free, block)
        heapq.heappush(self._free_rows, row)

    def compact(self) -> tuple[list[int], list[int]]:
        """Renumber the n blocks in use to 0 to n - 1; returns the old and the new numbers of those that move."""
        num_blocks = len(self.references)
        num_in_use = num_blocks - len(self.free)
        if not self.free or self.free[0] >= num_in_use:
            return [], []
        # There are as many blocks in use at n or above as free ones below, which the heap hands out first.
        old = num_in_use + self.references[num_in_use:].nonzero()[0]
        new = [heapq.heappop(self.free) for _ in old]
        numbers = np.arange(num_blocks, dtype=np.int32)
        numbers[old] = new
        self.tables = numbers[self.tables]
        self.references[new] = self.references[old]
        self.references[old] = 0
        for block in old.tolist():
            heapq.heappush(self.free, block)
        self.version += 1
        return old.tolist(), new

    def _take(self) -> int:
        """Take the lowest free block."""
        block = heapq.heappop(self.free)
        self.references[block] = 1
        return block

    def _take_row(self, length: int) -> int:
        """Take the lowest free row for a sequence of this length."""
        if not self._free_rows:
            num_rows = len(self.lengths)
            num_more = max(8, num_rows)
            self.lengths = np.pad(self.lengths, (0, num_more))
            self.tables = np.pad(self.tables, ((0, num_more), (0, 0)))
            self._free_rows = list(range(num_rows, num_rows + num_more))
        row = heapq.heappop(self._free_rows)
        self.lengths[row] = length
        return row

    def _set_blocks(self, row: int, first: int, blocks: Sequence[int]) -> None:
        """Set the blocks of a row from column `first` on."""
        end = first + len(blocks)
        num_columns = self.tables.shape[1]
        if end > num_columns:
            self.tables = np.pad(self.tables, ((0, 0), (0, max(end - num_columns, num_columns))))
        self.tables[row, first:end] = blocks
        self.version += 1
