"""Host-side bookkeeping for the key/value cache: free blocks, reference counts and block tables.

Each sequence is identified by its row in the tables. Sequences that begin with the same tokens can share full blocks,
which are reference-counted. The lowest free block is allocated first, because the portable kernel multiplies all blocks
up to the highest allocated block in place, without copying.
"""

import heapq
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
Number = TypeVar("Number", int, IntArray)


def ceil_div(a: Number, b: int) -> Number:
    """Return a / b, rounded up to an integer."""
    return -(-a // b)


def grow_array(array: NDArray[Any], *sizes: int) -> NDArray[Any]:
    """Return the array if it has at least these sizes, else a larger copy padded with zeros.

    When a dimension grows, it at least doubles, so repeated growth rarely copies the array.
    """
    shape = tuple(
        old_size if old_size >= new_size else max(new_size, 2 * old_size)
        for old_size, new_size in zip(array.shape, sizes, strict=True)
    )
    if shape == array.shape:
        return array
    grown = np.zeros(shape, array.dtype)
    grown[tuple(map(slice, array.shape))] = array
    return grown


class BlockPool:
    """A pool of `num_blocks` cache blocks, each for `block_size` tokens.

    ref_counts int64 [num_blocks]: number of sequences that use each block. free: a min-heap of the unused blocks.
    lengths int64 [rows]: number of tokens for which each sequence has space, at least 1; 0 for unused rows.
    tables int32 [rows, columns]: block table of each sequence; unused columns contain garbage.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self.ref_counts = np.zeros(num_blocks, np.int64)
        self.free = list(range(num_blocks))
        self.lengths = np.zeros(0, np.int64)
        self.tables = np.zeros((0, 0), np.int32)

    def sequence_blocks(self, row: int) -> list[int]:
        """Return a sequence's blocks, in token order."""
        num_blocks = ceil_div(int(self.lengths[row]), self.block_size)
        return self.tables[row, :num_blocks].tolist()

    def block_tables(self, rows: IntArray) -> NDArray[np.int32]:
        """Return these sequences' block tables, int32 [n, columns], with enough columns for the longest sequence."""
        num_columns = ceil_div(int(self.lengths[rows].max()), self.block_size)
        return self.tables[rows, :num_columns]

    def blocks_at(self, rows: IntArray, positions: IntArray) -> IntArray:
        """Return the blocks, int64 [n], that store these positions [n] of the sequences in these rows [n]."""
        return self.tables[rows, positions // self.block_size].astype(np.int64)

    def num_new_blocks(self, length: Number, num_tokens: Number) -> Number:
        """Return the number of additional blocks that sequences of this length need for `num_tokens` more tokens."""
        return ceil_div(length + num_tokens, self.block_size) - ceil_div(length, self.block_size)

    def last_block_is_full(self, rows: IntArray) -> NDArray[np.bool_]:
        """Return whether each sequence's last block is full and the next token needs a new block, bool [n]."""
        return self.lengths[rows] % self.block_size == 0

    def can_extend(self, rows: IntArray) -> bool:
        """Return whether enough blocks are free to extend each of these sequences [n] by one token."""
        return int(self.last_block_is_full(rows).sum()) <= len(self.free)

    def add(self, num_tokens: int, first_blocks: Sequence[int] = ()) -> int:
        """Add a sequence of `num_tokens` tokens and return its row, the lowest unused row. Enough blocks must be free.

        first_blocks: leading blocks that the new sequence shares with another sequence.
        """
        row = int(np.append(self.lengths, 0).argmin())
        self.lengths = grow_array(self.lengths, row + 1)
        self.lengths[row] = num_tokens
        num_blocks = ceil_div(num_tokens, self.block_size)
        new_blocks = [heapq.heappop(self.free) for _ in range(num_blocks - len(first_blocks))]
        blocks = [*first_blocks, *new_blocks]
        self.ref_counts[blocks] += 1
        self.tables = grow_array(self.tables, row + 1, num_blocks)
        self.tables[row, :num_blocks] = blocks
        return row

    def extend(self, rows: IntArray) -> None:
        """Add space for one more token to each of these sequences [n]. Enough blocks must be free (`can_extend`)."""
        rows_with_full_block = rows[self.last_block_is_full(rows)]
        if len(rows_with_full_block):
            blocks = [heapq.heappop(self.free) for _ in rows_with_full_block]
            self.ref_counts[blocks] = 1
            columns = self.lengths[rows_with_full_block] // self.block_size
            self.tables = grow_array(self.tables, 0, int(columns.max()) + 1)
            self.tables[rows_with_full_block, columns] = blocks
        self.lengths[rows] += 1

    def remove(self, row: int) -> None:
        """Remove a sequence, and free the blocks that no other sequence uses."""
        blocks = self.sequence_blocks(row)
        self.ref_counts[blocks] -= 1
        for block in blocks:
            if self.ref_counts[block] == 0:
                heapq.heappush(self.free, block)
        self.lengths[row] = 0
