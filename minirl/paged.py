"""Decode attention on CUDA without flash-attn: a Triton kernel over the portable kernel's pools.

One program per row and key head walks the row's block table with a running softmax in fp32; nothing is planned on the
host, and shapes depend on the number of rows alone. Sums run in another order than in `portable`: no bits are promised.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from minirl.portable import BLOCK

MIN_SIDE = 16  # the least side of a tensor core's product
tl: Any = None  # triton.language, set by `_kernel`: Triton looks it up among the globals of a kernel's module


@functools.cache
def _kernel() -> Any:
    global tl
    import triton.language

    tl = triton.language

    @triton.jit
    def decode_rows(  # type: ignore[no-untyped-def]
        q, keys, values, table, lengths, out, scale, table_width,
        NUM_KV: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
        TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        row, head = tl.program_id(0), tl.program_id(1)
        length = tl.load(lengths + row)
        first = tl.maximum(length - WINDOW, 0) if WINDOW else 0
        member, column, key = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, TILE)
        place = ((row * NUM_KV + head) * GROUPS + member[:, None]) * DIM + column[None, :]
        is_member, is_column = member < GROUPS, column < DIM
        queries = tl.load(q + place, mask=is_member[:, None] & is_column[None, :], other=0.0)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        weight = tl.zeros([ROWS], tl.float32)
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        for start in range(first // TILE * TILE, length, TILE):
            block = tl.load(table + row * table_width + start // BLOCK).to(tl.int64)  # a pool may exceed 2^31 elements
            base, offset = (block * NUM_KV + head) * DIM * BLOCK, start % BLOCK + key
            # What is not seen is not read: the pool is not cleared, and 0 x NaN is NaN.
            is_seen = (start + key < length) & (start + key >= first)
            k_place, v_place = column[:, None] * BLOCK + offset[None, :], offset[:, None] * DIM + column[None, :]
            k = tl.load(keys + base + k_place, mask=is_column[:, None] & is_seen[None, :], other=0.0)
            v = tl.load(values + base + v_place, mask=is_seen[:, None] & is_column[None, :], other=0.0)
            scores = tl.dot(queries, k, input_precision="ieee") * scale
            scores = tl.where(is_seen[None, :], scores, float("-inf"))
            peak = tl.maximum(highest, tl.max(scores, 1))  # finite: each tile has a key that is seen
            probs, shrink = tl.exp2(scores - peak[:, None]), tl.exp2(highest - peak)
            weight = weight * shrink + tl.sum(probs, 1)
            total = total * shrink[:, None] + tl.dot(probs.to(v.dtype), v, input_precision="ieee")
            highest = peak
        mean = (total / weight[:, None]).to(out.dtype.element_ty)
        tl.store(out + place, mean, mask=is_member[:, None] & is_column[None, :])

    return decode_rows


def constants(num_heads: int, num_kv: int, dim: int, window: int | None) -> dict[str, int]:
    """What the kernel is compiled for; TILE keys per product take at most 80 kB of shared memory, in fp32."""
    groups = num_heads // num_kv
    sides = {name: max(MIN_SIDE, 1 << (n - 1).bit_length()) for name, n in (("ROWS", groups), ("COLUMNS", dim))}
    return dict(NUM_KV=num_kv, GROUPS=groups, DIM=dim, WINDOW=window or 0, BLOCK=BLOCK, TILE=BLOCK // 2, **sides)


def decode(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, *, window: int | None) -> Tensor:
    """Attention of the newest tokens q [B, H, C] over a pool's keys [S, K, C, BLOCK] and values [S, K, BLOCK, C].

    table int32 [B, n]; lengths int32 [B], at least 1: the keys from the first block of a row's table on, the newest
    included. A row sees the last `window` of them. Rows of q beyond the table's are not computed. Waits for nothing.
    """
    (num_heads, dim), num_kv, rows = q.shape[1:], keys.shape[1], len(lengths)
    assert keys.is_contiguous() and values.is_contiguous(), "the kernel computes the places of keys"  # noqa: PT018
    q = q.contiguous()
    out, scale = torch.empty_like(q), math.log2(math.e) / math.sqrt(dim)
    compiled_for = constants(num_heads, num_kv, dim, window)
    _kernel()[rows, num_kv](q, keys, values, table, lengths, out, scale, table.stride(0), **compiled_for)
    return out
