"""The key/value cache: pools of fixed-size blocks, with a block table for each sequence.

Layers that share a window share a pool and its block tables. Whenever a sequence begins a block in a windowed
pool, it gives back those that its window no longer sees. A fork shares its parent's full blocks by reference count
and copies the last, partial one. All bookkeeping is on the host. Blocks are handed out lowest number first, so that
those in use stay dense.

Layers with a gated delta net keep a state of each sequence instead, in the slot of the sequence's row (`states`). A
prefill writes all of it, and a fork copies it. It advances when a token begins a chunk of the delta rule.

A sequence is identified by its row, its index in the array of lengths and in the block tables of each pool
(`Blocks`). Most steps change no table, so a decode step costs the host a few operations on whole columns,
regardless of the number and length of the sequences.
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minirl.model import padding
from minirl.model.attention import (
    PAGED_BLOCK,
    Cached,
    CachePool,
    DecodeLayout,
    DecodeRead,
    PackedLayout,
    concatenated_ranges,
    decode_kernel_for,
    upload,
)
from minirl.model.config import DELTA_CHUNK, DeltaNet
from minirl.model.portable_attention import BLOCK, DecodeIndex, index_decode, min_queries

if TYPE_CHECKING:
    from minirl.extras.delta_net.rule import DeltaStates

Number = TypeVar("Number", int, Tensor)


def ceil_div(a: Number, b: int) -> Number:
    """a / b, rounded up."""
    return -(-a // b)


class Blocks:
    """The blocks of one pool: which are free, and the block tables, one per row of arrays that grow on demand.

    free: a heap of their numbers. references: how many tables have each block.
    tables int32 [rows, columns]: a sequence's blocks in its first `counts` columns; the other columns are void.
    The block in column i holds the positions from (firsts + i) * block_size up to the next multiple of block_size.
    version: how often a table has changed.
    """

    def __init__(self, num_blocks: int):
        self.free = list(range(num_blocks))
        self.references = [0] * num_blocks
        # numpy reads and writes single numbers much faster than torch.
        self.tables = np.zeros((8, 8), np.int32)
        self.firsts = np.zeros(8, np.int64)
        self.counts = np.zeros(8, np.int64)
        self.version = 0

    def take(self) -> int:
        """Take the lowest free block."""
        block = heapq.heappop(self.free)
        self.references[block] = 1
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference of each; the last one frees the block."""
        for block in blocks:
            self.references[block] -= 1
            if self.references[block] == 0:
                heapq.heappush(self.free, block)

    def of_row(self, row: int) -> tuple[int, list[int]]:
        """The number of a row's first block within its sequence, and its blocks."""
        return int(self.firsts[row]), self.tables[row, : self.counts[row]].tolist()

    def set(self, row: int, first: int, blocks: Sequence[int]) -> None:
        """Set the blocks of a row."""
        self.version += 1
        num_rows, num_columns = self.tables.shape
        more_rows = max(num_rows, row + 1 - num_rows) if row >= num_rows else 0
        more_columns = max(num_columns, len(blocks) - num_columns) if len(blocks) > num_columns else 0
        if more_rows or more_columns:
            self.tables = np.pad(self.tables, ((0, more_rows), (0, more_columns)))
            self.firsts = np.pad(self.firsts, (0, more_rows))
            self.counts = np.pad(self.counts, (0, more_rows))
        self.firsts[row] = first
        self.counts[row] = len(blocks)
        self.tables[row, : len(blocks)] = blocks

    def release_before(self, row: int, number: int) -> None:
        """Release the blocks of a row with lower numbers within their sequence."""
        first, blocks = self.of_row(row)
        num_released = min(max(0, number - first), len(blocks))
        if num_released:
            self.release(blocks[:num_released])
            self.set(row, first + num_released, blocks[num_released:])

    def append(self, row: int, number: int) -> int:
        """Take a block for a row, as this block of its sequence."""
        first, blocks = self.of_row(row)
        block = self.take()
        # Without blocks, the window sees nothing before the new one.
        self.set(row, first if blocks else number, [*blocks, block])
        return block

    def compact(self) -> dict[int, int]:
        """Renumber the n blocks in use to 0 .. n - 1; returns {old: new} for those that change."""
        # Each block in use at n or above takes the number of a free one below n. There are equally many of
        # both, and the heap hands out the lowest first.
        num_blocks = len(self.references)
        num_in_use = num_blocks - len(self.free)
        too_high = [block for block in range(num_in_use, num_blocks) if self.references[block] > 0]
        moves = {block: heapq.heappop(self.free) for block in too_high}
        numbers = np.arange(num_blocks, dtype=np.int32)
        for old, new in moves.items():
            numbers[old] = new
            self.references[new] = self.references[old]
            self.references[old] = 0
            heapq.heappush(self.free, old)
        if moves:
            self.version += 1
            self.tables = numbers[self.tables]
        return moves


class KVCache:
    """Cache for `num_tokens` tokens per layer (rounded up to blocks) and up to `max_sequences` sequences.

    A windowed pool is smaller where `max_sequences` windows need less.
    """

    def __init__(
        self,
        layer_windows: Mapping[int, int | None],
        *,
        delta_net: DeltaNet | None = None,
        num_kv_heads: int,
        head_dim: int,
        num_query_groups: int,
        num_tokens: int,
        max_sequences: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """layer_windows: the window of each layer with attention; num_query_groups: query heads per key/value head.

        delta_net: that of the other layers. Their states have room for `max_sequences` sequences and a stem.
        """
        self.kernel = decode_kernel_for(device)
        self.block_size = PAGED_BLOCK if self.kernel == "paged" else BLOCK
        self.num_kv_heads = num_kv_heads
        self.num_query_groups = num_query_groups
        self.device = device
        # The portable kernel multiplies each block with the queries of at least this many sequences.
        num_queries = min_queries(head_dim, dtype) or padding.MIN_ROWS
        self.min_users = ceil_div(num_queries, num_query_groups)

        self.pools: list[CachePool] = []
        self.blocks: list[Blocks] = []
        # int64 [rows]: how many tokens the sequence has space for.
        self.lengths = torch.zeros(0, dtype=torch.int64)
        self._lengths = self.lengths.numpy()  # the same memory, for single numbers
        self._free_rows: list[int] = []
        # For each layer the index of its pool, and the layer's index within that pool.
        self.pool_of_layer: dict[int, tuple[int, int]] = {}
        # The full pool first, then the windowed ones.
        windows = sorted(set(layer_windows.values()), key=lambda window: window or 0)
        for window in windows:
            layers = [layer for layer, w in layer_windows.items() if w == window]
            for layer_in_pool, layer in enumerate(layers):
                self.pool_of_layer[layer] = (len(self.pools), layer_in_pool)
            num_blocks = ceil_div(num_tokens, self.block_size)
            if window is not None:
                # The window - 1 keys before a token and the token itself touch at most this many blocks.
                blocks_per_window = (window - 1) // self.block_size + 2
                num_blocks = min(num_blocks, max_sequences * blocks_per_window)
            shape = (len(layers), num_blocks, num_kv_heads)
            keys = torch.empty(*shape, head_dim, self.block_size, dtype=dtype, device=device)
            values = torch.empty(*shape, self.block_size, head_dim, dtype=dtype, device=device)
            self.pools.append(CachePool(keys, values, window, self.kernel))
            self.blocks.append(Blocks(num_blocks))
        self._parts = list(zip(self.pools, self.blocks, strict=True))
        # By layer; the slot of a sequence has the number of its row.
        self.states: dict[int, DeltaStates] = {}
        if delta_net is not None:
            from minirl.extras.delta_net.rule import make_states

            for layer in delta_net.layers:
                self.states[layer] = make_states(delta_net, max_sequences + 1, dtype=dtype, device=device)
        # By pool: the version of its tables, the rows and the portable kernel's index of the last decode step.
        self._last_index: dict[int, tuple[int, list[int], DecodeIndex]] = {}

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
        for pool, blocks in self._parts:
            num_needed = end - self._first_block(pool, num_tokens)
            spare.append(len(blocks.free) - num_needed)
        return min(spare)

    def num_new_blocks(self, length: Number, num_more: Number) -> Number:
        """How many blocks a sequence of `length` tokens needs for `num_more` more; numbers or tensors."""
        return ceil_div(length + num_more, self.block_size) - ceil_div(length, self.block_size)

    @property
    def num_free_blocks(self) -> int:
        """Free blocks in the pool that has the fewest."""
        return min(len(blocks.free) for blocks in self.blocks)

    def add(self, num_tokens: int) -> int | None:
        """Reserve blocks for a sequence of `num_tokens`; returns its row, or None if there are too few blocks.

        A windowed pool gets only the blocks that the next token, at position `num_tokens`, sees.
        """
        if self.spare_blocks(num_tokens) < 0:
            return None
        end = ceil_div(num_tokens, self.block_size)
        row = self._take_row(num_tokens)
        for pool, blocks in self._parts:
            first = self._first_block(pool, num_tokens)
            taken = [blocks.take() for _ in range(first, end)]
            # Prefill fills all blocks but the last one.
            self._clear(pool, taken[-1:])
            blocks.set(row, first, taken)
        return row

    def _take_row(self, length: int) -> int:
        """Take the lowest free row for a sequence of this length."""
        if not self._free_rows:
            num_rows = len(self.lengths)
            num_more = max(8, num_rows)
            self.lengths = F.pad(self.lengths, (0, num_more))
            self._lengths = self.lengths.numpy()
            self._free_rows = list(range(num_rows, num_rows + num_more))
        row = heapq.heappop(self._free_rows)
        self._lengths[row] = length
        return row

    def _clear(self, pool: CachePool, blocks: list[int]) -> None:
        """Zero blocks that will be read before they are full.

        The portable kernel multiplies masked keys and values too, and 0 x NaN is NaN. The paged one does not read them.
        """
        if self.kernel == "portable":
            pool.keys[:, blocks] = 0
            pool.values[:, blocks] = 0

    def _copy(self, pool: CachePool, old: int, new: int) -> None:
        """Copy a block."""
        pool.keys[:, new] = pool.keys[:, old]
        pool.values[:, new] = pool.values[:, old]

    def fork(self, parent: int) -> int | None:
        """Make a second sequence with the same tokens; returns None if no block is free for its partial one."""
        length = int(self._lengths[parent])
        has_partial_block = length % self.block_size != 0
        if has_partial_block and self.num_free_blocks < 1:
            return None
        fork = self._take_row(length)
        for pool, blocks in self._parts:
            first, taken = blocks.of_row(parent)
            # Full blocks are never written again, so both sequences can read the same ones. Each will write its next
            # tokens into the partial block, so the fork gets a copy of that. With no partial block a fork
            # takes no block.
            partial = taken.pop() if has_partial_block else None
            for block in taken:
                blocks.references[block] += 1
            if partial is not None:
                copy = blocks.take()
                self._copy(pool, partial, copy)
                taken.append(copy)
            blocks.set(fork, first, taken)
        for states in self.states.values():
            for pool_of_states in states:
                pool_of_states[fork] = pool_of_states[parent]
        return fork

    def can_extend(self, rows: Tensor) -> bool:
        """Return whether `extend` surely succeeds for each of these rows int64 [B], one after another.

        Conservative: the blocks that `extend` frees because they have left a window are not counted.
        """
        return int(self.needs_blocks(rows).sum()) <= self.num_free_blocks

    def needs_blocks(self, rows: Tensor) -> Tensor:
        """Return bool [B]: `extend` of these rows int64 [B] begins a block. Otherwise it only counts."""
        return self.lengths[rows] % self.block_size == 0

    def extend(self, row: int) -> bool:
        """Add space for one more token. Where it begins a block, first free the blocks that have left a window.

        Returns False and keeps the length if no block is free for the token.
        """
        position = int(self._lengths[row])
        if position % self.block_size == 0:
            for pool, blocks in self._parts:
                blocks.release_before(row, self._first_block(pool, position))
            if self.num_free_blocks == 0:
                return False
            for pool, blocks in self._parts:
                block = blocks.append(row, position // self.block_size)
                self._clear(pool, [block])
        self._lengths[row] += 1
        return True

    def extend_by(self, row: int, num_tokens: int) -> int:
        """Extend by up to `num_tokens`, all within one block, and one chunk of the delta rule if there are states.

        Returns by how many, 0 if no block is free. It frees no key that the first of them sees.
        """
        if not self.extend(row):
            return 0
        part = min(DELTA_CHUNK, self.block_size) if self.states else self.block_size
        num_more = min(num_tokens - 1, -int(self._lengths[row]) % part)
        self._lengths[row] += num_more
        return 1 + num_more

    def free(self, row: int) -> None:
        """Free all blocks of a sequence, and its row."""
        for blocks in self.blocks:
            blocks.release(blocks.of_row(row)[1])
            blocks.set(row, 0, [])
        heapq.heappush(self._free_rows, row)

    def compact(self) -> None:
        """Move blocks so that no free block lies below one in use. Only for the portable kernel.

        That kernel multiplies the pool up to the highest block in use, so the free ones below would cost
        time.
        """
        if self.kernel != "portable":
            return
        for pool, blocks in self._parts:
            # A block that several sequences share moves once. Blocks are large: one copy each takes a third of the
            # time of one copy by index for all.
            for old, new in blocks.compact().items():
                self._copy(pool, old, new)

    def prefill_layout(self, rows: Sequence[int]) -> PackedLayout:
        """Layout of all tokens of these sequences, packed end to end. The forward pass fills the cache."""
        lengths = tuple(self.lengths[list(rows)].tolist())
        caches = [self._prefill_places(i, rows, lengths) for i in range(len(self.pools))]
        slots = upload(torch.tensor(rows), self.device) if self.states else None
        return PackedLayout(lengths, self.device, caches, self.pool_of_layer, states=self.states, slots=slots)

    def _prefill_places(self, pool_index: int, rows: Sequence[int], lengths: Sequence[int]) -> Cached:
        """Where the tokens of these sequences, packed end to end, are stored in a pool."""
        tokens: list[Tensor] = []
        blocks: list[Tensor] = []
        offsets: list[Tensor] = []
        start = 0  # of the sequence among the packed tokens
        for row, length in zip(rows, lengths, strict=True):
            first, table = self.blocks[pool_index].of_row(row)
            # Tokens before the table's first block have left the window: they are computed, but not stored.
            positions = torch.arange(first * self.block_size, length)
            index_in_table = positions // self.block_size - first
            table_blocks = torch.tensor(table, dtype=torch.int64)
            tokens.append(start + positions)
            blocks.append(table_blocks[index_in_table])
            offsets.append(positions % self.block_size)
            start += length
        block, offset, token = (upload(torch.cat(parts), self.device) for parts in (blocks, offsets, tokens))
        return Cached(self.pools[pool_index], block, offset, token)

    def decode_inputs(self, rows: Tensor, lengths: Tensor | None = None) -> list[Tensor]:
        """The tensors that `decode_layout` of these rows needs on the device, still on the host; [B] by default.

        Called once for each step: it also advances the states of sequences whose token begins a chunk.

        lengths int64 [B]: how many tokens of its sequence each of the B tokens sees; by default all.

        Positions and their offsets in a block, int64. Then for each pool the last blocks int64, the numbers of keys
        in the tables int32 and, for the paged kernel, the block tables int32 [B, n]. Then the slots of states int64, if
        the model has them.
        """
        lengths = self.lengths[rows] if lengths is None else lengths
        positions = lengths - 1
        inputs = [positions, positions % self.block_size]
        for blocks in self.blocks:
            tables, firsts, counts = map(torch.from_numpy, (blocks.tables, blocks.firsts, blocks.counts))
            counts = counts[rows]
            inputs.append(tables[rows, counts - 1].long())
            # A table starts at this position of its sequence, which is not 0 once blocks have left the window.
            first_positions = firsts[rows] * self.block_size
            inputs.append((lengths - first_positions).int())
            if self.kernel == "paged":
                # Void columns hold numbers of other blocks. The kernel reads no further than the keys.
                inputs.append(tables[:, : int(counts.max())].index_select(0, rows))
        if self.states:
            inputs.append(rows)
            begins_chunk = (positions > 0) & (positions % DELTA_CHUNK == 0)
            self._end_chunks(rows[begins_chunk])
        return inputs

    def _end_chunks(self, rows: Tensor) -> None:
        """Advance the states of these sequences int64 [n]: the tokens before their newest one fill a chunk."""
        if len(rows):
            from minirl.extras.delta_net.rule import end_chunks

            slots = upload(rows, self.device)
            for states in self.states.values():
                end_chunks(states, slots)

    def decode_layout(
        self, rows: Tensor, inputs: Sequence[Tensor] | None = None, lengths: Tensor | None = None
    ) -> DecodeLayout:
        """Layout of the last token of each of these sequences int64 [B], for which `extend` has added the space.

        For several tokens of a sequence, which must be in its last block, repeat its row and give `lengths` int64 [B],
        see `decode_inputs`.

        inputs: the `decode_inputs` of the rows, on the device.
        """
        has_one_each = lengths is None
        lengths = self.lengths[rows] if lengths is None else lengths
        if inputs is None:
            inputs = [upload(tensor, self.device) for tensor in self.decode_inputs(rows, lengths)]
        positions, offset, *left = inputs
        caches = []
        for i, pool in enumerate(self.pools):
            last_block, num_keys, *left = left
            if self.kernel == "portable":
                read = self._portable_read(i, rows, lengths, num_keys)
            else:
                block_table, *left = left
                read = DecodeRead(block_table, num_keys)
            caches.append(Cached(pool, last_block, offset, read=read))
        if not self.states:
            return DecodeLayout(positions, caches, self.pool_of_layer)
        rounds: list[Tensor | slice] = [slice(None)]
        num_slots = None
        if not has_one_each:
            rounds = self._rounds(rows)
        elif self.kernel == "portable" and rows.max() < 2 * len(rows):  # else most slots would be idle
            num_slots = int(rows.max()) + 1
        slots = left[0]
        return DecodeLayout(positions, caches, self.pool_of_layer, self.states, slots, rounds, num_slots)

    def _rounds(self, rows: Tensor) -> list[Tensor | slice]:
        """Split the tokens of a decode step into parts with at most one token of each sequence."""
        _, counts = rows.unique_consecutive(return_counts=True)
        number = concatenated_ranges([0] * len(counts), counts)
        return [upload((number == i).nonzero()[:, 0], self.device) for i in range(int(counts.max()))]

    def _portable_read(self, pool_index: int, rows: Tensor, lengths: Tensor, num_keys: Tensor) -> DecodeRead:
        """The inputs of the portable kernel from a pool in a decode step."""
        index = self._decode_index(pool_index, rows)
        # Mask the keys in a sequence's blocks that the last token does not see: the unused end
        # of the last block, and those before the window, which may start within the first block.
        first_positions = torch.from_numpy(self.blocks[pool_index].firsts)[rows] * self.block_size
        num_blocks = index.blocks.shape[1]
        key_index = torch.arange(num_blocks * self.block_size)
        key_position = first_positions[:, None] + key_index
        is_masked = key_position >= lengths[:, None]
        window = self.pools[pool_index].window
        if window is not None:
            is_masked |= key_position < lengths[:, None] - window
        mask = torch.zeros(is_masked.shape).masked_fill(is_masked, -torch.inf)
        mask = mask[:, None, None]  # [B, 1, 1, keys]: the same for all heads
        return DecodeRead(index.blocks, num_keys, index, mask)

    def _decode_index(self, pool_index: int, rows: Tensor) -> DecodeIndex:
        """The portable kernel's index for the block tables of these rows.

        Most steps change no block table, so they reuse the index of the step before.
        """
        blocks = self.blocks[pool_index]
        row_numbers = rows.tolist()
        *made_for, index = self._last_index.get(pool_index, (None, None, None))
        if index is not None and made_for == [blocks.version, row_numbers]:
            return index
        index = index_decode(
            [blocks.of_row(row)[1] for row in row_numbers],
            num_kv=self.num_kv_heads,
            groups=self.num_query_groups,
            min_users=self.min_users,
            num_padded=padding.num_padded(len(rows), self.device),
        )
        self._last_index[pool_index] = (blocks.version, row_numbers, index)
        return index
