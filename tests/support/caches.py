"""Key/value caches filled with random numbers."""

import torch

from minirl.generation.kv_cache import CachedSequence, KVCache
from minirl.model.portable_attention import BLOCK

CPU = torch.device("cpu")


def make_cache(
    window: int | None, groups: int, dim: int, dtype: torch.dtype
) -> tuple[KVCache, list[CachedSequence]]:
    """A pool of random keys and values with prompts, their forks, and rows that have decoded past a block's border."""
    shape = {"num_kv_heads": 2, "head_dim": dim, "num_query_groups": groups}
    cache = KVCache((window,), num_tokens=24 * BLOCK, max_sequences=12, dtype=dtype, device=CPU, **shape)
    parents = [cache.add(length) for length in (1, 64, 127, 128, 131, 300)]
    rows = [*parents, *(cache.fork(parents[i]) for i in (4, 4, 3, 5))]
    for row in rows:
        assert cache.extend(row)
    for _ in range(70):
        assert cache.extend(rows[2])
    generator = torch.Generator().manual_seed(0)
    for x in (cache.pools[0].keys, cache.pools[0].values):
        x.copy_(torch.randn(x.shape, generator=generator))
    if window == 100:
        assert any(cache.tables[0].of_row(row.row)[0] for row in rows), "no row has left a block behind"
    return cache, rows


def poison(cache: KVCache, rows: list[CachedSequence]) -> None:
    """What no row may see is not a number: free blocks, and the rest of each last block."""
    pool, blocks = cache.pools[0], cache.free_lists[0]
    pool.keys[:, blocks.free], pool.values[:, blocks.free] = torch.nan, torch.nan
    for row in rows:
        end = (row.length - 1) % BLOCK + 1
        _, row_blocks = cache.tables[0].of_row(row.row)
        pool.keys[:, row_blocks[-1], :, :, end:] = torch.nan
        pool.values[:, row_blocks[-1], :, end:] = torch.nan
