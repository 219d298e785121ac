"""Key/value caches filled with random numbers."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minirl.generation.kv_cache import KVCache
from minirl.model import portable_attention
from minirl.model.attention import DecodeLayout, PagedMetadata
from minirl.model.portable_attention import BLOCK

CPU = torch.device("cpu")


def make_cache(window: int | None, groups: int, dim: int, dtype: torch.dtype) -> tuple[KVCache, list[int]]:
    """Return a random cache and its rows: prompts, forks, and rows decoded past a block border."""
    config: Any = SimpleNamespace(
        attention_windows={0: window},
        delta_net=None,
        num_key_value_heads=2,
        num_attention_heads=2 * groups,
        head_dim=dim,
    )
    cache = KVCache(config, num_tokens=96 * BLOCK, max_sequences=32, dtype=dtype, device=CPU)
    parents = [cache.blocks.add(length) for length in (1, 64, 127, 128, 131, 300)]
    rows = [*parents, *cache.fork(parents[4], 2), *cache.fork(parents[3], 1), *cache.fork(parents[5], 16)]
    cache.blocks.extend(np.array(rows))
    for _ in range(70):
        cache.blocks.extend(np.array([rows[2]]))
    generator = torch.Generator().manual_seed(0)
    for x in (cache.pool.keys, cache.pool.values):
        x.copy_(torch.randn(x.shape, generator=generator))
    return cache, rows


def poison(cache: KVCache, rows: Iterable[int] = ()) -> None:
    """Fill free blocks with NaN, and the unused slots in the last block of each of these rows."""
    pool, free = cache.pool, cache.blocks.free
    pool.keys[:, free], pool.values[:, free] = torch.nan, torch.nan
    for row in rows:
        block = cache.blocks.sequence_blocks(row)[-1]
        end = (length_of(cache, row) - 1) % BLOCK + 1
        pool.keys[:, block, :, :, end:] = torch.nan
        pool.values[:, block, :, end:] = torch.nan


def paged_read(cache: KVCache, rows: list[int]) -> PagedMetadata:
    """Return the paged kernel's metadata for a decode step of these rows; unused table columns hold garbage."""
    lengths = torch.from_numpy(cache.blocks.lengths[rows]).int()
    num_columns = (int(lengths.max()) - 1) // BLOCK + 1
    wide = torch.full((len(rows), num_columns + 4), 10**6, dtype=torch.int32)
    wide[:, :num_columns] = torch.from_numpy(cache.blocks.tables[rows, :num_columns])
    return PagedMetadata(wide[:, :num_columns], lengths)


def decoded_both_ways(
    device: torch.device, window: int | None, groups: int, dim: int, dtype: torch.dtype, chosen: Iterable[int]
) -> tuple[Tensor, Tensor]:
    """Return the outputs of the paged kernel and of portable fp32 attention for some rows of `make_cache`.

    The paged kernel's pool has NaN in all slots that the kernel must not read.
    """
    from minirl.extras.kernels import paged_attention

    cache, rows = make_cache(window, groups, dim, dtype)
    some = [rows[i] for i in chosen]
    keys, values = cache.pool.layers[0]
    q = 2 * torch.randn(len(some), 2 * groups, dim, generator=torch.Generator().manual_seed(1))
    read = decode_layout(cache, some).metadata[window]
    expected = portable_attention.decode(q, keys.float(), values.float(), *read)
    poison(cache, rows)
    inputs = (x.to(device) for x in (q.to(dtype), keys, values, *paged_read(cache, some)))
    return paged_attention.decode(*inputs, window=window), expected


def decode_layout(cache: KVCache, rows: list[int]) -> DecodeLayout:
    """Return the layout of a decode step for these rows' last tokens."""
    inputs = map(torch.from_numpy, cache.begin_step(np.array(rows), cache.blocks.lengths[rows] - 1))
    return cache.decode_layout(*inputs)


def length_of(cache: KVCache, row: int) -> int:
    return int(cache.blocks.lengths[row])
