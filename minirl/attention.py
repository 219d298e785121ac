"""Attention over packed streams: the only room that knows masks and padding.

A layout says what the tokens of a stream are. `PackedLayout`: whole sequences end to end (training, scoring, prefill).
`DecodeLayout`: one new token for each of B cached sequences. `attend` takes either, so the model has one forward.

Two kernels with one meaning. Where flash-attn or torch's varlen kernel runs (CUDA, 16 bit) it is used. The portable one
is two products and a softmax over blocks of BLOCK keys: every product has the same shape whoever asks, the blocks are
added in order in fp32, and a row's result is bitwise the same in training, prefill and decode (`numerics`).
Positions count from 0 in each sequence; all attention is causal; `window` w means a token sees itself and w - 1 before.
"""

import functools
import importlib.util
import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from minirl import numerics

BLOCK = 128  # keys of one product in the portable kernel, and tokens of a cache block there
FLASH_BLOCK = 256  # tokens of a cache block for flash-attn
MIN_QUERIES = 8  # as numerics.MIN_ROWS; reductions of at most BLOCK need fewer


@functools.cache
def flash_attn_installed() -> bool:
    """Whether the `flash` extra is there."""
    return importlib.util.find_spec("flash_attn") is not None


def kernel_for(device: torch.device, dtype: torch.dtype) -> str:
    """The attention kernel for tensors like these: "flash", "varlen" (torch's own) or "portable"."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return "portable"
    return "flash" if flash_attn_installed() else "varlen"


@dataclass(frozen=True)
class CachePool:
    """The keys and values of the layers that share one window, in blocks.

    keys, values: [layers, S, K, BLOCK, C] for the portable kernel, [layers, S, FLASH_BLOCK, K, C] for flash-attn.
    """

    keys: Tensor
    values: Tensor
    window: int | None
    is_flash: bool

    def write(self, layer: int, k: Tensor, v: Tensor, block: Tensor, offset: Tensor) -> None:
        """Store k, v [n, K, C] of n tokens at (block, offset) [n], in the pool's `layer`-th layer."""
        if self.is_flash:
            self.keys[layer][block, offset] = k
            self.values[layer][block, offset] = v
        else:
            self.keys[layer][block, :, offset] = k
            self.values[layer][block, :, offset] = v


@dataclass(frozen=True)
class PoolWrite:
    """Where tokens of a stream go in a pool: `token` [n] of the stream is stored at (`block`, `offset`) [n]."""

    token: Tensor
    block: Tensor
    offset: Tensor


@dataclass(frozen=True)
class Cached:
    """One pool as seen by a layout: what to store there and, when decoding, what to read."""

    pool: CachePool
    write: PoolWrite
    read: "DecodeRead | None" = None


@dataclass(frozen=True)
class DecodeRead:
    """Which blocks each of B rows reads, and the same table from the blocks' side.

    table [B, n]: the row's visible blocks in order, as user slots (block x U + place); unused entries are 0.
    first [B]: position of the first key in the row's first visible block. num_blocks [B]: its visible blocks.
    users [S', U]: the rows that read each block of the live part of the pool (a group shares its prompt's blocks).
    source [S', U]: for each user slot its place in `table`, flattened. Entries without a user are 0.
    blocks [B, n] and lengths [B]: the plain block table, and the number of keys from `first` on (flash-attn).
    """

    table: Tensor
    first: Tensor
    num_blocks: Tensor
    users: Tensor
    source: Tensor
    blocks: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class PackedLayout:
    """N whole sequences end to end, T = sum(lengths). `caches` maps a layer to its pool when keys are to be kept."""

    lengths: tuple[int, ...]
    device: torch.device
    caches: dict[int, tuple[Cached, int]] = field(default_factory=dict)  # layer -> (pool, layer within the pool)

    @functools.cached_property
    def cu_seqlens(self) -> Tensor:
        """Starts of the sequences and the end of the last, int32 [N + 1]."""
        return F.pad(torch.tensor(self.lengths, dtype=torch.int64).cumsum(0), (1, 0)).to(self.device, torch.int32)

    @functools.cached_property
    def positions(self) -> Tensor:
        """Position of each token in its sequence, int64 [T]."""
        return torch.cat([torch.arange(0), *map(torch.arange, self.lengths)]).to(self.device)

    @functools.cached_property
    def query_blocks(self) -> dict:
        """Cache of `_query_blocks` by (window, heads per key head): one plan serves every layer."""
        return {}


@dataclass(frozen=True)
class DecodeLayout:
    """One new token for each of B cached sequences; `positions` int64 [B] are the new tokens' own."""

    positions: Tensor
    caches: dict[int, tuple[Cached, int]]


Layout = PackedLayout | DecodeLayout


def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, layer: int, window: int | None) -> Tensor:
    """Causal attention of q [T, H, C] over k, v [T, K, C] (and, when decoding, over the cache) -> [T, H, C].

    Stores k and v in the layout's cache for `layer`, where it has one.
    """
    cached, index = layout.caches.get(layer, (None, 0))
    if cached is not None:
        token = cached.write.token
        cached.pool.write(index, k[token], v[token], cached.write.block, cached.write.offset)
    if isinstance(layout, PackedLayout):
        kernel = kernel_for(q.device, q.dtype)
        if kernel == "portable":
            return _attend_portable(q, k, v, layout, window)
        return _attend_varlen(q, k, v, layout, window, kernel)
    assert cached is not None, f"layer {layer} has no cache to decode from"
    assert cached.read is not None, f"layer {layer} has no block table to decode from"
    if cached.pool.is_flash:
        return _decode_flash(q, cached.pool, index, cached.read)
    return _decode_portable(q, cached.pool, index, cached.read, layout.positions)


def _attend_varlen(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, window: int | None, kernel: str) -> Tensor:
    cu, longest = layout.cu_seqlens, max(layout.lengths, default=0)
    if longest == 0:
        return q + 0 * (k.sum() + v.sum())
    left = -1 if window is None else window - 1
    if kernel == "flash":
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=True, window_size=(left, 0))
    from torch.nn.attention.varlen import varlen_attn

    groups = q.shape[1] // k.shape[1]  # torch 2.11 has no flag for shared key heads, so they are repeated
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    out = varlen_attn(q, k, v, cu, cu, longest, longest, window_size=(left, 0))
    assert isinstance(out, Tensor)
    return out


@dataclass(frozen=True)
class _QueryBlock:
    """The i-th block of queries of every sequence that has one, and the keys that it can see.

    queries [n, R], keys [n, blocks x BLOCK]: indices into the stream, T for "no such token". mask [R, keys], additive.
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor


def _query_blocks(layout: PackedLayout, window: int | None, groups: int) -> tuple[list[_QueryBlock], Tensor]:
    """The query blocks of a layout, and for each token its place among their queries, flattened [T]."""
    lengths = torch.tensor(layout.lengths, dtype=torch.int64)
    num_tokens, starts = int(lengths.sum()), lengths.cumsum(0) - lengths
    plan, place, offset = [], torch.empty(num_tokens, dtype=torch.int64), 0
    for start in range(0, max(1, int(lengths.max()) if len(lengths) else 0), BLOCK):
        chosen = (lengths > start).nonzero()[:, 0]
        rows = int((lengths[chosen] - start).clamp(max=BLOCK).max()) if len(chosen) else 0
        rows = max(rows, -(-MIN_QUERIES // groups))
        query = start + torch.arange(rows)
        first = 0 if window is None else max(0, start - window + 1) // BLOCK * BLOCK
        key = torch.arange(first, start + BLOCK)
        hidden = key > query[:, None]
        if window is not None:
            hidden |= key <= query[:, None] - window
        mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
        starts_here, ends_here = starts[chosen, None], (starts + lengths)[chosen, None]
        queries, keys = starts_here + query, starts_here + key
        is_token = (query < start + BLOCK) & (queries < ends_here)
        slots = offset + torch.arange(is_token.numel()).view(is_token.shape)
        place[queries[is_token]] = slots[is_token]
        offset += is_token.numel()
        block = (queries.masked_fill(~is_token, num_tokens), keys.masked_fill(keys >= ends_here, num_tokens), mask)
        plan.append(_QueryBlock(*(x.to(layout.device) for x in block)))
    return plan, place.to(layout.device)


def _attend_portable(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, window: int | None) -> Tensor:
    num_heads, num_kv, dim = q.shape[1], k.shape[1], q.shape[2]
    groups = num_heads // num_kv
    if (window, groups) not in layout.query_blocks:
        layout.query_blocks[window, groups] = _query_blocks(layout, window, groups)
    plan, place = layout.query_blocks[window, groups]
    q, k, v = (torch.cat([x, x.new_zeros(1, *x.shape[1:])]) for x in (q, k, v))
    outputs = []
    for part in plan:
        n, rows = part.queries.shape
        blocks = part.keys.shape[1] // BLOCK
        qs = q.index_select(0, part.queries.flatten()).view(n, rows, num_kv, groups, dim)
        qs = qs.permute(0, 2, 3, 1, 4).reshape(n, num_kv, 1, groups * rows, dim)
        ks = k.index_select(0, part.keys.flatten()).view(n, blocks, BLOCK, num_kv, dim).permute(0, 3, 1, 2, 4)
        vs = v.index_select(0, part.keys.flatten()).view(n, blocks, BLOCK, num_kv, dim).permute(0, 3, 1, 2, 4)
        scores = qs @ ks.transpose(-1, -2)  # [n, K, blocks, groups * rows, BLOCK]
        scores = scores.transpose(2, 3).reshape(n, num_kv, groups, rows, blocks * BLOCK)
        probs = _softmax(scores, part.mask, dim).view(n, num_kv, groups * rows, blocks, BLOCK).transpose(2, 3)
        out = _sum_in_order((probs @ vs).unbind(2)).to(q.dtype)  # [n, K, groups * rows, C]
        outputs.append(out.view(n, num_kv, groups, rows, dim).permute(0, 3, 1, 2, 4).reshape(-1, num_heads, dim))
    return torch.cat(outputs).index_select(0, place)


def _softmax(scores: Tensor, mask: Tensor, dim: int) -> Tensor:
    wide = scores.to(numerics.at_least_fp32(scores.dtype))
    return torch.softmax(wide * (1 / math.sqrt(dim)) + mask.to(wide.dtype), -1).to(scores.dtype)


def _sum_in_order(parts: tuple[Tensor, ...]) -> Tensor:
    total = parts[0].to(numerics.at_least_fp32(parts[0].dtype))
    for part in parts[1:]:
        total = total + part
    return total


def _decode_portable(q: Tensor, pool: CachePool, layer: int, read: DecodeRead, positions: Tensor) -> Tensor:
    """Products over the live pool block by block, without gathering keys; a softmax over each row's own blocks."""
    (num_live, num_users), (rows, n) = read.users.shape, read.table.shape
    num_kv, dim = pool.keys.shape[2], q.shape[2]
    groups = q.shape[1] // num_kv
    qs = q.index_select(0, read.users.flatten()).view(num_live, num_users, num_kv, groups, dim)
    qs = qs.transpose(1, 2).reshape(num_live, num_kv, num_users * groups, dim)
    scores = qs @ pool.keys[layer, :num_live].transpose(-1, -2)  # [S', K, U * groups, BLOCK]
    scores = scores.view(num_live, num_kv, num_users, groups, BLOCK).transpose(1, 2).reshape(-1, num_kv, groups, BLOCK)
    scores = scores.index_select(0, read.table.flatten()).view(rows, n, num_kv, groups, BLOCK)
    key = read.first[:, None] + torch.arange(n * BLOCK, device=q.device)
    hidden = key > positions[:, None]
    if pool.window is not None:
        hidden |= key <= positions[:, None] - pool.window
    mask = torch.zeros(hidden.shape, device=q.device).masked_fill(hidden, -torch.inf)[:, None, None]
    probs = _softmax(scores.permute(0, 2, 3, 1, 4).reshape(rows, num_kv, groups, n * BLOCK), mask, dim)
    probs = probs.view(rows, num_kv, groups, n, BLOCK).permute(0, 3, 1, 2, 4).reshape(rows * n, num_kv, groups, BLOCK)
    probs = probs.index_select(0, read.source.flatten()).view(num_live, num_users, num_kv, groups, BLOCK)
    probs = probs.transpose(1, 2).reshape(num_live, num_kv, num_users * groups, BLOCK)
    out = (probs @ pool.values[layer, :num_live]).view(num_live, num_kv, num_users, groups, dim)
    out = out.transpose(1, 2).reshape(-1, num_kv, groups, dim).index_select(0, read.table.flatten())
    out = out.view(rows, n, num_kv * groups, dim)
    if n > 1:  # unused table entries point at some block: drop what they gave
        unused = torch.arange(n, device=q.device) >= read.num_blocks[:, None]
        out = out.masked_fill(unused[:, :, None, None], 0)
    return _sum_in_order(out.unbind(1)).to(q.dtype)


def _decode_flash(q: Tensor, pool: CachePool, layer: int, read: DecodeRead) -> Tensor:
    from flash_attn import flash_attn_with_kvcache

    left = -1 if pool.window is None else pool.window - 1
    return flash_attn_with_kvcache(
        q[:, None],
        pool.keys[layer],
        pool.values[layer],
        cache_seqlens=read.lengths,
        block_table=read.blocks,
        causal=True,
        window_size=(left, 0),
    )[:, 0]
