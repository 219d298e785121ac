"""Blocks of the key/value cache, and the table of each sequence: which blocks hold its tokens. Host numbers only.

A sequence is identified by its row in the tables. A fork shares its parent's full blocks by reference count, and gets a
block of its own for the last, partial one. The block that was freed last is handed out next, so that those in use stay
dense.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
Number = TypeVar("Number", int, IntArray)


def ceil_div(a: Number, b: int) -> Number:
    """a / b, rounded up."""
    return -(-a // b)


def grow_array(array: NDArray[Any], *sizes: int) -> NDArray[Any]:
    """Return the array, or if it is too small for these sizes, a copy that grows and has zeros behind its elements.

    What grows at least doubles, so that slow growth seldom copies.
    """
    shape = tuple(
        have if have >= needed else max(needed, 2 * have)
        for have, needed in zip(array.shape, sizes, strict=True)
    )
    if shape == array.shape:
        return array
    grown = np.zeros(shape, array.dtype)
    grown[tuple(map(slice, array.shape))] = array
    return grown


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens.

    ref_counts int64 [num_blocks]: how many sequences have each block. free: a stack of those that none has.
    lengths int64 [rows]: how many tokens each sequence has space for, at least one; 0 where there is no sequence.
    tables int32 [rows, columns]: the blocks of each sequence, in its first columns; unused columns hold garbage.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self.ref_counts = np.zeros(num_blocks, np.int64)
        self.free = list(reversed(range(num_blocks)))
        self.lengths = np.zeros(0, np.int64)
        self.tables = np.zeros((0, 0), np.int32)

    def blocks_of(self, row: int) -> list[int]:
        """The blocks of a sequence, in its order."""
        num_blocks = ceil_div(int(self.lengths[row]), self.block_size)
        return self.tables[row, :num_blocks].tolist()

    def block_tables(self, rows: IntArray) -> NDArray[np.int32]:
        """The tables int32 [n, columns] of these sequences, as wide as the longest one needs."""
        num_columns = ceil_div(int(self.lengths[rows].max()), self.block_size)
        return self.tables[rows, :num_columns]

    def block_at(self, rows: IntArray, positions: IntArray) -> IntArray:
        """The blocks [n] of tokens at these positions [n] of the sequences in these rows [n]."""
        return self.tables[rows, positions // self.block_size].astype(np.int64)

    def num_free_after(self, num_tokens: int) -> int:
        """Number of blocks that would stay free if a sequence were added; negative if it does not fit."""
        return len(self.free) - ceil_div(num_tokens, self.block_size)

    def num_new_blocks(self, length: Number, num_tokens: Number) -> Number:
        """Number of further blocks that sequences of this length need for `num_tokens` more."""
        return ceil_div(length + num_tokens, self.block_size) - ceil_div(length, self.block_size)

    def last_block_is_full(self, rows: IntArray) -> NDArray[np.bool_]:
        """Whether the last block of each sequence [n] is full, so that the next token begins another one."""
        return self.lengths[rows] % self.block_size == 0

    def can_extend(self, rows: IntArray) -> bool:
        """Whether there are blocks for one more token of each of these sequences [n]."""
        return int(self.last_block_is_full(rows).sum()) <= len(self.free)

    def add(self, num_tokens: int, first_blocks: Sequence[int] = ()) -> int:
        """Make a sequence of `num_tokens`, for which there must be blocks; returns its row, the lowest free one.

        first_blocks: blocks of another sequence that it begins with.
        """
        row = int(np.append(self.lengths, 0).argmin())
        self.lengths = grow_array(self.lengths, row + 1)
        self.lengths[row] = num_tokens
        num_blocks = ceil_div(num_tokens, self.block_size)
        new_blocks = [self.free.pop() for _ in range(num_blocks - len(first_blocks))]
        blocks = [*first_blocks, *new_blocks]
        self.ref_counts[blocks] += 1
        self.tables = grow_array(self.tables, row + 1, num_blocks)
        self.tables[row, :num_blocks] = blocks
        return row

    def fork(self, parent: int) -> int:
        """Make a second sequence with the same tokens; returns its row.

        Full blocks are never written again, so both sequences read the same ones. Each writes its next tokens into the
        partial block, so the fork gets another one, which must be free, for a copy of its parent's.
        """
        length = int(self.lengths[parent])
        return self.add(length, self.blocks_of(parent)[: length // self.block_size])

    def extend(self, rows: IntArray) -> None:
        """Add space for one more token of each of these sequences [n], if there are blocks (`can_extend`)."""
        full_rows = rows[self.last_block_is_full(rows)]
        if len(full_rows):
            blocks = [self.free.pop() for _ in full_rows]
            self.ref_counts[blocks] = 1
            columns = self.lengths[full_rows] // self.block_size
            self.tables = grow_array(self.tables, 0, int(columns.max()) + 1)
            self.tables[full_rows, columns] = blocks
        self.lengths[rows] += 1

    def remove(self, row: int) -> None:
        """Remove a sequence, and free the blocks that no other one has."""
        blocks = self.blocks_of(row)
        self.ref_counts[blocks] -= 1
        self.free += [block for block in blocks if self.ref_counts[block] == 0]
        self.lengths[row] = 0
