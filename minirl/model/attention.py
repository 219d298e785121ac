"""Attention layouts and kernel dispatch.

A layout assigns packed tokens to sequences. A `PackedLayout` holds whole sequences laid end to end, as in training,
scoring and prefill; a prefix that several sequences share is processed only once. A `DecodeLayout` contains the next
tokens of cached sequences. `attend` accepts either layout, so the model needs only one forward.

All kernels compute the same attention. Packed sequences use flash-attn or torch's varlen kernel (CUDA, 16-bit dtypes,
head dimension up to 256 and a multiple of 8); all other cases use `portable_attention`. Decoding uses `paged_attention`
on CUDA and `portable_attention` on the CPU.

Positions start at 0 in each sequence. Attention is always causal; with window w, a token attends to itself and the w -
1 tokens before it. Only the portable kernel takes a mask, built by `portable_attention.build_packed_index` for packed
sequences and by `generation.kv_cache` for decoding. The other kernels take lengths and a window. `padding` handles
padding.

Shapes: H query heads, K key/value (KV) heads, C channels per head; T' computed tokens; S cache blocks.
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

Derived = TypeVar("Derived")

# Number of tokens per cache block for `paged_attention`. On the CPU, a cache block has `portable_attention.BLOCK`
# tokens.
PAGED_BLOCK = 128


def kernel_for(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Return the kernel for packed sequences: "flash", "varlen" (torch's built-in kernel) or "portable"."""
    if device.type != "cuda" or dtype.itemsize != 2 or head_dim % 8 or head_dim > 256:
        return "portable"
    return "flash" if has_flash_attn() else "varlen"


@functools.cache
def has_flash_attn() -> bool:
    """Return whether flash-attn's kernel can be imported. Not collective.

    If the package is installed but fails to import, rank 0 prints the reason once. Typical reasons are a build for a
    different torch version and a local folder that shadows the package.
    """
    try:
        from flash_attn import flash_attn_varlen_func  # noqa: F401
    except Exception as error:  # a mismatched build may raise anything
        if not (isinstance(error, ModuleNotFoundError) and error.name == "flash_attn"):
            reason = " ".join(str(error).split())
            print0(f"note: cannot import flash_attn, so attention uses torch's varlen kernel: {reason}")
        return False
    return True


def decode_kernel_for(device: torch.device) -> str:
    """Return the kernel for decoding with a cache: "paged" on CUDA, "portable" on the CPU."""
    return "paged" if device.type == "cuda" else "portable"


def to_device(x: Tensor | np.ndarray, device: torch.device) -> Tensor:
    """Copy a host tensor or array to `device`; for CUDA, pin its memory first, so the copy does not block the host."""
    host_tensor = torch.as_tensor(x)
    if device.type == "cuda":
        return host_tensor.pin_memory().to(device, non_blocking=True)
    return host_tensor.to(device)


def concatenated_ranges(starts: ArrayLike, lengths: ArrayLike) -> np.ndarray:
    """Return the integers from each start to start + length - 1, concatenated: int64 [sum of lengths].

    starts, lengths: integers [n], as arrays or lists; `starts` may be a single integer for all ranges.
    """
    range_lengths = np.asarray(lengths, np.int64)
    # Each range is a slice of one long np.arange plus a constant shift.
    shifts = np.asarray(starts, np.int64) + range_lengths - range_lengths.cumsum()
    return np.arange(range_lengths.sum()) + shifts.repeat(range_lengths)


class CachePool(NamedTuple):
    """The cached keys and values of all attention layers, in S blocks.

    keys [layers, S, K, C, BLOCK], values [layers, S, K, BLOCK, C]: with these shapes, matmuls need no transpose.
    layers: views of each layer's keys and values, keyed by layer index.
    recurrent_states: per-row states of the layers without attention, or None if the model has no such layers.
    """

    keys: Tensor
    values: Tensor
    layers: Mapping[int, tuple[Tensor, Tensor]]
    recurrent_states: Any


class PagedMetadata(NamedTuple):
    """Metadata of B requests for `paged_attention`: block tables int32 [B, n] and key counts int32 [B]."""

    blocks: Tensor
    lengths: Tensor


# Metadata for `portable_attention`: an index and a mask for each window size.
PortableMetadata = Mapping[int | None, tuple[portable_attention.DecodeIndex, Tensor]]


class SlotMapping(NamedTuple):
    """The cache slots for the keys and values of a layout's tokens.

    rows int64: cache rows, one per sequence in a `PackedLayout` and one per token in a `DecodeLayout`.
    block, offset int64 [n]: each token's block, and the token's offset in that block.
    """

    pool: CachePool
    rows: Tensor
    block: Tensor
    offset: Tensor

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the tokens' keys k and values v [T', K, C] to the pool."""
        keys, values = self.pool.layers[layer]
        # With two index tensors separated by slices, the indexed dimension comes first: [n, K, C].
        keys[self.block, :, :, self.offset] = k
        values[self.block, :, self.offset] = v


class _Memo:
    """Caches values derived from a layout, such as the indices that all layers of a forward pass share."""

    def memoize(self, make: Callable[..., Derived], *args: Hashable) -> Derived:
        """Return make(self, *args), computed only once per set of arguments."""
        key = (make, *args)
        if key not in self._memoized_values:
            self._memoized_values[key] = make(self, *args)
        return self._memoized_values[key]

    @functools.cached_property
    def _memoized_values(self) -> dict[Hashable, Any]:
        return {}


class Sequence(NamedTuple):
    """One of several packed sequences. The first `num_shared_tokens` tokens are shared with the sequence at index
    `parent`.

    The parent comes earlier in the batch and may itself have a parent. A sequence without a parent shares no tokens.
    """

    length: int
    parent: int | None = None
    num_shared_tokens: int = 0


@dataclass(frozen=True)
class PackedLayout(_Memo):
    """N whole sequences, concatenated end to end.

    The packed batch has T tokens, the sum of the lengths. The model processes only T' <= T tokens (the computed
    tokens), because tokens shared with a parent are processed once, as part of the parent. For example, with the
    sequences `Sequence(3)` and `Sequence(5, parent=0, num_shared_tokens=2)`, T is 8 and T' is 6:

        packed tokens     a  b  c  a  b  d  e  f
        hidden_index      0  1  2  0  1  3  4  5     index of each packed token in the T' hidden states
        computed_tokens   0  1  2        5  6  7     index of each of the T' computed tokens among the T packed tokens
        positions         0  1  2        2  3  4     position of each computed token in its sequence

    slot_mapping: cache slots for the keys and values, or None without a cache. Cached sequences share no tokens.
    """

    sequences: tuple[Sequence, ...]
    device: torch.device
    slot_mapping: SlotMapping | None = None

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Number of tokens per sequence, int64 [N]."""
        return np.array([sequence.length for sequence in self.sequences], np.int64)

    @functools.cached_property
    def num_shared_tokens(self) -> np.ndarray:
        """Number of tokens that each sequence shares with its parent, int64 [N]."""
        return np.array([sequence.num_shared_tokens for sequence in self.sequences], np.int64)

    @property
    def query_lengths(self) -> np.ndarray:
        """Number of tokens that each sequence does not share with its parent, int64 [N]."""
        return self.lengths - self.num_shared_tokens

    @functools.cached_property
    def cu_seqlens(self) -> Tensor:
        """Cumulative sequence lengths: where each packed sequence starts, and the total; int32 [N + 1]."""
        return self._cumulative_lengths(self.lengths)

    @functools.cached_property
    def cu_seqlens_q(self) -> Tensor:
        """Cumulative query counts: each sequence's start among the T' computed tokens, then T'; int32 [N + 1]."""
        return self._cumulative_lengths(self.query_lengths)

    @functools.cached_property
    def hidden_state_rows(self) -> list[np.ndarray]:
        """For each sequence, the indices of its tokens in the model's hidden states, int64 [length], on the host."""
        rows: list[np.ndarray] = []
        num_hidden_states = 0
        for length, parent, num_shared_tokens in self.sequences:
            end = num_hidden_states + length - num_shared_tokens
            sequence_rows = np.arange(num_hidden_states, end)
            if parent is not None:
                sequence_rows = np.concatenate([rows[parent][:num_shared_tokens], sequence_rows])
            rows.append(sequence_rows)
            num_hidden_states = end
        return rows

    @functools.cached_property
    def hidden_index(self) -> Tensor:
        """Index of each packed token in the model's hidden states, int64 [T]."""
        return to_device(np.concatenate([np.arange(0), *self.hidden_state_rows]), self.device)

    @functools.cached_property
    def computed_tokens(self) -> Tensor:
        """Index of each computed token among the packed tokens, int64 [T']."""
        first_computed_index = self.lengths.cumsum() - self.query_lengths
        return to_device(concatenated_ranges(first_computed_index, self.query_lengths), self.device)

    @functools.cached_property
    def positions(self) -> Tensor:
        """Position of each computed token in its sequence, int64 [T']."""
        return to_device(concatenated_ranges(self.num_shared_tokens, self.query_lengths), self.device)

    def _cumulative_lengths(self, lengths: np.ndarray) -> Tensor:
        return to_device(np.append(0, lengths.cumsum()).astype(np.int32), self.device)


@dataclass(frozen=True)
class DecodeLayout(_Memo):
    """The next tokens of cached sequences, and their positions int64 [B].

    tokens_per_sequence: number of consecutive tokens per sequence; None if each token belongs to a different sequence.
    """

    positions: Tensor
    slot_mapping: SlotMapping
    metadata: PagedMetadata | PortableMetadata
    tokens_per_sequence: tuple[int, ...] | None = None


Layout = PackedLayout | DecodeLayout


def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, layer: int, window: int | None) -> Tensor:
    """Compute causal attention of q [T', H, C] over k and v [T', K, C] -> [T', H, C]; decoding also reads the cache.

    If the layout has a slot mapping, first store k and v in the cache of layer `layer`.
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
        # Return zeros that depend on q, k and v, so that each of the three gets a gradient.
        return 0 * q + 0 * (k.sum() + v.sum())
    kernel = kernel_for(q.device, q.dtype, q.shape[-1])
    if kernel != "portable":
        return _attend_varlen(q, k, v, layout, window, kernel)
    index = layout.memoize(portable_attention.build_packed_index, window, k.shape[1])
    return portable_attention.attend_packed(q, k, v, index)


def _attend_varlen(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, window: int | None, kernel: str
) -> Tensor:
    """Compute packed attention with flash-attn's or torch's varlen kernel."""
    if layout.num_shared_tokens.any():
        # Copy shared keys and values to each sequence. A sequence then has fewer queries than keys, and the kernels
        # align the queries with the last keys. This alignment is correct, because the shared tokens come first.
        k = k.index_select(0, layout.hidden_index)
        v = v.index_select(0, layout.hidden_index)
    # Maximum number of keys to the left and to the right that a query attends to; -1 means no limit.
    kernel_options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    if kernel == "flash":
        from flash_attn import flash_attn_varlen_func as attend_sequences

        kernel_options["causal"] = True
    else:
        from torch.nn.attention.varlen import varlen_attn as attend_sequences

        if supports_gqa(attend_sequences):
            kernel_options["enable_gqa"] = True
        else:
            num_queries_per_kv = q.shape[1] // k.shape[1]
            k = k.repeat_interleave(num_queries_per_kv, 1)
            v = v.repeat_interleave(num_queries_per_kv, 1)
    max_lengths = int(layout.query_lengths.max()), int(layout.lengths.max())
    return attend_sequences(q, k, v, layout.cu_seqlens_q, layout.cu_seqlens, *max_lengths, **kernel_options)


@functools.cache
def supports_gqa(varlen_attn: Callable[..., Any]) -> bool:
    """Return whether torch's varlen kernel supports grouped-query attention (torch 2.12 and later)."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters
