"""Attention layouts and kernel dispatch.

A layout says which sequences the tokens of a stream belong to. `PackedLayout`: whole sequences end to end
(training, scoring, prefill); tokens that several sequences begin with are computed once. `DecodeLayout`: one
new token for each of B cached sequences. `attend` takes either, so the model has one forward.

All kernels compute the same attention. Packed: flash-attn or torch's varlen kernel (CUDA, 16 bit), else
`portable_attention`. Decoding from the cache: `paged_attention` on CUDA, else `portable_attention`.

Positions count from 0 in each sequence. All attention is causal; with window w a token sees itself and the
w - 1 tokens before it. Only the portable kernel takes a mask: `portable_attention.index_packed` makes it for
packed streams, `generation.kv_cache` for decoding. The other kernels take lengths and a window. Padding is in
`padding`.

In shapes: H query heads, K key heads, C channels of a head; T' tokens that the model computes; S blocks.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from minirl.model import portable_attention
from minirl.ranks.process_group import print0

if TYPE_CHECKING:
    from minirl.extras.delta_net.rule import ChunkIndex, DeltaStates

# Tokens of a cache block for `paged_attention`; on the CPU it is `portable_attention.BLOCK`.
PAGED_BLOCK = 128


def kernel_for(device: torch.device, dtype: torch.dtype) -> str:
    """Return the kernel for packed streams: "flash", "varlen" (torch's own) or "portable"."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return "portable"
    return "flash" if has_flash_attn() else "varlen"


@functools.cache
def has_flash_attn() -> bool:
    """Return whether flash-attn's kernel can be imported. Not collective.

    If the package is installed and it cannot, rank 0 prints why, once: it was built for another torch, or a folder has
    its name.
    """
    try:
        from flash_attn import flash_attn_varlen_func  # noqa: F401
    except Exception as error:  # a mismatched build may raise anything
        if not (isinstance(error, ModuleNotFoundError) and error.name == "flash_attn"):
            reason = " ".join(str(error).split())
            print0(f"note: torch's kernel replaces that of flash_attn, which cannot be imported: {reason}")
        return False
    return True


def decode_kernel_for(device: torch.device) -> str:
    """Return the kernel for decoding from a cache: "paged" on CUDA, "portable" on the CPU."""
    return "paged" if device.type == "cuda" else "portable"


def upload(x: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to `device`; to CUDA from pinned memory, so that the host does not wait."""
    if device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def concatenated_ranges(starts: Tensor | Sequence[int], lengths: Tensor | Sequence[int]) -> Tensor:
    """The integers from each start on, as many as its length, end to end: int64 [sum of lengths], on the host."""
    starts = torch.as_tensor(starts, dtype=torch.int64)
    lengths = torch.as_tensor(lengths, dtype=torch.int64)
    ends = lengths.cumsum(0)
    return torch.arange(int(lengths.sum())) + (starts + lengths - ends).repeat_interleave(lengths)


@dataclass(frozen=True)
class CachePool:
    """The cached keys and values of all layers with attention, in S blocks.

    keys [layers, S, K, C, BLOCK] and values [layers, S, K, BLOCK, C], which products can read as they lie.
    index_of_layer: where a layer is among them.
    """

    keys: Tensor
    values: Tensor
    index_of_layer: Mapping[int, int]

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's keys [S, K, C, BLOCK] and values [S, K, BLOCK, C]."""
        index = self.index_of_layer[layer]
        return self.keys[index], self.values[index]


class PagedRead(NamedTuple):
    """What `paged_attention` reads for B requests: block table int32 [B, n], and how many keys each has, int32 [B]."""

    blocks: Tensor
    lengths: Tensor


# What `portable_attention` reads, by window: its index and mask.
PortableRead = Mapping[int | None, tuple[portable_attention.DecodeIndex, Tensor]]


@dataclass(frozen=True)
class Cached:
    """The places int64 [n] where a layout stores its n tokens in the cache; the padding after them is not stored."""

    pool: CachePool
    block: Tensor
    offset: Tensor

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the tokens' k and v, of [T', K, C], into the pool."""
        keys, values = self.pool.of_layer(layer)
        n = len(self.block)
        # Two index tensors with slices between them: the indexed dimension comes first, [n, K, C].
        keys[self.block, :, :, self.offset] = k[:n]
        values[self.block, :, self.offset] = v[:n]


@dataclass(frozen=True)
class PackedLayout:
    """N whole sequences end to end: a stream of T = sum(lengths) tokens. The model computes T' <= T of them.

    shared: a pair (i, n) for each sequence. It begins with the same n tokens as sequence i, which comes
    before it, and those tokens are computed as part of sequence i. A sequence that shares nothing with an
    earlier one has its own number and n = 0. Empty if no sequence shares anything.
    cached: where keys and values are stored, if they are. Then nothing is shared.
    states, slots: likewise, for the state after each sequence; slots int64 [N].
    """

    lengths: tuple[int, ...]
    device: torch.device
    cached: Cached | None = None
    shared: tuple[tuple[int, int], ...] = ()
    states: Mapping[int, "DeltaStates"] = field(default_factory=dict)
    slots: Tensor | None = None

    @functools.cached_property
    def cu_seqlens(self) -> Tensor:
        """The start of each sequence in the stream, and the end of the last one; int32 [N + 1]."""
        return self._upload(_limits(self.lengths))

    @functools.cached_property
    def cu_queries(self) -> Tensor:
        """The same limits among the T' tokens that the model computes; int32 [N + 1]."""
        return self._upload(_limits(self.num_own))

    @functools.cached_property
    def hidden_index(self) -> Tensor:
        """The index of each token of the stream among the model's hidden states, int64 [T].

        For lengths (3, 5), where the second shares 2 tokens with the first: [0, 1, 2, 0, 1, 3, 4, 5].
        """
        return self._upload(torch.cat([torch.arange(0), *self._sequences]))

    @functools.cached_property
    def _sequences(self) -> list[Tensor]:
        """The same of each sequence, on the host."""
        indices: list[Tensor] = []
        num_hidden = 0
        shared = self.shared or ((0, 0),) * len(self.lengths)
        for (parent, num_shared), num_own in zip(shared, self.num_own, strict=True):
            index = torch.arange(num_hidden, num_hidden + num_own)
            if num_shared:
                index = torch.cat([indices[parent][:num_shared], index])
            indices.append(index)
            num_hidden += num_own
        return indices

    @functools.cached_property
    def computed_tokens(self) -> Tensor:
        """The tokens of the stream that the model computes, int64 [T']."""
        ends = itertools.accumulate(self.lengths)
        starts = [end - num_own for end, num_own in zip(ends, self.num_own, strict=True)]
        return self._upload(concatenated_ranges(starts, self.num_own))

    @functools.cached_property
    def positions(self) -> Tensor:
        """The position of each computed token in its sequence, int64 [T']."""
        return self._upload(concatenated_ranges(self.num_shared, self.num_own))

    @functools.cached_property
    def num_shared(self) -> tuple[int, ...]:
        """How many tokens of each sequence are computed as part of another one."""
        return tuple(n for _, n in self.shared) or (0,) * len(self.lengths)

    @functools.cached_property
    def num_own(self) -> tuple[int, ...]:
        """How many tokens of each sequence are computed as its own."""
        return tuple(length - n for length, n in zip(self.lengths, self.num_shared, strict=True))

    def window_index(self, size: int) -> Tensor:
        """The indices of the last `size` tokens up to each computed one among the hidden states, int64 [size, T'].

        The oldest come first. T' stands for a token before the sequence begins.
        """
        ages = torch.arange(size - 1, -1, -1, device=self.device)[:, None]
        seen = self.hidden_index[(self.computed_tokens - ages).clamp(min=0)]
        return torch.where(self.positions >= ages, seen, len(self.positions))

    @functools.cached_property
    def chunk_index(self) -> "ChunkIndex":
        """The chunks of the gated delta rule."""
        from minirl.extras.delta_net.rule import index_chunks

        return index_chunks(self._sequences, sum(self.num_own), self._upload)

    def _upload(self, x: Tensor) -> Tensor:
        return upload(x, self.device)

    def portable_index(self, window: int | None, num_kv: int) -> portable_attention.PackedIndex:
        """Return the portable kernel's index for layers with this window and number of key heads.

        It is made at the first call.
        """
        if (window, num_kv) not in self._portable_indices:
            index = portable_attention.index_packed(
                self.lengths, self.num_shared, self.hidden_index, window=window, num_kv=num_kv
            )
            self._portable_indices[window, num_kv] = index
        return self._portable_indices[window, num_kv]

    @functools.cached_property
    def _portable_indices(self) -> dict[tuple[int | None, int], portable_attention.PackedIndex]:
        return {}


def _limits(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


@dataclass(frozen=True)
class DecodeLayout:
    """One new token for each of B cached sequences, and its position int64 [B].

    states: of each layer with a gated delta net; slots int64 [B]: of each token's sequence.
    rounds: the tokens in parts, one after another, that have one token of a sequence each.
    num_slots: see `delta_rule.run_row`.
    """

    positions: Tensor
    cached: Cached
    read: PagedRead | PortableRead
    states: Mapping[int, "DeltaStates"] = field(default_factory=dict)
    slots: Tensor | None = None
    rounds: Sequence[Tensor | slice] = (slice(None),)
    num_slots: int | None = None


Layout = PackedLayout | DecodeLayout


def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, layer: int, window: int | None) -> Tensor:
    """Causal attention of q [T', H, C] over k and v [T', K, C] and, when decoding, the cache -> [T', H, C].

    Stores k and v in the layout's cache for `layer`, if it has one. The padding of `padding.pad_rows`, which
    follows the layout's tokens, is neither stored nor seen.
    """
    if layout.cached is not None:
        layout.cached.store(layer, k, v)
    if isinstance(layout, DecodeLayout):
        keys, values = layout.cached.pool.of_layer(layer)
        if isinstance(layout.read, PagedRead):
            from minirl.extras.kernels import paged_attention

            return paged_attention.decode(q, keys, values, *layout.read, window=window)
        return portable_attention.decode(q, keys, values, *layout.read[window])
    if not any(layout.num_own):
        # Zeros that depend on all three, so that each has a gradient.
        return 0 * q + 0 * (k.sum() + v.sum())
    kernel = kernel_for(q.device, q.dtype)
    if kernel != "portable":
        return _attend_varlen(q, k, v, layout, window, kernel)
    index = layout.portable_index(window, num_kv=k.shape[1])
    return portable_attention.attend_packed(q, k, v, index)


def _attend_varlen(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, window: int | None, kernel: str
) -> Tensor:
    """Packed attention by flash-attn's or torch's kernel for sequences of varying lengths."""
    if layout.shared:
        # Copy shared keys to each sequence. A sequence then has fewer queries than keys, and the kernels take
        # them for its last tokens. So they are: the tokens computed elsewhere are its first ones.
        k = k.index_select(0, layout.hidden_index)
        v = v.index_select(0, layout.hidden_index)
    # How many keys to the left and right of its position a query sees; -1: all.
    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    if kernel == "flash":
        from flash_attn import flash_attn_varlen_func as attend_sequences

        options["causal"] = True
    else:
        from torch.nn.attention.varlen import varlen_attn as attend_sequences

        if takes_shared_key_heads(attend_sequences):
            options["enable_gqa"] = True
        else:
            groups = q.shape[1] // k.shape[1]
            k = k.repeat_interleave(groups, 1)
            v = v.repeat_interleave(groups, 1)
    limits = layout.cu_queries, layout.cu_seqlens, max(layout.num_own), max(layout.lengths)
    out: Tensor = attend_sequences(q, k, v, *limits, **options)
    return out


@functools.cache
def takes_shared_key_heads(varlen_attn: Callable[..., Any]) -> bool:
    """Return whether torch's kernel takes key heads that query heads share: from torch 2.12 on."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters
