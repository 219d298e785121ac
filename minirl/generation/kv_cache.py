"""The key/value cache: a pool of fixed-size blocks, and the metadata that attention kernels read.

A block stores the keys and values of consecutive tokens for every attention layer. Sliding-window layers keep all keys,
too; a mask or the kernel hides the keys outside the window. `block_pool` tracks each sequence's blocks. Layers without
attention may cache one state per sequence, indexed by the sequence's row.

A decode step begins with `begin_step`. The engine copies the returned arrays to the device, where `decode_layout`
builds the layout. Most steps change no block table and cost the host only a few vectorized operations, regardless of
the number and length of the sequences.
"""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minirl.generation.block_pool import BlockPool, IntArray, ceil_div
from minirl.model import attention
from minirl.model.attention import (
    PAGED_BLOCK,
    CachePool,
    DecodeLayout,
    PackedLayout,
    PagedMetadata,
    PortableMetadata,
    SlotMapping,
    concatenated_ranges,
    decode_kernel_for,
    to_device,
)
from minirl.model.config import ModelConfig
from minirl.model.portable_attention import (
    BLOCK,
    DecodeIndex,
    additive_causal_mask,
    build_decode_index,
    min_invariant_queries,
)


class KVCache:
    """A key/value cache for `num_tokens` tokens, rounded up to whole blocks."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_tokens: int,
        max_sequences: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """max_sequences: maximum number of sequences with cached non-attention states, excluding a prefix's row."""
        self.config = config
        self.max_sequences = max_sequences
        self.dtype = dtype
        self.device = device
        is_paged = decode_kernel_for(device) == "paged"
        self.block_size = PAGED_BLOCK if is_paged else BLOCK
        self._metadata_builder = None if is_paged else PortableMetadataBuilder(config, dtype)
        self.blocks = BlockPool(ceil_div(num_tokens, self.block_size), self.block_size)
        self.has_states = config.delta_net is not None

    @functools.cached_property
    def pool(self) -> CachePool:
        """The cache memory, allocated on first use and, after `release_memory`, on the next use."""
        config = self.config
        attention_windows = config.attention_windows
        shape = (len(attention_windows), len(self.blocks.ref_counts), config.num_key_value_heads)
        zeros = functools.partial(torch.zeros, dtype=self.dtype, device=self.device)
        # The cache starts with finite values, because the portable kernel also multiplies masked keys and values, and 0
        # x NaN is NaN.
        keys = zeros(*shape, config.head_dim, self.block_size)
        values = zeros(*shape, self.block_size, config.head_dim)
        recurrent_states = None
        if config.delta_net is not None:
            from minirl.extras.delta_net.states import StateCache

            num_rows = self.max_sequences + 1
            recurrent_states = StateCache(config.delta_net, num_rows, dtype=self.dtype, device=self.device)
        layer_caches = dict(zip(attention_windows, zip(keys, values, strict=True), strict=True))
        return CachePool(keys, values, layer_caches, recurrent_states)

    @property
    def prefill_chunk_size(self) -> int:
        """Chunk size for appended tokens: a step computes a sequence's tokens up to the next multiple of this size."""
        recurrent_states = self.pool.recurrent_states
        return self.block_size if recurrent_states is None else recurrent_states.chunk_size

    def release_memory(self) -> None:
        """Free the cache memory. No sequence in the cache may be read afterwards."""
        vars(self).pop("pool", None)

    def fork(self, parent: int, num_forks: int) -> list[int]:
        """Fork a sequence `num_forks` times; return the new rows.

        Full blocks are never written again, so the forks share them with their parent. Each sequence writes its next
        tokens into its last block, so if the parent's last block is partial, each fork needs a free block for a copy.
        """
        length = int(self.blocks.lengths[parent])
        blocks = self.blocks.sequence_blocks(parent)
        full_blocks = blocks[: length // self.block_size]
        fork_rows = [self.blocks.add(length, full_blocks) for _ in range(num_forks)]
        if fork_rows and len(full_blocks) < len(blocks):
            copied_blocks = to_device(
                np.array([self.blocks.sequence_blocks(row)[-1] for row in fork_rows]), self.device
            )
            for pool in (self.pool.keys, self.pool.values):
                pool[:, copied_blocks] = pool[:, blocks[-1], None].clone()
        if fork_rows and self.has_states:
            self.pool.recurrent_states.fork(parent, fork_rows)
        return fork_rows

    def prefill_layout(self, rows: Sequence[int]) -> PackedLayout:
        """Build the layout for prefilling these sequences, packed end to end. The forward pass fills the cache."""
        lengths = self.blocks.lengths[rows]
        positions = concatenated_ranges(0, lengths)
        blocks = self.blocks.blocks_at(np.repeat(rows, lengths), positions)
        offsets = positions % self.block_size
        slot_mapping = SlotMapping(
            self.pool, *(to_device(x, self.device) for x in (np.array(rows), blocks, offsets))
        )
        sequences = tuple(map(attention.Sequence, lengths.tolist()))
        return PackedLayout(sequences, self.device, slot_mapping)

    def begin_step(self, rows: IntArray, positions: IntArray) -> list[NDArray[np.integer]]:
        """Begin a decode step for B tokens in these rows [B]; return `decode_layout`'s arguments, on the host.

        positions [B]: position of each token. The last block of the token's sequence must have space for the token.
        """
        if self.has_states:
            self.pool.recurrent_states.begin_step(rows, positions)
        return [positions, self.blocks.blocks_at(rows, positions), rows, self.blocks.block_tables(rows)]

    def decode_layout(
        self,
        positions: Tensor,
        blocks: Tensor,
        rows: Tensor,
        tables: Tensor,
        *,
        tokens_per_sequence: tuple[int, ...] | None = None,
    ) -> DecodeLayout:
        """Build the layout for a decode step of B tokens, after `begin_step`.

        All arguments are on the device. positions int64 [B]: token positions. blocks int64 [B]: the block that stores
        each token. rows int64 [B]: the row of each token's sequence. tables int32 [B, n]: the block table of each
        token's sequence; entries past the token's block are arbitrary.
        tokens_per_sequence: number of tokens per sequence; None if each sequence has one token.
        """
        slot_mapping = SlotMapping(self.pool, rows, blocks, positions % self.block_size)
        attention_metadata: PagedMetadata | PortableMetadata
        if self._metadata_builder is None:
            attention_metadata = PagedMetadata(tables, (positions + 1).int())
        else:
            attention_metadata = self._metadata_builder.build(tables, positions)
        return DecodeLayout(positions, slot_mapping, attention_metadata, tokens_per_sequence)


class PortableMetadataBuilder:
    """Builds the portable kernel's metadata for a decode step; reuses indices while block tables stay the same."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        self._windows = set(config.attention_windows.values())
        num_queries_per_kv = config.num_attention_heads // config.num_key_value_heads
        num_queries = min_invariant_queries(config.head_dim, dtype) or 1
        self._index = functools.partial(
            build_decode_index,
            num_kv_heads=config.num_key_value_heads,
            num_queries_per_kv=num_queries_per_kv,
            # Minimum number of slots per block and KV head (see `DecodeIndex`).
            min_readers=ceil_div(num_queries, num_queries_per_kv),
        )
        # The block tables for which the indices were built; entries past each token's block are -1.
        self._tables = np.zeros((0, 0), np.int32)
        self._indices: dict[int | None, DecodeIndex] = {}

    def build(self, block_tables: Tensor, positions: Tensor) -> PortableMetadata:
        """Return the index and the mask for each window size; see `KVCache.decode_layout` for the arguments."""
        num_blocks = positions.numpy()[:, None] // BLOCK + 1
        table_columns = np.arange(num_blocks.max())
        trimmed_block_tables = np.where(
            table_columns < num_blocks, block_tables.numpy()[:, : len(table_columns)], np.int32(-1)
        )
        if not np.array_equal(trimmed_block_tables, self._tables):
            self._tables = trimmed_block_tables
            self._indices = {
                window: self._index(trimmed_block_tables, window=window) for window in self._windows
            }
        # All heads share the mask.
        return {
            window: (index, additive_causal_mask(index.key_positions, positions[:, None], window)[:, None])
            for window, index in self._indices.items()
        }
