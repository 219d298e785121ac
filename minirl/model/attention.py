"""Attention layouts and kernel dispatch.

A layout says which sequences the tokens of a stream belong to. `PackedLayout`: whole sequences end to end
(training, scoring, prefill); tokens that several sequences begin with are computed once. `DecodeLayout`: one
new token for each of B cached sequences. `attend` takes either, so the model has one forward.

All kernels compute the same attention. Packed: flash-attn or torch's varlen kernel (CUDA, 16 bit, heads of up
to 256 channels, a multiple of 8), else `portable_attention`. Decoding from the cache: `paged_attention` on CUDA,
else `portable_attention`.

Positions count from 0 in each sequence. All attention is causal; with window w a token sees itself and the
w - 1 tokens before it. Only the portable kernel takes a mask: `portable_attention.index_packed` makes it for
packed streams, `generation.kv_cache` for decoding. The other kernels take lengths and a window. Padding is in
`padding`.

In shapes: H query heads, K key heads, C channels of a head; T' tokens that the model computes; S blocks.
"""

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from minirl.model import portable_attention
from minirl.ranks.process_group import print0

Made = TypeVar("Made")

# Tokens of a cache block for `paged_attention`; on the CPU it is `portable_attention.BLOCK`.
PAGED_BLOCK = 128


def kernel_for(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Return the kernel for packed streams: "flash", "varlen" (torch's own) or "portable"."""
    if device.type != "cuda" or dtype.itemsize != 2 or head_dim % 8 or head_dim > 256:
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


def upload(x: Tensor | np.ndarray, device: torch.device) -> Tensor:
    """Copy a host tensor or array to `device`; to CUDA from pinned memory, so that the host does not wait."""
    host = torch.as_tensor(x)
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


def concatenated_ranges(starts: ArrayLike, lengths: ArrayLike) -> np.ndarray:
    """The integers from each start on, as many as its length, end to end: int64 [sum of lengths].

    starts, lengths: integers [n], as arrays or lists; starts may be one integer for all.
    """
    counts = np.asarray(lengths, np.int64)
    # How much larger the integers are than those from 0 on.
    shifts = np.asarray(starts, np.int64) + counts - counts.cumsum()
    return np.arange(counts.sum()) + shifts.repeat(counts)


class CachePool(NamedTuple):
    """The cached keys and values of all layers with attention, in S blocks.

    keys [layers, S, K, C, BLOCK] and values [layers, S, K, BLOCK, C], which products can read as they lie.
    layers: the keys and values of each layer, which are views.
    states: what layers without attention cache for each row; they alone read it.
    """

    keys: Tensor
    values: Tensor
    layers: Mapping[int, tuple[Tensor, Tensor]]
    states: Any


class PagedMetadata(NamedTuple):
    """What `paged_attention` reads for B requests: block table int32 [B, n], and how many keys each has, int32 [B]."""

    blocks: Tensor
    lengths: Tensor


# What `portable_attention` reads, by window: its index and mask.
PortableMetadata = Mapping[int | None, tuple[portable_attention.DecodeIndex, Tensor]]


class SlotMapping(NamedTuple):
    """Where the tokens of a layout are cached.

    rows int64: the cache row of each sequence in a `PackedLayout`, and of each token in a `DecodeLayout`.
    block, offset int64 [n]: where keys and values of the n tokens are stored.
    """

    pool: CachePool
    rows: Tensor
    block: Tensor
    offset: Tensor

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the tokens' k and v, of [T', K, C], into the pool."""
        keys, values = self.pool.layers[layer]
        # Two index tensors with slices between them: the indexed dimension comes first, [n, K, C].
        keys[self.block, :, :, self.offset] = k
        values[self.block, :, self.offset] = v


class _Memo:
    """Keeps what is derived from a layout, such as the indices that all layers of a forward pass share."""

    def derive(self, make: Callable[..., Made], *args: Hashable) -> Made:
        """Return make(self, *args), which is made at the first call with these arguments."""
        key = (make, *args)
        if key not in self._derived:
            self._derived[key] = make(self, *args)
        return self._derived[key]

    @functools.cached_property
    def _derived(self) -> dict[Hashable, Any]:
        return {}


class Sequence(NamedTuple):
    """A sequence of a packed stream. Its first `num_shared` tokens are those of the sequence with index `parent`.

    The parent comes before it in the stream, and may itself share tokens with another sequence. None: it shares none.
    """

    length: int
    parent: int | None = None
    num_shared: int = 0


@dataclass(frozen=True)
class PackedLayout(_Memo):
    """N whole sequences end to end.

    The stream has T tokens, the sum of the lengths. The model computes T' <= T of them: tokens that a sequence shares
    with its parent are computed once, as part of the parent. For example, with the sequences `Sequence(3)` and
    `Sequence(5, parent=0, num_shared=2)` T is 8, and T' is 6:

        stream            a  b  c  a  b  d  e  f
        hidden_index      0  1  2  0  1  3  4  5     the index of each of the T tokens among the T' hidden states
        computed_tokens   0  1  2        5  6  7     the index of each of the T' tokens in the stream
        positions         0  1  2        2  3  4     of each of the T' tokens in its sequence

    slot_mapping: where keys and values are stored, if they are. Then nothing is shared.
    """

    sequences: tuple[Sequence, ...]
    device: torch.device
    slot_mapping: SlotMapping | None = None

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """How many tokens each sequence has, int64 [N]."""
        return np.array([sequence.length for sequence in self.sequences], np.int64)

    @functools.cached_property
    def num_shared(self) -> np.ndarray:
        """How many tokens of each sequence are computed as part of its parent, int64 [N]."""
        return np.array([sequence.num_shared for sequence in self.sequences], np.int64)

    @property
    def num_computed(self) -> np.ndarray:
        """How many tokens of each sequence are computed as its own, int64 [N]."""
        return self.lengths - self.num_shared

    @functools.cached_property
    def cu_seqlens(self) -> Tensor:
        """The start of each sequence in the stream, and the end of the last one; int32 [N + 1]."""
        return self._cumulative_lengths(self.lengths)

    @functools.cached_property
    def cu_queries(self) -> Tensor:
        """The same limits among the T' tokens that the model computes; int32 [N + 1]."""
        return self._cumulative_lengths(self.num_computed)

    @functools.cached_property
    def hidden_rows(self) -> list[np.ndarray]:
        """The index of each sequence's tokens among the model's hidden states; int64 [length] each, on the host."""
        rows: list[np.ndarray] = []
        num_hidden = 0
        for length, parent, num_shared in self.sequences:
            end = num_hidden + length - num_shared
            row = np.arange(num_hidden, end)
            if parent is not None:
                row = np.concatenate([rows[parent][:num_shared], row])
            rows.append(row)
            num_hidden = end
        return rows

    @functools.cached_property
    def hidden_index(self) -> Tensor:
        """The index of each token of the stream among the model's hidden states, int64 [T]."""
        return upload(np.concatenate([np.arange(0), *self.hidden_rows]), self.device)

    @functools.cached_property
    def computed_tokens(self) -> Tensor:
        """The tokens of the stream that the model computes, int64 [T']."""
        first_tokens = self.lengths.cumsum() - self.num_computed
        return upload(concatenated_ranges(first_tokens, self.num_computed), self.device)

    @functools.cached_property
    def positions(self) -> Tensor:
        """The position of each computed token in its sequence, int64 [T']."""
        return upload(concatenated_ranges(self.num_shared, self.num_computed), self.device)

    def _cumulative_lengths(self, lengths: np.ndarray) -> Tensor:
        return upload(np.append(0, lengths.cumsum()).astype(np.int32), self.device)


@dataclass(frozen=True)
class DecodeLayout(_Memo):
    """The next tokens of cached sequences, and their positions int64 [B].

    tokens_per_sequence: None if each token is of another sequence; else how many consecutive tokens each sequence has.
    """

    positions: Tensor
    slot_mapping: SlotMapping
    metadata: PagedMetadata | PortableMetadata
    tokens_per_sequence: tuple[int, ...] | None = None


Layout = PackedLayout | DecodeLayout


def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, layer: int, window: int | None) -> Tensor:
    """Causal attention of q [T', H, C] over k and v [T', K, C] and, when decoding, the cache -> [T', H, C].

    Stores k and v in the layout's cache for `layer`, if it has one.
    """
    if layout.slot_mapping is not None:
        layout.slot_mapping.store(layer, k, v)
    if isinstance(layout, DecodeLayout):
        keys, values = layout.slot_mapping.pool.layers[layer]
        if isinstance(layout.metadata, PagedMetadata):
            from minirl.extras.kernels import paged_attention

            return paged_attention.decode(q, keys, values, *layout.metadata, window=window)
        return portable_attention.decode(q, keys, values, *layout.metadata[window])
    if len(layout.positions) == 0:
        # Zeros that depend on all three, so that each has a gradient.
        return 0 * q + 0 * (k.sum() + v.sum())
    kernel = kernel_for(q.device, q.dtype, q.shape[-1])
    if kernel != "portable":
        return _attend_varlen(q, k, v, layout, window, kernel)
    index = layout.derive(_portable_index, window, k.shape[1])
    return portable_attention.attend_packed(q, k, v, index)


def _portable_index(
    layout: PackedLayout, window: int | None, num_kv_heads: int
) -> portable_attention.PackedIndex:
    """The portable kernel's index for layers with this window and number of key heads."""
    return portable_attention.index_packed(
        layout.lengths, layout.num_shared, layout.hidden_index, window=window, num_kv_heads=num_kv_heads
    )


def _attend_varlen(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, window: int | None, kernel: str
) -> Tensor:
    """Packed attention by flash-attn's or torch's kernel for sequences of varying lengths."""
    if layout.num_shared.any():
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

        if supports_gqa(attend_sequences):
            options["enable_gqa"] = True
        else:
            groups = q.shape[1] // k.shape[1]
            k = k.repeat_interleave(groups, 1)
            v = v.repeat_interleave(groups, 1)
    longest = int(layout.num_computed.max()), int(layout.lengths.max())
    return attend_sequences(q, k, v, layout.cu_queries, layout.cu_seqlens, *longest, **options)


@functools.cache
def supports_gqa(varlen_attn: Callable[..., Any]) -> bool:
    """Return whether torch's kernel takes key heads that query heads share: from torch 2.12 on."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters
