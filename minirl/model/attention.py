"""Attention over packed streams: the only room that knows masks and padding.

A layout says what the tokens of a stream are. `PackedLayout`: whole sequences end to end (training, scoring, prefill),
a prompt that several have in common computed once. `DecodeLayout`: one new token for each of B cached sequences.
`attend` takes either, so the model has one forward.

Kernels with one meaning: flash-attn or torch's varlen kernel where they run (CUDA, 16 bit), else `portable`. Decoding
from the cache: flash-attn, `paged` (CUDA without it), `portable`.
Positions count from 0 in each sequence; all attention is causal; `window` w means a token sees itself and w - 1 before.
"""

import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from minirl.model import paged_attention, portable_attention

FLASH_BLOCK = 256  # tokens of a cache block for flash-attn


@functools.cache
def flash_attn_installed() -> bool:
    """Whether the `flash` extra is there."""
    return importlib.util.find_spec("flash_attn") is not None


def kernel_for(device: torch.device, dtype: torch.dtype) -> str:
    """The attention kernel for tensors like these: "flash", "varlen" (torch's own) or "portable"."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return "portable"
    return "flash" if flash_attn_installed() else "varlen"


def decode_kernel_for(device: torch.device, dtype: torch.dtype) -> str:
    """The kernel that decodes from a cache like this: "flash", "paged" (`paged`'s) or "portable"."""
    if kernel_for(device, dtype) == "flash":
        return "flash"
    return "paged" if device.type == "cuda" and dtype != torch.float64 else "portable"


def upload(x: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`, without waiting for the device: from pinned memory on CUDA."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


@dataclass(frozen=True)
class CachePool:
    """The keys and values of the layers that share one window, in blocks.

    keys [layers, S, K, C, BLOCK] and values [layers, S, K, BLOCK, C] for the portable kernel, whose products read them
    as they lie, and the paged one; both [layers, S, FLASH_BLOCK, K, C] for flash-attn. kernel: `decode_kernel_for`.
    """

    keys: Tensor
    values: Tensor
    window: int | None
    kernel: str

    def write(self, layer: int, k: Tensor, v: Tensor, block: Tensor, offset: Tensor) -> None:
        """Store k, v [n, K, C] of n tokens at (block, offset) [n], in the pool's `layer`-th layer."""
        if self.kernel == "flash":
            self.keys[layer][block, offset] = k
            self.values[layer][block, offset] = v
        else:
            self.keys[layer][block, :, :, offset] = k
            self.values[layer][block, :, offset] = v


@dataclass(frozen=True)
class PoolWrite:
    """Where tokens of a stream go in a pool: `token` [n] of the stream (None: all) is stored at (`block`, `offset`)."""

    token: Tensor | None
    block: Tensor
    offset: Tensor


@dataclass(frozen=True)
class Cached:
    """One pool as seen by a layout: what to store there and, when decoding, what to read."""

    pool: CachePool
    write: PoolWrite
    read: "DecodeRead | None" = None

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keep what is to be kept of k, v [T', K, C], in the pool's `layer`-th layer."""
        block, offset = self.write.block, self.write.offset
        kept = slice(0, len(block)) if self.write.token is None else self.write.token
        self.pool.write(layer, k[kept], v[kept], block, offset)


@dataclass(frozen=True)
class DecodeRead:
    """What B rows read: their block table [B, n] and the number of keys from the first block on, lengths [B], int32.

    For the portable kernel also the plan and the additive mask of those keys [B, 1, 1, n x BLOCK].
    """

    blocks: Tensor
    lengths: Tensor
    plan: portable_attention.DecodeIndex | None = None
    mask: Tensor | None = None


@dataclass(frozen=True)
class PackedLayout:
    """N whole sequences end to end, T = sum(lengths): the stream. The model computes T' <= T rows for it.

    `shared`, if given, has for each sequence (i, n): it begins with the same n tokens as sequence i, which is before it
    (or itself, with n = 0). Those tokens are computed once, as rows of sequence i.
    `caches` maps a layer to its pool, and its place there, when keys are to be kept (then nothing is shared).
    """

    lengths: tuple[int, ...]
    device: torch.device
    caches: dict[int, tuple[Cached, int]] = field(default_factory=dict)
    shared: tuple[tuple[int, int], ...] = ()

    @functools.cached_property
    def cu_seqlens(self) -> Tensor:
        """Starts of the sequences in the stream and the end of the last, int32 [N + 1]."""
        return upload(_cumulative(self.lengths), self.device)

    @functools.cached_property
    def cu_queries(self) -> Tensor:
        """As `cu_seqlens`, of the model's rows."""
        return upload(_cumulative(self.num_own), self.device)

    @functools.cached_property
    def hidden_index(self) -> Tensor:
        """The model's row of each token of the stream, int64 [T]."""
        rows: list[Tensor] = []
        end = 0
        for i, length in enumerate(self.lengths):
            parent, n = self.shared[i] if self.shared else (i, 0)
            own = torch.arange(end, end := end + length - n)
            rows.append(torch.cat([rows[parent][:n], own]) if n else own)
        return upload(torch.cat([torch.arange(0), *rows]), self.device)

    @functools.cached_property
    def computed_tokens(self) -> Tensor:
        """The token of the stream that each of the model's rows is, int64 [T']."""
        spans, end = [], 0
        for length, n in zip(self.lengths, self.num_shared, strict=True):
            spans.append(torch.arange(end + n, end := end + length))
        return upload(torch.cat([torch.arange(0), *spans]), self.device)

    @functools.cached_property
    def positions(self) -> Tensor:
        """Position in its sequence of each of the model's rows, int64 [T']."""
        spans = map(torch.arange, self.num_shared, self.lengths)
        return upload(torch.cat([torch.arange(0), *spans]), self.device)

    @functools.cached_property
    def num_shared(self) -> tuple[int, ...]:
        """How many tokens each sequence has from another."""
        return tuple(n for _, n in self.shared) or (0,) * len(self.lengths)

    @functools.cached_property
    def num_own(self) -> tuple[int, ...]:
        """How many rows of the model each sequence has."""
        return tuple(length - n for length, n in zip(self.lengths, self.num_shared, strict=True))

    def plan(self, window: int | None, num_kv: int) -> portable_attention.PackedIndex:
        """The portable kernel's plan for layers with this window and number of key heads, made once."""
        if (window, num_kv) not in self._plans:
            plan = portable_attention.index_packed(
                self.lengths, self.num_shared, self.hidden_index, window=window, num_kv=num_kv
            )
            self._plans[window, num_kv] = plan
        return self._plans[window, num_kv]

    @functools.cached_property
    def _plans(self) -> dict[tuple[int | None, int], portable_attention.PackedIndex]:
        return {}


def _cumulative(lengths: Sequence[int]) -> Tensor:
    return F.pad(torch.tensor(lengths, dtype=torch.int64).cumsum(0), (1, 0)).to(torch.int32)


@dataclass(frozen=True)
class DecodeLayout:
    """One new token for each of B cached sequences; `positions` int64 [B] are the new tokens' own."""

    positions: Tensor
    caches: dict[int, tuple[Cached, int]]


Layout = PackedLayout | DecodeLayout


def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, layer: int, window: int | None) -> Tensor:
    """Causal attention of q [T', H, C] over k, v [T', K, C] (and, when decoding, over the cache) -> [T', H, C].

    Stores k and v in the layout's cache for `layer`, where it has one. Rows beyond the layout's (the padding of
    `numerics.pad_rows`) are neither stored nor seen.
    """
    cached, index = layout.caches.get(layer, (None, 0))
    if cached is not None:
        cached.store(index, k, v)
    if isinstance(layout, PackedLayout):
        kernel = kernel_for(q.device, q.dtype)
        if kernel == "portable":
            return portable_attention.attend_packed(q, k, v, layout.plan(window, k.shape[1]))
        return _attend_varlen(q, k, v, layout, window, kernel)
    assert cached is not None, f"layer {layer} has no cache to decode from"
    assert cached.read is not None, f"layer {layer} has no block table to decode from"
    pool, read = cached.pool, cached.read
    if pool.kernel == "flash":
        return _decode_flash(q, pool, index, read)
    keys, values = pool.keys[index], pool.values[index]
    if pool.kernel == "paged":
        return paged_attention.decode(q, keys, values, read.blocks, read.lengths, window=pool.window)
    assert read.plan is not None, "the cache was laid out for another kernel"
    assert read.mask is not None, "the cache was laid out for another kernel"
    return portable_attention.decode(q, keys, values, read.plan, read.mask)


def _attend_varlen(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, window: int | None, kernel: str
) -> Tensor:
    longest = max(layout.lengths, default=0)
    if longest == 0:
        return q + 0 * (k.sum() + v.sum())
    cu_k, cu_q, max_q = layout.cu_seqlens, layout.cu_queries, max(layout.num_own)
    if layout.shared:  # queries are the last of their sequence's keys, which the kernels take for granted
        k, v = k.index_select(0, layout.hidden_index), v.index_select(0, layout.hidden_index)
    left = -1 if window is None else window - 1
    if kernel == "flash":
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, longest, causal=True, window_size=(left, 0))
    from torch.nn.attention.varlen import varlen_attn

    groups = q.shape[1] // k.shape[1]  # torch 2.11 has no flag for shared key heads, so they are repeated
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    out = varlen_attn(q, k, v, cu_q, cu_k, max_q, longest, window_size=(left, 0))
    assert isinstance(out, Tensor)
    return out


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
