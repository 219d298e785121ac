"""The key/value cache: a pool of fixed-size blocks, with a block table for each sequence.

A block holds keys and values of consecutive tokens in every layer with attention. Layers with a window keep all keys,
too: a mask, or the kernel, leaves out those that the window no longer sees. A fork shares its parent's full blocks by
reference count and copies the last, partial one. All bookkeeping is on the host. Blocks are handed out lowest number
first, so that those in use stay dense.

Layers with a gated delta net keep a state of each sequence instead, in the slot of the sequence's row (`states`). A
prefill writes all of it, and a fork copies it. It advances when a token begins a chunk of the delta rule.

A sequence is identified by its row, its index in the arrays of lengths and block tables. Most steps change no table,
so a decode step costs the host a few operations on whole columns, regardless of the number and length of the sequences.
"""

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

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
    PackedLayout,
    PagedRead,
    PortableRead,
    concatenated_ranges,
    decode_kernel_for,
    upload,
)
from minirl.model.config import DELTA_CHUNK, ModelConfig
from minirl.model.portable_attention import BLOCK, DecodeIndex, index_decode, min_queries

if TYPE_CHECKING:
    from minirl.extras.delta_net.rule import DeltaStates

Number = TypeVar("Number", int, Tensor)


def ceil_div(a: Number, b: int) -> Number:
    """a / b, rounded up."""
    return -(-a // b)


class KVCache:
    """Cache for `num_tokens` tokens (rounded up to blocks) of sequences.

    lengths int64 [rows]: how many tokens each sequence has space for.
    tables int32 [rows, columns]: a sequence's blocks in its first columns, as many as its length needs; the others are
    void. Both arrays grow on demand.
    free_blocks: a heap of their numbers. references: how many sequences have each block.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_tokens: int,
        max_sequences: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """config: of the model. States of gated delta nets have room for `max_sequences` sequences and a stem."""
        self.kernel = decode_kernel_for(device)
        self.block_size = PAGED_BLOCK if self.kernel == "paged" else BLOCK
        self.config = config
        self.device = device
        self.num_query_groups = config.num_attention_heads // config.num_key_value_heads
        # The portable kernel multiplies each block with the queries of at least this many sequences.
        num_queries = min_queries(config.head_dim, dtype) or padding.MIN_ROWS
        self.min_users = ceil_div(num_queries, self.num_query_groups)

        num_blocks = ceil_div(num_tokens, self.block_size)
        windows = config.attention_windows
        shape = (len(windows), num_blocks, config.num_key_value_heads)
        keys = torch.empty(*shape, config.head_dim, self.block_size, dtype=dtype, device=device)
        values = torch.empty(*shape, self.block_size, config.head_dim, dtype=dtype, device=device)
        index_of_layer = {layer: i for i, layer in enumerate(windows)}
        self.pool = CachePool(keys, values, index_of_layer)
        self.free_blocks = list(range(num_blocks))
        self.references = [0] * num_blocks
        # By layer; the slot of a sequence has the number of its row.
        self.states: dict[int, DeltaStates] = {}
        delta_net = config.delta_net
        if delta_net is not None:
            from minirl.extras.delta_net.rule import make_states

            for layer in delta_net.layers:
                self.states[layer] = make_states(delta_net, max_sequences + 1, dtype=dtype, device=device)

        self.lengths = torch.zeros(0, dtype=torch.int64)
        # The same memory: numpy reads and writes single numbers much faster than torch.
        self._lengths = self.lengths.numpy()
        self.tables = np.zeros((0, 8), np.int32)
        self._free_rows: list[int] = []
        self._windows = set(windows.values())
        # How often a table has changed; then this number, the rows and the portable kernel's index of the last decode
        # step.
        self._version = 0
        self._last_indices: tuple[Any, dict[int | None, tuple[DecodeIndex, Tensor]]] = None, {}

    def blocks_of(self, row: int) -> list[int]:
        """The blocks of a sequence, in its order."""
        num_blocks = ceil_div(int(self._lengths[row]), self.block_size)
        return self.tables[row, :num_blocks].tolist()

    def spare_blocks(self, num_tokens: int) -> int:
        """Blocks that would stay free if a sequence of `num_tokens` were added; negative if it does not fit."""
        return len(self.free_blocks) - ceil_div(num_tokens, self.block_size)

    def num_new_blocks(self, length: Number, num_more: Number) -> Number:
        """How many blocks a sequence of `length` tokens needs for `num_more` more; numbers or tensors."""
        return ceil_div(length + num_more, self.block_size) - ceil_div(length, self.block_size)

    def add(self, num_tokens: int) -> int | None:
        """Reserve blocks for a sequence of `num_tokens`; returns its row, or None if there are too few blocks."""
        if self.spare_blocks(num_tokens) < 0:
            return None
        blocks = [self._take_block() for _ in range(ceil_div(num_tokens, self.block_size))]
        # Prefill fills all blocks but the last one.
        self._clear(blocks[-1])
        row = self._take_row(num_tokens)
        self._set_blocks(row, 0, blocks)
        return row

    def _take_row(self, length: int) -> int:
        """Take the lowest free row for a sequence of this length."""
        if not self._free_rows:
            num_rows = len(self.lengths)
            num_more = max(8, num_rows)
            self.lengths = F.pad(self.lengths, (0, num_more))
            self._lengths = self.lengths.numpy()
            self.tables = np.pad(self.tables, ((0, num_more), (0, 0)))
            self._free_rows = list(range(num_rows, num_rows + num_more))
        row = heapq.heappop(self._free_rows)
        self._lengths[row] = length
        return row

    def _take_block(self) -> int:
        """Take the lowest free block."""
        block = heapq.heappop(self.free_blocks)
        self.references[block] = 1
        return block

    def _set_blocks(self, row: int, first: int, blocks: Sequence[int]) -> None:
        """Set the blocks of a row from column `first` on."""
        end = first + len(blocks)
        num_columns = self.tables.shape[1]
        if end > num_columns:
            self.tables = np.pad(self.tables, ((0, 0), (0, max(end - num_columns, num_columns))))
        self.tables[row, first:end] = blocks
        self._version += 1

    def _clear(self, block: int) -> None:
        """Zero a block that will be read before it is full.

        The portable kernel multiplies masked keys and values too, and 0 x NaN is NaN. The paged one does not read them.
        """
        if self.kernel == "portable":
            self.pool.keys[:, block] = 0
            self.pool.values[:, block] = 0

    def _copy(self, old: int, new: int) -> None:
        """Copy a block."""
        self.pool.keys[:, new] = self.pool.keys[:, old]
        self.pool.values[:, new] = self.pool.values[:, old]

    def fork(self, parent: int) -> int | None:
        """Make a second sequence with the same tokens; returns None if no block is free for its partial one."""
        length = int(self._lengths[parent])
        has_partial_block = length % self.block_size != 0
        if has_partial_block and not self.free_blocks:
            return None
        # Full blocks are never written again, so both sequences can read the same ones. Each will write its next tokens
        # into the partial block, so the fork gets a copy of that.
        blocks = self.blocks_of(parent)
        if has_partial_block:
            copy = self._take_block()
            self._copy(blocks.pop(), copy)
        for block in blocks:
            self.references[block] += 1
        fork = self._take_row(length)
        self._set_blocks(fork, 0, [*blocks, copy] if has_partial_block else blocks)
        for states in self.states.values():
            for pool_of_states in states:
                pool_of_states[fork] = pool_of_states[parent]
        return fork

    def can_extend(self, rows: Tensor) -> bool:
        """Return whether `extend` succeeds for each of these rows int64 [B], one after another."""
        return int(self.needs_blocks(rows).sum()) <= len(self.free_blocks)

    def needs_blocks(self, rows: Tensor) -> Tensor:
        """Return bool [B]: `extend` of these rows int64 [B] begins a block. Otherwise it only counts."""
        return self.lengths[rows] % self.block_size == 0

    def extend(self, row: int) -> bool:
        """Add space for one more token. Returns False and keeps the length if no block is free for it."""
        position = int(self._lengths[row])
        if position % self.block_size == 0:
            if not self.free_blocks:
                return False
            block = self._take_block()
            self._clear(block)
            self._set_blocks(row, position // self.block_size, [block])
        self._lengths[row] += 1
        return True

    def extend_by(self, row: int, num_tokens: int) -> int:
        """Extend by up to `num_tokens`, all within one block, and one chunk of the delta rule if there are states.

        Returns by how many, 0 if no block is free.
        """
        if not self.extend(row):
            return 0
        part = min(DELTA_CHUNK, self.block_size) if self.states else self.block_size
        num_more = min(num_tokens - 1, -int(self._lengths[row]) % part)
        self._lengths[row] += num_more
        return 1 + num_more

    def free(self, row: int) -> None:
        """Free all blocks of a sequence that no other one has, and its row."""
        for block in self.blocks_of(row):
            self.references[block] -= 1
            if self.references[block] == 0:
                heapq.heappush(self.free_blocks, block)
        heapq.heappush(self._free_rows, row)

    def compact(self) -> None:
        """Move the n blocks in use to the numbers 0 to n - 1. Only for the portable kernel.

        That kernel multiplies the pool up to the highest block in use, so the free ones below would cost time.
        """
        num_blocks = len(self.references)
        num_in_use = num_blocks - len(self.free_blocks)
        has_gaps = self.free_blocks and self.free_blocks[0] < num_in_use
        if self.kernel != "portable" or not has_gaps:
            return
        # Each block in use at n or above takes the number of a free one below n. There are equally many of both, and
        # the heap hands out the lowest first. A block that several sequences share moves once. Blocks are large: one
        # copy each takes a third of the time of one copy by index for all.
        too_high = [block for block in range(num_in_use, num_blocks) if self.references[block] > 0]
        numbers = np.arange(num_blocks, dtype=np.int32)
        for old in too_high:
            new = heapq.heappop(self.free_blocks)
            self._copy(old, new)
            numbers[old] = new
            self.references[new] = self.references[old]
            self.references[old] = 0
            heapq.heappush(self.free_blocks, old)
        self._version += 1
        self.tables = numbers[self.tables]

    def prefill_layout(self, rows: Sequence[int]) -> PackedLayout:
        """Layout of all tokens of these sequences, packed end to end. The forward pass fills the cache."""
        row = torch.tensor(rows)
        lengths = self.lengths[row]
        positions = concatenated_ranges(torch.zeros_like(lengths), lengths)
        blocks = self._blocks_at(row.repeat_interleave(lengths), positions)
        cached = Cached(
            self.pool, upload(blocks, self.device), upload(positions % self.block_size, self.device)
        )
        slots = upload(row, self.device) if self.states else None
        return PackedLayout(tuple(lengths.tolist()), self.device, cached, states=self.states, slots=slots)

    def _blocks_at(self, rows: Tensor, positions: Tensor) -> Tensor:
        """The blocks of n tokens at these positions int64 [n] of the sequences in these rows int64 [n]; int64."""
        tables = torch.from_numpy(self.tables)
        return tables[rows, positions // self.block_size].long()

    def decode_inputs(self, rows: Tensor, lengths: Tensor | None = None) -> list[Tensor]:
        """The tensors that `decode_layout` of these rows needs on the device, still on the host.

        Called once for each step: it also advances the states of sequences whose token begins a chunk.

        lengths int64 [B]: how many tokens of its sequence each of the B tokens sees; by default all.

        Positions int64 [B] and the blocks that they are in, int64 [B]. Then, for the paged kernel, the block tables
        int32 [B, n], and the slots of states int64 [B], if the model has them.
        """
        positions = (self.lengths[rows] if lengths is None else lengths) - 1
        inputs = [positions, self._blocks_at(rows, positions)]
        if self.kernel == "paged":
            # Void columns hold numbers of other blocks. The kernel reads no further than the keys.
            num_columns = int(positions.max()) // self.block_size + 1
            inputs.append(torch.from_numpy(self.tables)[:, :num_columns].index_select(0, rows))
        if self.states:
            inputs.append(rows)
            begins_chunk = (positions > 0) & (positions % DELTA_CHUNK == 0)
            if begins_chunk.any():
                from minirl.extras.delta_net.rule import end_chunks

                slots = upload(rows[begins_chunk], self.device)
                for states in self.states.values():
                    end_chunks(states, slots)
        return inputs

    def decode_layout(
        self, rows: Tensor, inputs: Sequence[Tensor] | None = None, lengths: Tensor | None = None
    ) -> DecodeLayout:
        """Layout of the last token of each of these sequences int64 [B], for which `extend` has added the space.

        For several tokens of a sequence repeat its row and give `lengths` int64 [B], see `decode_inputs`.

        inputs: the `decode_inputs` of the rows, on the device.
        """
        if inputs is None:
            inputs = [upload(tensor, self.device) for tensor in self.decode_inputs(rows, lengths)]
        positions, block, *left = inputs
        read: PagedRead | PortableRead
        if self.kernel == "portable":
            read = self._portable_read(rows, positions)
        else:
            block_table, *left = left
            read = PagedRead(block_table, (positions + 1).int())
        cached = Cached(self.pool, block, positions % self.block_size)
        if not self.states:
            return DecodeLayout(positions, cached, read)
        rounds: list[Tensor | slice] = [slice(None)]
        num_slots = None
        if lengths is not None:
            rounds = self._rounds(rows)
        elif self.kernel == "portable" and rows.max() < 2 * len(rows):  # else most slots would be idle
            num_slots = int(rows.max()) + 1
        return DecodeLayout(positions, cached, read, self.states, left[0], rounds, num_slots)

    def _rounds(self, rows: Tensor) -> list[Tensor | slice]:
        """Split the tokens of a decode step into parts with at most one token of each sequence."""
        _, counts = rows.unique_consecutive(return_counts=True)
        number = concatenated_ranges([0] * len(counts), counts)
        return [upload((number == i).nonzero()[:, 0], self.device) for i in range(int(counts.max()))]

    def _portable_read(self, rows: Tensor, positions: Tensor) -> PortableRead:
        """The inputs of the portable kernel in a decode step of tokens at these positions int64 [B]."""
        position = positions[:, None]
        read = {}
        for window, (index, first_key) in self._decode_indices(rows).items():
            # Mask the keys in a sequence's blocks that the token does not see: those after it, and before the window.
            key = first_key + torch.arange(index.blocks.shape[1] * self.block_size)
            is_masked = key > position
            if window is not None:
                is_masked |= key <= position - window
            mask = torch.zeros(is_masked.shape).masked_fill(is_masked, -torch.inf)
            read[window] = index, mask[:, None, None]  # [B, 1, 1, keys]: the same for all heads
        return read

    def _decode_indices(self, rows: Tensor) -> dict[int | None, tuple[DecodeIndex, Tensor]]:
        """By window the portable kernel's index for these rows, and int64 [B, 1] the position of the first key in it.

        Most steps change no block table, so they reuse the indices of the step before.
        """
        row_numbers = rows.tolist()
        made_for, indices = self._last_indices
        if made_for == (self._version, row_numbers):
            return indices
        tables = list(map(self.blocks_of, row_numbers))
        # The tokens are in a sequence's last block. The oldest key is that which its first token sees.
        starts = [(len(table) - 1) * BLOCK for table in tables]
        first_blocks = {
            window: tuple(max(0, start - window + 1) // BLOCK if window else 0 for start in starts)
            for window in self._windows
        }
        # Windows that see all of each sequence have one index.
        made = {
            firsts: index_decode(
                [table[first:] for table, first in zip(tables, firsts, strict=True)],
                num_kv=self.config.num_key_value_heads,
                groups=self.num_query_groups,
                min_users=self.min_users,
                num_padded=padding.num_padded(len(rows), self.device),
            )
            for firsts in set(first_blocks.values())
        }
        indices = {
            window: (made[firsts], torch.tensor(firsts)[:, None] * BLOCK)
            for window, firsts in first_blocks.items()
        }
        self._last_indices = (self._version, row_numbers), indices
        return indices
