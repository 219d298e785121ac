"""The key/value cache: pools of fixed-size blocks, with a block table for each sequence.

Layers that share a window share a pool and its block tables. In a windowed pool a sequence keeps only the
blocks that its window can still see. A fork shares its parent's full blocks by reference count and copies the
last, partial one. All bookkeeping is on the host. Blocks are handed out lowest number first, so that those in
use stay dense.

The tables of a pool are the rows of one matrix (`BlockTables`), and most steps change no table: what a decode step
costs the host is a few operations on whole columns, however long the sequences are.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minirl.model import padding
from minirl.model.attention import (
    FLASH_BLOCK,
    Cached,
    CachePool,
    DecodeLayout,
    DecodeRead,
    PackedLayout,
    PoolWrite,
    decode_kernel_for,
    upload,
)
from minirl.model.portable_attention import BLOCK, DecodeIndex, index_decode, min_queries


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


class BlockTables:
    """The block tables of one pool, one in each row of arrays that grow on demand.

    blocks int32 [rows, columns]: the blocks of a sequence, as many as `counts` says; the columns behind are void.
    The block in column i holds the positions from (firsts + i) * block_size up to the next multiple of block_size.
    """

    blocks: Tensor
    firsts: Tensor
    counts: Tensor

    def __init__(self) -> None:
        self._keep(
            torch.zeros(8, 8, dtype=torch.int32),
            torch.zeros(8, dtype=torch.int64),
            torch.zeros(8, dtype=torch.int64),
        )

    def _keep(self, blocks: Tensor, firsts: Tensor, counts: Tensor) -> None:
        self.blocks, self.firsts, self.counts = blocks, firsts, counts
        # The same memory, of which numpy reads and writes single numbers much faster.
        self._blocks, self._firsts, self._counts = blocks.numpy(), firsts.numpy(), counts.numpy()

    def set(self, row: int, first: int, blocks: Sequence[int]) -> None:
        """Make these the blocks of a row."""
        self._make_room(row, len(blocks))
        self._firsts[row] = first
        self._counts[row] = len(blocks)
        self._blocks[row, : len(blocks)] = blocks

    def append(self, row: int, number: int, block: int) -> None:
        """Add a block to a row: the one with this number within its sequence."""
        count = self._counts[row]
        self._make_room(row, count + 1)
        if count == 0:
            # The window sees nothing before the new block.
            self._firsts[row] = number
        self._blocks[row, count] = block
        self._counts[row] = count + 1

    def pop_before(self, row: int, number: int) -> list[int]:
        """Remove the blocks of a row whose numbers within their sequence are lower; returns them."""
        count = self._counts[row]
        num_popped = min(max(0, number - self._firsts[row]), count)
        if num_popped == 0:
            return []
        blocks = self._blocks[row, :count].tolist()
        self.set(row, int(self._firsts[row] + num_popped), blocks[num_popped:])
        return blocks[:num_popped]

    def of_row(self, row: int) -> tuple[int, list[int]]:
        """The number of a row's first block within its sequence, and its blocks."""
        return int(self._firsts[row]), self._blocks[row, : self._counts[row]].tolist()

    def _make_room(self, row: int, num_columns: int) -> None:
        """Double the arrays if they have too few rows or columns."""
        num_rows, num_old_columns = self.blocks.shape
        more_rows = max(num_rows, row + 1 - num_rows) if row >= num_rows else 0
        more_columns = 0
        if num_columns > num_old_columns:
            more_columns = max(num_old_columns, num_columns - num_old_columns)
        if more_rows or more_columns:
            self._keep(
                F.pad(self.blocks, (0, more_columns, 0, more_rows)),
                F.pad(self.firsts, (0, more_rows)),
                F.pad(self.counts, (0, more_rows)),
            )


@dataclass(eq=False)
class CachedSequence:
    """A sequence whose blocks have space for `length` tokens. Its block table is `row` of each pool's tables.

    next_change: the length at which its next token changes a table; until then `KVCache.extend` only counts.
    """

    length: int
    row: int
    next_change: int = 0


class _FreeList:
    """The free blocks of one pool, as a heap, and the reference count of every block."""

    def __init__(self, num_blocks: int):
        self.free = list(range(num_blocks))
        self.references = [0] * num_blocks

    def take(self) -> int:
        """Take the lowest free block."""
        block = heapq.heappop(self.free)
        self.references[block] = 1
        return block

    def release(self, block: int) -> None:
        """Drop one reference; the block is free again when it was the last."""
        self.references[block] -= 1
        if self.references[block] == 0:
            heapq.heappush(self.free, block)

    def compact(self) -> dict[int, int]:
        """Renumber the n blocks in use to 0 .. n - 1; returns {old: new} for those that change."""
        # Each block in use at n or above takes the number of a free one below n. There are equally many of
        # both, and the heap hands out the lowest first.
        num_blocks = len(self.references)
        num_in_use = num_blocks - len(self.free)
        too_high = [block for block in range(num_in_use, num_blocks) if self.references[block] > 0]
        moves = {block: heapq.heappop(self.free) for block in too_high}
        for old, new in moves.items():
            self.references[new] = self.references[old]
            self.references[old] = 0
            heapq.heappush(self.free, old)
        return moves


class KVCache:
    """Cache for `num_tokens` tokens per layer (rounded up to blocks) and up to `max_sequences` sequences.

    A windowed pool is smaller where `max_sequences` windows need less.
    """

    def __init__(
        self,
        layer_windows: tuple[int | None, ...],
        *,
        num_kv_heads: int,
        head_dim: int,
        num_query_groups: int,
        num_tokens: int,
        max_sequences: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """layer_windows: the window of each layer; num_query_groups: query heads per key/value head."""
        self.kernel = decode_kernel_for(device, dtype)
        self.block_size = FLASH_BLOCK if self.kernel == "flash" else BLOCK
        self.num_kv_heads = num_kv_heads
        self.num_query_groups = num_query_groups
        self.device = device
        # The portable kernel multiplies each block with the queries of at least so many sequences.
        self.min_users = ceil_div(min_queries(head_dim, dtype), num_query_groups)

        self.pools: list[CachePool] = []
        self.free_lists: list[_FreeList] = []
        self.tables: list[BlockTables] = []
        # Rows of the tables: those that are free again, and how many were ever taken.
        self._free_rows: list[int] = []
        self._num_rows = 0
        # For each layer the index of its pool, and the layer's index within that pool.
        self.pool_of_layer: dict[int, tuple[int, int]] = {}
        # The full pool first, then the windowed ones.
        windows = sorted(set(layer_windows), key=lambda window: window or 0)
        for window in windows:
            layers = [layer for layer, w in enumerate(layer_windows) if w == window]
            for layer_in_pool, layer in enumerate(layers):
                self.pool_of_layer[layer] = (len(self.pools), layer_in_pool)
            num_blocks = ceil_div(num_tokens, self.block_size)
            if window is not None:
                # The window - 1 keys before a token and the token itself touch at most this many blocks.
                blocks_per_window = (window - 1) // self.block_size + 2
                num_blocks = min(num_blocks, max_sequences * blocks_per_window)
            key_block, value_block = self._block_shapes(head_dim)
            key_shape = (len(layers), num_blocks, *key_block)
            value_shape = (len(layers), num_blocks, *value_block)
            keys = torch.empty(key_shape, dtype=dtype, device=device)
            values = torch.empty(value_shape, dtype=dtype, device=device)
            self.pools.append(CachePool(keys, values, window, self.kernel))
            self.free_lists.append(_FreeList(num_blocks))
            self.tables.append(BlockTables())
        # For each pool the block tables of the last decode step and the portable kernel's index for them.
        self._last_index: list[tuple[list[list[int]], DecodeIndex] | None] = [None] * len(self.pools)

    def _block_shapes(self, head_dim: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """The shapes of one block of keys and of one block of values (see `CachePool`)."""
        if self.kernel == "flash":
            shape = (self.block_size, self.num_kv_heads, head_dim)
            return shape, shape
        key_block = (self.num_kv_heads, head_dim, self.block_size)
        value_block = (self.num_kv_heads, self.block_size, head_dim)
        return key_block, value_block

    def _first_block(self, pool: CachePool, position: int) -> int:
        """The number within its sequence of the first block that a token at `position` sees."""
        if pool.window is None:
            return 0
        first_position = max(0, position - pool.window + 1)
        return first_position // self.block_size

    def spare_blocks(self, num_tokens: int) -> int:
        """Blocks that would stay free if a sequence of `num_tokens` were added; negative if it does not fit.

        The smallest number over the pools.
        """
        end = ceil_div(num_tokens, self.block_size)
        spare = []
        for pool, free_list in zip(self.pools, self.free_lists, strict=True):
            num_needed = end - self._first_block(pool, num_tokens)
            spare.append(len(free_list.free) - num_needed)
        return min(spare)

    def num_new_blocks(self, length: int, num_more: int) -> int:
        """How many blocks a sequence of `length` tokens needs for so many more."""
        return ceil_div(length + num_more, self.block_size) - ceil_div(length, self.block_size)

    @property
    def num_free_blocks(self) -> int:
        """Free blocks in the pool that has the fewest."""
        return min(len(free_list.free) for free_list in self.free_lists)

    def add(self, num_tokens: int) -> CachedSequence | None:
        """Reserve blocks for a sequence of `num_tokens`; None if there are too few.

        A windowed pool gets only the blocks that the next token, at position `num_tokens`, sees.
        """
        if self.spare_blocks(num_tokens) < 0:
            return None
        end = ceil_div(num_tokens, self.block_size)
        sequence = CachedSequence(num_tokens, self._take_row())
        for pool, free_list, tables in zip(self.pools, self.free_lists, self.tables, strict=True):
            first = self._first_block(pool, num_tokens)
            blocks = [free_list.take() for _ in range(first, end)]
            # Prefill fills all blocks but the last one.
            self._clear(pool, blocks[-1:])
            tables.set(sequence.row, first, blocks)
        self._plan_change(sequence)
        return sequence

    def _take_row(self) -> int:
        """Take the lowest row of the tables that no sequence has."""
        if self._free_rows:
            return heapq.heappop(self._free_rows)
        self._num_rows += 1
        return self._num_rows - 1

    def _plan_change(self, sequence: CachedSequence) -> None:
        """Find out at which length the sequence's next token needs a block or makes one leave a window."""
        lengths = [ceil_div(sequence.length, self.block_size) * self.block_size]
        for pool, tables in zip(self.pools, self.tables, strict=True):
            if pool.window is not None:
                first, _ = tables.of_row(sequence.row)
                lengths.append((first + 1) * self.block_size + pool.window - 1)
        sequence.next_change = min(lengths)

    def _clear(self, pool: CachePool, blocks: list[int]) -> None:
        """Zero blocks that will be read before they are full.

        The portable kernel multiplies masked keys and values too, and 0 x NaN is NaN. Others do not read
        them.
        """
        if self.kernel == "portable":
            pool.keys[:, blocks] = 0
            pool.values[:, blocks] = 0

    def fork(self, parent: CachedSequence) -> CachedSequence | None:
        """A second sequence with the same tokens; None if there is no free block for its partial one."""
        has_partial_block = parent.length % self.block_size != 0
        if has_partial_block and self.num_free_blocks < 1:
            return None
        fork = CachedSequence(parent.length, self._take_row(), parent.next_change)
        for pool, free_list, tables in zip(self.pools, self.free_lists, self.tables, strict=True):
            first, blocks = tables.of_row(parent.row)
            # Full blocks are never written again, so both sequences can read the same ones. Into the partial
            # block each will write its own next tokens, so the fork gets a copy. With no partial block a fork
            # takes no block.
            partial = blocks.pop() if has_partial_block else None
            for block in blocks:
                free_list.references[block] += 1
            if partial is not None:
                copy = free_list.take()
                pool.keys[:, copy] = pool.keys[:, partial]
                pool.values[:, copy] = pool.values[:, partial]
                blocks.append(copy)
            tables.set(fork.row, first, blocks)
        return fork

    def can_extend(self, sequences: list[CachedSequence]) -> bool:
        """Whether `extend` is sure to succeed for each of these, one after another.

        Conservative: the blocks that `extend` frees because they have left a window are not counted.
        """
        num_needed = sum(sequence.length % self.block_size == 0 for sequence in sequences)
        return num_needed <= self.num_free_blocks

    def extend(self, sequence: CachedSequence) -> bool:
        """Free the blocks that have left a window, then add space for one more token.

        Returns False, and leaves the length as it was, if there is no free block for the token.
        """
        if sequence.length < sequence.next_change:
            sequence.length += 1
            return True
        position = sequence.length
        row = sequence.row
        for pool, free_list, tables in zip(self.pools, self.free_lists, self.tables, strict=True):
            for block in tables.pop_before(row, self._first_block(pool, position)):
                free_list.release(block)
        needs_block = position % self.block_size == 0
        if needs_block:
            if self.num_free_blocks == 0:
                return False
            for pool, free_list, tables in zip(self.pools, self.free_lists, self.tables, strict=True):
                block = free_list.take()
                tables.append(row, position // self.block_size, block)
                self._clear(pool, [block])
        sequence.length += 1
        self._plan_change(sequence)
        return True

    def free(self, sequence: CachedSequence) -> None:
        """Give back all blocks of a sequence, and its row of the tables."""
        for free_list, tables in zip(self.free_lists, self.tables, strict=True):
            _, blocks = tables.of_row(sequence.row)
            for block in blocks:
                free_list.release(block)
        heapq.heappush(self._free_rows, sequence.row)

    def compact(self, sequences: list[CachedSequence]) -> None:
        """Move blocks so that no free block lies below one in use. Only for the portable kernel.

        That kernel multiplies the pool up to the highest block in use, so the free ones below would cost
        time. The other kernels read the blocks of each table. `sequences` must be all that the cache holds:
        their block tables are rewritten.
        """
        if self.kernel != "portable":
            return
        for pool, free_list, tables in zip(self.pools, self.free_lists, self.tables, strict=True):
            held: set[int] = set()
            for sequence in sequences:
                _, blocks = tables.of_row(sequence.row)
                held.update(blocks)
            num_in_use = len(free_list.references) - len(free_list.free)
            assert len(held) == num_in_use, "a sequence was left out of compact()"
            moves = free_list.compact()
            if not moves:
                continue
            # Sources were in use and targets were free, so no block is both read and written, and one indexed
            # copy moves them all. A block that several sequences share moves once.
            source = list(moves.keys())
            target = list(moves.values())
            pool.keys[:, target] = pool.keys[:, source]
            pool.values[:, target] = pool.values[:, source]
            for sequence in sequences:
                first, blocks = tables.of_row(sequence.row)
                tables.set(sequence.row, first, [moves.get(block, block) for block in blocks])

    def prefill_layout(self, sequences: list[CachedSequence]) -> PackedLayout:
        """Layout of all tokens of these sequences, packed end to end. The forward pass fills the cache."""
        cached = []
        for i, pool in enumerate(self.pools):
            cached.append(Cached(pool, self._prefill_write(i, sequences)))
        lengths = tuple(sequence.length for sequence in sequences)
        return PackedLayout(lengths, self.device, self._by_layer(cached))

    def _prefill_write(self, pool_index: int, sequences: list[CachedSequence]) -> PoolWrite:
        """Where the tokens of these sequences, packed end to end, are stored in a pool."""
        tokens: list[Tensor] = []
        blocks: list[Tensor] = []
        offsets: list[Tensor] = []
        start = 0  # of the sequence among the packed tokens
        for sequence in sequences:
            first, table = self.tables[pool_index].of_row(sequence.row)
            # Tokens before the table's first block have left the window: they are computed, but not stored.
            positions = torch.arange(first * self.block_size, sequence.length)
            index_in_table = positions // self.block_size - first
            table_blocks = torch.tensor(table, dtype=torch.int64)
            tokens.append(start + positions)
            blocks.append(table_blocks[index_in_table])
            offsets.append(positions % self.block_size)
            start += sequence.length
        return PoolWrite(
            token=upload(torch.cat(tokens), self.device),
            block=upload(torch.cat(blocks), self.device),
            offset=upload(torch.cat(offsets), self.device),
        )

    def decode_layout(self, sequences: list[CachedSequence]) -> DecodeLayout:
        """Layout of the last token of each sequence, for which `extend` has added the space."""
        rows = torch.tensor([sequence.row for sequence in sequences])
        lengths = torch.tensor([sequence.length for sequence in sequences])
        positions = lengths - 1
        offset = upload(positions % self.block_size, self.device)
        cached = []
        for i, (pool, tables) in enumerate(zip(self.pools, self.tables, strict=True)):
            counts = tables.counts[rows]
            last_block = tables.blocks[rows, counts - 1].long()
            # None: the tokens to store are all but the padding.
            write = PoolWrite(None, upload(last_block, self.device), offset)
            read = self._decode_read(i, rows, counts, lengths)
            cached.append(Cached(pool, write, read))
        return DecodeLayout(upload(positions, self.device), self._by_layer(cached))

    def _by_layer(self, cached: list[Cached]) -> dict[int, tuple[Cached, int]]:
        """For each layer its pool, given one per pool, and the layer's index within it."""
        by_layer = {}
        for layer, (pool_index, layer_in_pool) in self.pool_of_layer.items():
            by_layer[layer] = (cached[pool_index], layer_in_pool)
        return by_layer

    def _decode_read(self, pool_index: int, rows: Tensor, counts: Tensor, lengths: Tensor) -> DecodeRead:
        """What a decode step reads from a pool.

        Int64 [B], of the sequences: their rows in the tables, how many blocks these have, and their lengths.
        """
        tables = self.tables[pool_index]
        # A table starts at `first_position` of its sequence, which is not 0 once blocks have left the window.
        first_position = tables.firsts[rows] * self.block_size
        num_keys = (lengths - first_position).int()
        num_keys = upload(num_keys, self.device)
        if self.kernel != "portable":
            # The void behind a short table has numbers of other blocks. The kernels read no further than the keys.
            block_table = tables.blocks[:, : int(counts.max())].index_select(0, rows)
            return DecodeRead(upload(block_table, self.device), num_keys)

        blocks = [tables.of_row(row)[1] for row in rows.tolist()]
        index = self._decode_index(pool_index, blocks)
        # Mask, of all the keys in a sequence's blocks, those that the last token does not see: the unused end
        # of the last block, and what lies before the window, which may start within the first block.
        num_blocks = index.blocks.shape[1]
        key_index = torch.arange(num_blocks * self.block_size)
        key_position = first_position[:, None] + key_index
        is_masked = key_position >= lengths[:, None]
        window = self.pools[pool_index].window
        if window is not None:
            is_masked |= key_position < lengths[:, None] - window
        mask = torch.zeros(is_masked.shape).masked_fill(is_masked, -torch.inf)
        mask = mask[:, None, None]  # [B, 1, 1, keys]: the same for all heads
        return DecodeRead(index.blocks, num_keys, index, mask.to(self.device))

    def _decode_index(self, pool_index: int, blocks: list[list[int]]) -> DecodeIndex:
        """The portable kernel's index for block tables with these blocks.

        Most steps change no block table, so the last step's index is kept and used again.
        """
        last = self._last_index[pool_index]
        if last is not None:
            last_blocks, last_index = last
            if last_blocks == blocks:
                return last_index
        index = index_decode(
            blocks,
            num_kv=self.num_kv_heads,
            groups=self.num_query_groups,
            min_users=self.min_users,
            num_padded=padding.num_padded(len(blocks), self.device),
        ).to(self.device)
        self._last_index[pool_index] = (blocks, index)
        return index
