"""The key/value cache: a pool of blocks, a block table per sequence, fork and free.

Layers that share a window share a pool and its tables; a windowed pool keeps only the blocks its window can see.
A forked sequence shares its parent's full blocks by reference count and copies the last, partial one. All bookkeeping
is on the host; blocks are handed out lowest number first, so that the live part of a pool stays dense.
"""

import heapq
from dataclasses import dataclass, field

import torch
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
from minirl.model.portable_attention import BLOCK, DecodeIndex, block_table, index_decode, min_queries


@dataclass
class BlockTable:
    """A sequence's blocks in one pool: `blocks[i]` holds positions from (first + i) * block_size on."""

    first: int = 0
    blocks: list[int] = field(default_factory=list)


@dataclass
class CachedSequence:
    """`length` tokens are stored; `tables` has one entry per pool."""

    length: int
    tables: list[BlockTable]


class _Blocks:
    """The free list and reference counts of one pool."""

    def __init__(self, num_blocks: int):
        self.free = list(range(num_blocks))
        self.references = [0] * num_blocks

    def take(self) -> int:
        block = heapq.heappop(self.free)
        self.references[block] = 1
        return block

    def release(self, block: int) -> None:
        self.references[block] -= 1
        if self.references[block] == 0:
            heapq.heappush(self.free, block)

    def compact(self) -> dict[int, int]:
        """Rename the highest blocks in use to lower free ones; returns old: new."""
        num_live = len(self.references) - len(self.free)
        moved = [block for block in range(num_live, len(self.references)) if self.references[block]]
        moves = {block: heapq.heappop(self.free) for block in moved}
        for old, new in moves.items():
            self.references[new], self.references[old] = self.references[old], 0
            heapq.heappush(self.free, old)
        return moves


class KVCache:
    """Cache for up to `num_tokens` tokens per layer (rounded up to blocks), shared by up to `max_sequences`.

    A windowed pool is no larger than that many windows.
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
        self.kernel = decode_kernel_for(device, dtype)
        self.block_size = FLASH_BLOCK if self.kernel == "flash" else BLOCK
        self.num_kv_heads, self.num_query_groups, self.device = num_kv_heads, num_query_groups, device
        self.min_users = -(-min_queries(head_dim, dtype) // num_query_groups)
        self.pools: list[CachePool] = []
        self.free_lists: list[_Blocks] = []
        self.pool_of_layer: dict[int, tuple[int, int]] = {}
        for window in sorted(set(layer_windows), key=lambda w: w or 0):
            layers = [i for i, w in enumerate(layer_windows) if w == window]
            self.pool_of_layer |= {layer: (len(self.pools), i) for i, layer in enumerate(layers)}
            num_blocks = -(-num_tokens // self.block_size)
            if window is not None:
                num_blocks = min(num_blocks, max_sequences * ((window - 1) // self.block_size + 2))
            key, value = (num_kv_heads, head_dim, self.block_size), (num_kv_heads, self.block_size, head_dim)
            if self.kernel == "flash":
                key = value = (self.block_size, num_kv_heads, head_dim)
            shapes = ((len(layers), num_blocks, *block) for block in (key, value))
            keys, values = (torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
            self.pools.append(CachePool(keys, values, window, self.kernel))
            self.free_lists.append(_Blocks(num_blocks))
        self._planned: list[tuple[list[list[int]], DecodeIndex] | None] = [None] * len(self.pools)

    def _first_block(self, pool: CachePool, position: int) -> int:
        """The block of the first key that a token at `position` sees."""
        return 0 if pool.window is None else max(0, position - pool.window + 1) // self.block_size

    def spare_blocks(self, num_tokens: int) -> int:
        """Blocks that would stay free, in the pool with the fewest, beside a new sequence of this length."""
        end = (num_tokens - 1) // self.block_size + 1
        return min(
            len(blocks.free) - (end - self._first_block(pool, num_tokens))
            for pool, blocks in zip(self.pools, self.free_lists, strict=True)
        )

    @property
    def num_free_blocks(self) -> int:
        """Free blocks in the pool that has the fewest."""
        return min(len(blocks.free) for blocks in self.free_lists)

    def add(self, num_tokens: int) -> CachedSequence | None:
        """Reserve room for a sequence of `num_tokens`; None when there is not enough."""
        if self.spare_blocks(num_tokens) < 0:
            return None
        tables = []
        for pool, blocks in zip(self.pools, self.free_lists, strict=True):
            first = self._first_block(pool, num_tokens)
            last = (num_tokens - 1) // self.block_size
            tables.append(BlockTable(first, [blocks.take() for _ in range(first, last + 1)]))
            self._clear(pool, tables[-1].blocks[-1:])
        return CachedSequence(num_tokens, tables)

    def _clear(self, pool: CachePool, blocks: list[int]) -> None:
        """Zero blocks that are not about to be filled: the portable kernel multiplies what it masks."""
        if self.kernel == "portable":
            pool.keys[:, blocks], pool.values[:, blocks] = 0, 0

    def fork(self, parent: CachedSequence) -> CachedSequence | None:
        """A second sequence with the same tokens; None when there is no room for its last block."""
        if parent.length % self.block_size and self.num_free_blocks < 1:
            return None
        tables = []
        for pool, blocks, table in zip(self.pools, self.free_lists, parent.tables, strict=True):
            shared = list(table.blocks)
            if parent.length % self.block_size and shared:
                partial = shared.pop()
                shared_and_own = [*shared, blocks.take()]
                pool.keys[:, shared_and_own[-1]] = pool.keys[:, partial]
                pool.values[:, shared_and_own[-1]] = pool.values[:, partial]
            else:
                shared_and_own = shared
            for block in shared:
                blocks.references[block] += 1
            tables.append(BlockTable(table.first, shared_and_own))
        return CachedSequence(parent.length, tables)

    def has_room(self, sequences: list[CachedSequence]) -> bool:
        """Whether `extend` is sure to make room for one more token in each of these."""
        return sum(s.length % self.block_size == 0 for s in sequences) <= self.num_free_blocks

    def extend(self, sequence: CachedSequence) -> bool:
        """Make room for one more token, and give back blocks that its window has left; False when there is none."""
        position = sequence.length
        for pool, blocks, table in zip(self.pools, self.free_lists, sequence.tables, strict=True):
            while table.blocks and table.first < self._first_block(pool, position):
                blocks.release(table.blocks.pop(0))
                table.first += 1
        needs_block = position % self.block_size == 0
        if needs_block and self.num_free_blocks == 0:
            return False
        if needs_block:
            for pool, blocks, table in zip(self.pools, self.free_lists, sequence.tables, strict=True):
                if not table.blocks:
                    table.first = position // self.block_size
                table.blocks.append(blocks.take())
                self._clear(pool, table.blocks[-1:])
        sequence.length += 1
        return True

    def free(self, sequence: CachedSequence) -> None:
        """Give back all blocks of a sequence."""
        for blocks, table in zip(self.free_lists, sequence.tables, strict=True):
            for block in table.blocks:
                blocks.release(block)
            table.blocks.clear()

    def compact(self, sequences: list[CachedSequence]) -> None:
        """Move blocks of these sequences, all that there are, into lower free ones: a decode step reads the live part.

        For the portable kernel only.
        """
        for i, (pool, blocks) in enumerate(zip(self.pools, self.free_lists, strict=True)):
            held = {block for sequence in sequences for block in sequence.tables[i].blocks}
            assert len(held) == len(blocks.references) - len(blocks.free), (
                "a sequence was left out of compact()"
            )
            moves = blocks.compact() if self.kernel == "portable" else {}
            if moves:
                source, target = list(moves), list(moves.values())
                pool.keys[:, target], pool.values[:, target] = pool.keys[:, source], pool.values[:, source]
                for table in (sequence.tables[i] for sequence in sequences):
                    table.blocks = [moves.get(block, block) for block in table.blocks]

    def prefill_layout(self, sequences: list[CachedSequence]) -> PackedLayout:
        """Layout of these sequences' tokens end to end, stored as they pass."""
        cached = []
        for i, pool in enumerate(self.pools):
            token, block, offset, start = [], [], [], 0
            for sequence in sequences:
                table = sequence.tables[i]
                kept = torch.arange(table.first * self.block_size, sequence.length)
                token.append(start + kept)
                block.append(
                    torch.tensor(table.blocks, dtype=torch.int64)[kept // self.block_size - table.first]
                )
                offset.append(kept % self.block_size)
                start += sequence.length
            write = PoolWrite(*(upload(torch.cat(x), self.device) for x in (token, block, offset)))
            cached.append(Cached(pool, write))
        return PackedLayout(tuple(s.length for s in sequences), self.device, self._by_layer(cached))

    def decode_layout(self, sequences: list[CachedSequence]) -> DecodeLayout:
        """Layout of the last token of each sequence, for which `extend` has made room."""
        lengths = torch.tensor([s.length for s in sequences])
        offset = upload((lengths - 1) % self.block_size, self.device)
        cached = []
        for i, pool in enumerate(self.pools):
            tables = [s.tables[i] for s in sequences]
            last = upload(torch.tensor([t.blocks[-1] for t in tables]), self.device)
            cached.append(Cached(pool, PoolWrite(None, last, offset), self._read(i, tables, lengths)))
        return DecodeLayout(upload(lengths - 1, self.device), self._by_layer(cached))

    def _by_layer(self, cached: list[Cached]) -> dict[int, tuple[Cached, int]]:
        return {layer: (cached[pool], index) for layer, (pool, index) in self.pool_of_layer.items()}

    def _read(self, pool: int, tables: list[BlockTable], lengths: Tensor) -> DecodeRead:
        first = torch.tensor([t.first for t in tables]) * self.block_size
        blocks, num_keys = [list(t.blocks) for t in tables], upload((lengths - first).int(), self.device)
        if self.kernel != "portable":
            return DecodeRead(upload(block_table(blocks), self.device), num_keys)
        plan, window = self._plan(pool, blocks), self.pools[pool].window
        key = first[:, None] + torch.arange(plan.blocks.shape[1] * self.block_size)
        hidden = key >= lengths[:, None]
        if window is not None:
            hidden |= key < lengths[:, None] - window
        mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)[:, None, None]
        return DecodeRead(plan.blocks, num_keys, plan, mask.to(self.device))

    def _plan(self, pool: int, tables: list[list[int]]) -> DecodeIndex:
        """The plan of the step before where nothing has changed, as in most steps."""
        last = self._planned[pool]
        if last is None or last[0] != tables:
            heads = dict(num_kv=self.num_kv_heads, groups=self.num_query_groups)
            num_padded = padding.num_padded(len(tables), self.device)
            plan = index_decode(tables, **heads, min_users=self.min_users, num_padded=num_padded).to(
                self.device
            )
            self._planned[pool] = last = (tables, plan)
        return last[1]
