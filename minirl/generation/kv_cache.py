"""The key/value cache: a pool of fixed-size blocks, and what the attention kernels read of it.

A block holds keys and values of consecutive tokens in every layer with attention. Layers with a window keep all keys,
too: a mask, or the kernel, leaves out those that the window no longer sees. Which blocks a sequence has is in
`block_pool`. Other layers than attention may cache states, each in the row of its sequence.

A decode step begins with `begin_step`; its arrays are copied to the device, and `decode_layout` makes the layout.
Most steps change no table, so a step costs the host a few operations on whole columns, regardless of the number and
length of the sequences.
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
    upload,
)
from minirl.model.config import ModelConfig
from minirl.model.portable_attention import BLOCK, DecodeIndex, index_decode, mask_keys, min_queries


class KVCache:
    """Cache for `num_tokens` tokens (rounded up to blocks) of sequences."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_tokens: int,
        max_sequences: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """max_sequences: for how many, and a prefix, layers without attention can cache states."""
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
        """The memory, allocated at its first use since `free_memory`."""
        config = self.config
        windows = config.attention_windows
        shape = (len(windows), len(self.blocks.ref_counts), config.num_key_value_heads)
        zeros = functools.partial(torch.zeros, dtype=self.dtype, device=self.device)
        # Finite numbers from the start: the portable kernel multiplies masked keys and values too, and 0 x NaN is NaN.
        keys = zeros(*shape, config.head_dim, self.block_size)
        values = zeros(*shape, self.block_size, config.head_dim)
        states = None
        if config.delta_net is not None:
            from minirl.extras.delta_net.states import StateCache

            num_rows = self.max_sequences + 1
            states = StateCache(config.delta_net, num_rows, dtype=self.dtype, device=self.device)
        layers = dict(zip(windows, zip(keys, values, strict=True), strict=True))
        return CachePool(keys, values, layers, states)

    @property
    def prefill_chunk_size(self) -> int:
        """The size of a part: a step computes tokens of a sequence up to the next multiple of it."""
        states = self.pool.states
        return self.block_size if states is None else min(self.block_size, states.chunk_size)

    def free_memory(self) -> None:
        """Free the memory, which no sequence may need any more."""
        vars(self).pop("pool", None)

    def fork(self, parent: int, num_forks: int) -> list[int]:
        """Make sequences with the same tokens, if there are blocks for their partial ones; returns their rows."""
        forks = [self.blocks.fork(parent) for _ in range(num_forks)]
        last, *copies = (self.blocks.blocks_of(row)[-1] for row in (parent, *forks))
        if copies and copies[0] != last:
            index = upload(np.array(copies), self.device)
            for pool in (self.pool.keys, self.pool.values):
                pool[:, index] = pool[:, last : last + 1].clone()
        if forks and self.has_states:
            self.pool.states.fork(parent, forks)
        return forks

    def prefill_layout(self, rows: Sequence[int]) -> PackedLayout:
        """Layout of all tokens of these sequences, packed end to end. The forward pass fills the cache."""
        lengths = self.blocks.lengths[rows]
        positions = concatenated_ranges(0, lengths)
        blocks = self.blocks.block_at(np.repeat(rows, lengths), positions)
        offsets = positions % self.block_size
        slot_mapping = SlotMapping(
            self.pool, *(upload(x, self.device) for x in (np.array(rows), blocks, offsets))
        )
        sequences = tuple(map(attention.Sequence, lengths.tolist()))
        return PackedLayout(sequences, self.device, slot_mapping)

    def begin_step(self, rows: IntArray, positions: IntArray) -> list[NDArray[np.integer]]:
        """Begin a decode step of B tokens of these sequences; returns what `decode_layout` takes, on the host.

        positions [B]: those of the tokens, each in the last block of its sequence, which has space for it.
        """
        if self.has_states:
            self.pool.states.begin_step(rows, positions)
        return [positions, self.blocks.block_at(rows, positions), rows, self.blocks.block_tables(rows)]

    def decode_layout(
        self,
        positions: Tensor,
        blocks: Tensor,
        rows: Tensor,
        tables: Tensor,
        *,
        tokens_per_sequence: tuple[int, ...] | None = None,
    ) -> DecodeLayout:
        """Layout of the B tokens of a step that has begun.

        On the device: positions int64 [B]; blocks int64 [B], in which the tokens are stored; rows int64 [B], of their
        sequences; tables int32 [B, n], the blocks of their sequences, with garbage behind the token's own.
        tokens_per_sequence: if sequences have several tokens, how many each has.
        """
        slot_mapping = SlotMapping(self.pool, rows, blocks, positions % self.block_size)
        metadata: PagedMetadata | PortableMetadata
        if self._metadata_builder is None:
            metadata = PagedMetadata(tables, (positions + 1).int())
        else:
            metadata = self._metadata_builder.build(tables, positions)
        return DecodeLayout(positions, slot_mapping, metadata, tokens_per_sequence)


class PortableMetadataBuilder:
    """Makes what the portable kernel reads in a decode step. Keeps the indices while the tables stay the same."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        self._windows = set(config.attention_windows.values())
        groups = config.num_attention_heads // config.num_key_value_heads
        num_queries = min_queries(config.head_dim, dtype) or 1
        self._index = functools.partial(
            index_decode,
            num_kv_heads=config.num_key_value_heads,
            groups=groups,
            # The kernel multiplies each block with the queries of at least this many sequences.
            min_users=ceil_div(num_queries, groups),
        )
        # The tables that the indices were made for, -1 beyond the blocks of tokens.
        self._tables = np.zeros((0, 0), np.int32)
        self._indices: dict[int | None, DecodeIndex] = {}

    def build(self, block_tables: Tensor, positions: Tensor) -> PortableMetadata:
        """The index and the mask of each window; see `KVCache.decode_layout` for the arguments."""
        num_blocks = positions.numpy()[:, None] // BLOCK + 1
        column = np.arange(num_blocks.max())
        tables = np.where(column < num_blocks, block_tables.numpy()[:, : len(column)], np.int32(-1))
        if not np.array_equal(tables, self._tables):
            self._tables = tables
            self._indices = {window: self._index(tables, window=window) for window in self._windows}
        # The same mask for all heads.
        return {
            window: (index, mask_keys(index.keys, positions[:, None], window)[:, None])
            for window, index in self._indices.items()
        }
